"""The engine's optimizer and torch's of the same kind, side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from _fake_engine import FakeEngine, gradients
from ps_core import SGD, Adam, AdamW, Group

ADAMW = AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
ADAM = Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
MOMENTUM = SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
NO_DECAY = (Group(match=lambda name, parameter: name.endswith("bias"), weight_decay=0.0, lr=0.02),)
Spec = AdamW | Adam | SGD


def twin(spec: Spec, of: nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer of the same kind, groups and numbers."""
    kind = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam, SGD: torch.optim.SGD}[type(spec)]
    names = [name for name in ("lr", "betas", "eps", "momentum", "weight_decay") if hasattr(spec, name)]
    groups: list[dict[str, Any]] = [{"params": []}, *({"params": [], **each.overrides} for each in spec.groups)]
    for name, parameter in of.named_parameters():
        found = [i for i, each in enumerate(spec.groups, 1) if each.match(name, parameter)]
        groups[found[0] if found else 0]["params"].append(parameter)
    return kind(groups, **{name: getattr(spec, name) for name in names})


def steps(optimizer: torch.optim.Optimizer, of: nn.Module, seeds: range, engine: FakeEngine | None = None) -> None:
    for seed in seeds:
        grads = gradients(of, seed)
        if engine is not None:
            engine.put(grads)
        else:
            for parameter, grad in zip(of.parameters(), grads, strict=True):
                parameter.grad = grad
        optimizer.step()


def assert_near(got: nn.Module, expected: nn.Module, before: list[torch.Tensor], count: int) -> None:
    """``count`` steps' rounding: each at most 2 units of what is larger, the parameter or its whole way so far."""
    eps = torch.finfo(torch.float32).eps
    for start, one, other in zip(before, got.parameters(), expected.parameters(), strict=True):
        one, other = one.detach(), other.detach()
        assert not torch.equal(one, start), "nothing moved"
        room = 2 * count * eps * torch.maximum(other.abs(), count * (other - start).abs().max())
        assert bool(((one - other).abs() <= room).all())


def with_groups(spec: Spec, groups: tuple[Group, ...]) -> Spec:
    return type(spec)(**{**{name: getattr(spec, name) for name in spec.__slots__}, "groups": groups})

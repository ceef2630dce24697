"""A small model whose optimizer's states are looked at, and what a state dict holds of masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ps_core import SGD, AdamW, Budget, Options
from ps_core.engine import chunked

ADAMW, MOMENTUM = AdamW(lr=0.01, weight_decay=0.1), SGD(lr=0.1, momentum=0.9)


def stack(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))


def loss_of(model: nn.Module, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return model(torch.randn(4, 24, generator=generator)).float().square().mean()


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for index in range(first, last):
        loss = loss_of(model, index)
        (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(
    spec: Any = ADAMW, precision: str = "bf16", seed: int = 0, made: Any = None, **more: Any
) -> tuple[nn.Module, Any]:
    told = {
        "device": "emulated",
        "budget": Budget(device="32KiB", host="1MiB"),
        "options": Options(group_bytes=2048),
    } | more
    return chunked(made or stack(seed), spec, precision=precision, **told)


def state_of(optimizer: Any) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = optimizer.state_dict(masters=True)["state"]
    return found


def assert_same_states(one: Any, other: Any) -> None:
    mine, theirs = state_of(one), state_of(other)
    assert mine.keys() == theirs.keys()
    for index, entry in theirs.items():
        assert mine[index].keys() == entry.keys()
        for name, value in entry.items():
            assert torch.equal(mine[index][name], value), (index, name)


def masters_of(state: dict[str, Any]) -> dict[int, Tensor]:
    """By the parameter's index, as they are in each one's entry."""
    return {index: entry["master"] for index, entry in state["state"].items() if "master" in entry}

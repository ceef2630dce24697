"""Gradients that wait in sums while a pass begins whose plan has no such sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from _runs import let_go
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, statistics


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def made(blocks: int, **given: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    step = given.pop("step", "after_backward")
    options = Options(group_bytes=4096, step=step)
    return chunked(nn.Sequential(*(Block() for _ in range(blocks))), AdamW(lr=1e-3), options=options, **given)


def backward(model: Any, rows: int = 8) -> None:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
    model(x if isinstance(model, nn.Sequential) else x.bfloat16()).float().square().mean().backward()


def trained(how: str, **given: Any) -> dict[str, Tensor]:
    model, optimizer = made(4, **given)
    for index in range(4):
        if index == 2:
            if how == "of a part":
                backward(model[1])
            else:
                model[2].wide.bias.grad = torch.full((64,), 0.01, dtype=torch.bfloat16)
            with torch.no_grad():
                model(torch.ones(8, 32))
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    let_go(model)
    return found


@pytest.mark.parametrize("step", ["after_backward", "in_backward", "speculative"])
@pytest.mark.parametrize("how", ["of a part", "assigned"])
def test_groups_with_such_a_gradient_are_stepped_behind_backward(how: str, step: str) -> None:
    right = trained(how, device="cpu")
    found = trained(how, device="emulated", budget=Budget(device="40KiB", host="8MiB"), step=step)
    assert all(torch.equal(value, found[name]) for name, value in right.items())


@pytest.mark.parametrize("host_kib", [228, 260, 292, 332])
def test_activations_and_such_sums_fit_together(host_kib: int, tmp_path: Path) -> None:
    """States are loaded between two backward passes, which moves the first one's gradients into sums."""
    budget = Budget(host=host_kib * 1024, disk="16MiB", disk_dir=str(tmp_path))
    model, optimizer = made(3, device="cpu", budget=budget)
    try:
        for _ in range(3):
            backward(model, 64)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, 64)
        optimizer.load_state_dict(optimizer.state_dict())
        backward(model, 64)
        optimizer.step()
    except DoesNotFit:
        pass
    else:
        tier = statistics(model).tiers["host"]
        assert tier.peak_bytes <= tier.budget_bytes
    let_go(model)

"""No reference cycle keeps what a step has made until the garbage collector comes: it is off here.

A cycle would cost memory that nobody has a budget for. See [Note: what an exception holds].
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import finish
from _runs import HOST
from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, release, statistics

WEIGHT_BYTES = models.WIDTH * models.WIDTH * 4
LAYERS = 8


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Wide(nn.Module):
    """Layers of a weight each. What it makes of its input is kept by its own frame, and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH, bias=False) for _ in range(LAYERS))
        self.made: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        own = x + 1
        self.made.append(weakref.ref(own))
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def step(model: Wide, optimizer: Any, rows: int) -> list[weakref.ref[Tensor]]:
    """Train; all tensors that were seen on the way."""
    model.made.clear()
    x = torch.randn(rows, models.WIDTH)
    result = model(x)
    loss = result.square().mean()
    loss.backward()
    finish(optimizer)
    return [*model.made, *map(weakref.ref, (x, result, loss))]


def refused(model: Wide, optimizer: Any, rows: int) -> list[weakref.ref[Tensor]]:
    """A step that does not fit."""
    try:
        step(model, optimizer, rows)
    except DoesNotFit:
        return list(model.made)
    raise AssertionError("it fits")


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 3), ("bf16", 2), ("fp32", 8), ("bf16", 40)])
def test_a_step_leaves_nothing(precision: str, weights: int) -> None:
    """With room for so many weights, from few, where placements are refused on the way to a plan, to many."""
    torch.manual_seed(0)
    budget = Budget(device=weights * WEIGHT_BYTES + 4096, host=HOST)
    model, optimizer = chunked(Wide(), AdamW(lr=1e-3), device="emulated", budget=budget, precision=precision)
    for _ in range(3):
        seen = step(model, optimizer, 2)
        assert len(seen) == 4
        assert not any(each() is not None for each in seen)
    assert statistics(model).planned_passes >= 2
    release(model)
    gone = weakref.ref(model)
    del model, optimizer
    assert gone() is None


def test_a_step_that_does_not_fit_leaves_nothing() -> None:
    torch.manual_seed(0)
    budget = Budget(device=4 * WEIGHT_BYTES, host=HOST)
    model, optimizer = chunked(Wide(), AdamW(lr=1e-3), device="emulated", budget=budget, precision="fp32")
    for rows in (200, 2, 300, 2):
        seen = (refused if rows > 2 else step)(model, optimizer, rows)
        assert seen
        assert not any(each() is not None for each in seen)
    release(model)

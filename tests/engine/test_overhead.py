"""What the engine adds to PyTorch where nothing moves, in calls of Python functions: a count, not a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ps_core
import ps_kernels
from _models import stack
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release, statistics

LAYERS, WARM_UP = 12, 4
OURS = tuple(str(Path(package.__file__).parent) for package in (ps_core, ps_kernels) if package.__file__)


def calls_of_ours(function: Callable[[], object]) -> int:
    """How many functions of the engine's and the kernels' own are called meanwhile."""
    count = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class Loop:
    """A training step in its parts."""

    def __init__(self, device: str, precision: str) -> None:
        torch.manual_seed(0)
        budget = Budget(host="64MiB") if device == "cpu" else Budget(device="64MiB", host="64MiB")
        self.model, self.optimizer = chunked(
            nn.Sequential(stack(LAYERS), Mean()), AdamW(), device=device, precision=precision, budget=budget
        )
        self.input = torch.randn(2, 32)
        self.loss: Tensor | None = None

    def forward(self) -> None:
        self.loss = self.model(self.input)

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Mean(nn.Module):
    """A loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().square().mean()


@pytest.mark.parametrize(
    ("device", "precision", "forward", "backward", "step"),
    [
        ("cpu", "fp32", 14.1, 26.5, 24.7),
        ("cpu", "bf16", 14.1, 33.7, 21.4),
        ("emulated", "fp32", 17.6, 35.4, 15.3),
        ("emulated", "bf16", 17.6, 44.1, 15.5),
    ],
)
def test_calls_for_each_parameter(device: str, precision: str, forward: float, backward: float, step: float) -> None:
    """The numbers are what was counted, a fifth more; where one is no longer kept, find out what has become dearer."""
    loop = Loop(device, precision)
    parameters = len(list(loop.model.parameters()))
    try:
        for _ in range(WARM_UP):
            for part in (loop.forward, loop.backward, loop.step):
                part()
        before = statistics(loop.model)
        found = [calls_of_ours(part) / parameters for part in (loop.forward, loop.backward, loop.step)]
        after = statistics(loop.model)
    finally:
        release(loop.model)
    assert after.planned_passes == before.planned_passes + 1
    assert after.fetches == before.fetches, "there is room for everything"
    assert all(each <= most for each, most in zip(found, (forward, backward, step), strict=True)), found

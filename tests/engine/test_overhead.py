"""What the engine adds to PyTorch, in calls of Python functions and files they are in: counts, not times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import call_counts
import ps_core
import ps_kernels
from _models import stack
from ps_core import AdamW, Budget
from ps_core.engine import chunked, release, statistics
from ps_kernels._arithmetic_order import AdamArguments

LAYERS, WARM_UP = 12, 4
OURS = tuple(str(Path(package.__file__).parent) for package in (ps_core, ps_kernels) if package.__file__)


@pytest.fixture(autouse=True)
def no_constants_of_earlier_steps() -> None:
    """Forget the constants of Adam's steps: another test may have asked for the same."""
    AdamArguments.scalars.cache_clear()


def calls_of_ours(function: Callable[[], object]) -> int:
    """How many functions of the engine's and the kernels' own are called meanwhile."""
    count = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    gc.collect()  # what earlier tests left would be freed meanwhile, by functions of ours
    gc.disable()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


class Loop:
    """A training step in its parts."""

    def __init__(self, device: str, precision: str, *, checkpointed: bool = False) -> None:
        torch.manual_seed(0)
        budget = Budget(host="64MiB") if device == "cpu" else Budget(device="64MiB", host="64MiB")
        layers = stack(LAYERS)
        made = nn.Sequential(Checkpointed(layers) if checkpointed else layers, Mean())
        self.model, self.optimizer = chunked(made, AdamW(), device=device, precision=precision, budget=budget)
        self.input = torch.randn(2, 32)
        self.loss: Tensor | None = None

    def calls_for_each_parameter(self) -> list[float]:
        """Count the calls of forward, backward and the step, by parameters; no group may be fetched meanwhile."""
        parameters = len(list(self.model.parameters()))
        try:
            for _ in range(WARM_UP):
                for part in (self.forward, self.backward, self.step):
                    part()
            before = statistics(self.model)
            found = [calls_of_ours(part) / parameters for part in (self.forward, self.backward, self.step)]
            after = statistics(self.model)
        finally:
            release(self.model)
        assert after.planned_passes == before.planned_passes + 1
        assert after.fetches == before.fetches, "there is room for everything"
        return found

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


class Checkpointed(nn.Module):
    """Layers, each of which backward repeats."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(("precision", "forward", "backward"), [("fp32", 5.4, 12.8), ("bf16", 5.4, 16.4)])
def test_calls_for_each_parameter_of_a_checkpoint(precision: str, forward: float, backward: float) -> None:
    """Count as the next test does; backward repeats the calls of forward."""
    found = Loop("emulated", precision, checkpointed=True).calls_for_each_parameter()
    assert found[0] <= forward, found
    assert found[1] <= backward, found


@pytest.mark.parametrize(
    ("device", "precision", "forward", "backward", "step"),
    [
        ("cpu", "fp32", 7.3, 15.3, 8.2),
        ("cpu", "bf16", 7.3, 16.3, 5.2),
        ("emulated", "fp32", 7.1, 12.6, 3.6),
        ("emulated", "bf16", 7.1, 16.3, 3.6),
    ],
)
def test_calls_for_each_parameter(device: str, precision: str, forward: float, backward: float, step: float) -> None:
    """The numbers are what was counted, rounded up; where one is no longer kept, find out what has become dearer."""
    found = Loop(device, precision).calls_for_each_parameter()
    assert all(each <= most for each, most in zip(found, (forward, backward, step), strict=True)), found


LIMITS = {
    "every group moves": {"forward": (379, 15), "backward": (625, 15), "step": (364, 15)},
    "nothing moves": {"forward": (199, 14), "backward": (428, 14), "step": (364, 15)},
}
"""Calls and files of each part of a step, as they were counted."""


@pytest.mark.parametrize("budget", LIMITS)
def test_calls_and_files_on_the_way_of_a_step(budget: str) -> None:
    found = call_counts.ours(call_counts.BUDGETS[budget])
    for part, (most_calls, most_files) in LIMITS[budget].items():
        calls, files = found[part].totals
        assert calls <= most_calls, f"{part}: `python benchmarks/call_counts.py --functions` says which are called"
        assert files <= most_files, f"{part}: `python benchmarks/call_counts.py --functions` says which are called"

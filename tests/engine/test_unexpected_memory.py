"""Passes that take more memory than their plan has room for, which no size of a batch tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import chunked_model
from ps_core import Budget, DoesNotFit, Options
from ps_core.engine import statistics

WIDTH, PLAIN_STEPS = 64, 4


class Sampling(nn.Module):
    """Layers, one of which may be skipped, before a head that looks at each row many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, samples: int = 1, skipped: int = -1) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else layer(x)
        return self.head(x.repeat(samples, 1))


def train(budget: str, *calls: dict[str, int]) -> Any:
    """Train a step a call with these arguments; return the statistics."""
    torch.manual_seed(0)
    options = Options(group_bytes="16KiB")
    with chunked_model(Sampling(), precision="fp32", budget=Budget(device=budget, host="64MiB"), options=options) as (
        model,
        optimizer,
    ):
        for arguments in calls:
            model(torch.randn(8, WIDTH), **arguments).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return statistics(model)


def fits(budget: str, *calls: dict[str, int]) -> bool:
    try:
        train(budget, *calls)
    except DoesNotFit:
        return False
    return True


@pytest.mark.parametrize("budget", ["72KiB", "128KiB", "200KiB"])
def test_a_pass_with_another_number_is_measured(budget: str) -> None:
    """It raises as it would without a plan, and is not carried out over the budget unseen."""
    assert fits(budget, *[{}] * 6)
    assert not fits(budget, {"samples": 60})
    assert not fits(budget, *[{}] * PLAIN_STEPS, {"samples": 60})


def test_passes_with_a_number_that_always_changes_follow_the_plan() -> None:
    counted = train("200KiB", *({"samples": number % 3 + 1} for number in range(12)))
    assert counted.planned_passes >= 9
    assert counted.tiers["device"].peak_bytes <= counted.tiers["device"].budget_bytes


class Odd(int):
    """A number that cannot be hashed, and compares itself in its own way."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


def test_numbers_with_code_of_their_own_are_not_compared() -> None:
    assert train("200KiB", *({"samples": Odd(1)} for _ in range(4))).planned_passes >= 3


@pytest.mark.parametrize("budget", ["216KiB", "232KiB", "248KiB"])
def test_a_pass_that_left_its_plan_has_all_memory_for_what_follows(budget: str) -> None:
    """Weights that the plan kept on the device make room, as in a first pass."""
    alone = {"samples": 40, "skipped": 1}
    assert fits(budget, alone)
    counted = train(budget, *[{}] * PLAIN_STEPS, alone, {})
    assert counted.divergences == 1
    assert counted.planned_passes == PLAIN_STEPS

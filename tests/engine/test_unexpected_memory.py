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

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, samples: int = 1, skipped: int = -1, name: str = "") -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else layer(x)
        return self.head(x.repeat(samples, 1))


class Text(str):
    """A text that cannot be hashed, as any class that says when its objects are equal."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nothing of the engine's compares it")


def train(budget: str, *calls: dict[str, Any], width: int = WIDTH, group_bytes: str = "16KiB", **where: str) -> Any:
    """Train a step a call with these arguments, or only look (``looks``); return the statistics."""
    torch.manual_seed(0)
    settings = {"budget": Budget(device=budget, host="64MiB"), "options": Options(group_bytes=group_bytes)}
    with chunked_model(Sampling(width), precision="fp32", **settings, **where) as (model, optimizer):
        for each in calls:
            arguments = dict(each)
            rows, looks = arguments.pop("rows", 8), arguments.pop("looks", "")
            with torch.set_grad_enabled(looks != "without gradients"):
                loss = model(torch.randn(rows, width), **arguments).square().mean()
            if looks:
                del loss
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return statistics(model)


def fits(budget: str, *calls: dict[str, Any], **where: Any) -> bool:
    try:
        train(budget, *calls, **where)
    except DoesNotFit:
        return False
    return True


@pytest.mark.parametrize("budget", ["72KiB", "128KiB", "200KiB"])
def test_a_pass_with_another_number_is_measured(budget: str) -> None:
    """Such a pass raises `DoesNotFit`, as a first pass does. Unmeasured it would exceed the budget without an error."""
    assert fits(budget, *[{}] * 6)
    assert not fits(budget, {"samples": 60})
    assert not fits(budget, *[{}] * PLAIN_STEPS, {"samples": 60})


def test_passes_with_a_number_that_always_changes_follow_the_plan() -> None:
    counted = train("200KiB", *({"samples": number % 3 + 1} for number in range(12)))
    assert counted.planned_passes >= 9
    assert counted.tiers["device"].peak_bytes <= counted.tiers["device"].budget_bytes


@pytest.mark.parametrize("budget", ["216KiB", "232KiB", "248KiB"])
def test_a_pass_that_left_its_plan_has_all_memory_for_what_follows(budget: str) -> None:
    """Weights that the plan kept on the device make room, as in a first pass."""
    alone = {"samples": 40, "skipped": 1}
    assert fits(budget, alone)
    counted = train(budget, *[{}] * PLAIN_STEPS, alone, {})
    assert counted.divergences == 1
    assert counted.planned_passes == PLAIN_STEPS


@pytest.mark.parametrize("budget", ["81KB", "84KB", "87KB"])
def test_home_slots_of_weights_in_use_are_moved_down_too(budget: str) -> None:
    """They stay as copies, for the parameters that are bound to them; the next moment evicts those."""
    alone = {"samples": 40, "skipped": 1}
    where = {"width": 16, "group_bytes": "2KiB", "device": "emulated"}
    assert fits(budget, alone, **where)
    assert fits(budget, {}, {}, alone, {}, **where)


@pytest.mark.parametrize(
    "before", [{"looks": "without gradients"}, {"rows": 1}], ids=["an evaluation", "a smaller batch"]
)
def test_a_number_that_only_smaller_passes_had_is_measured(before: dict[str, Any]) -> None:
    """They say nothing of what a whole training pass takes."""
    calls = [{}] * PLAIN_STEPS + [{"samples": 40} | before, {}]
    assert fits("128KiB", *calls)
    assert not fits("128KiB", *calls, {"samples": 40})


def test_the_number_of_an_evaluation_before_the_plan_is_measured() -> None:
    assert not fits("200KiB", {}, {"samples": 60, "looks": "without gradients"}, {}, {"samples": 60})


def test_texts_that_cannot_be_compared_are_no_hindrance() -> None:
    counted = train("128KiB", *({"name": Text("a")} for _ in range(PLAIN_STEPS)), {"name": Text("b")}, {})
    assert counted.planned_passes == PLAIN_STEPS + 1
    assert counted.divergences == 0


def test_training_goes_on_after_a_dropped_pass_that_no_plan_has_room_for() -> None:
    """The dropped pass itself may not raise any more. Later steps must not raise in its place."""
    counted = train("128KiB", *[{}] * PLAIN_STEPS, {"samples": 60, "looks": "with gradients"}, *[{}] * 3)
    assert counted.divergences == 1
    assert "takes more than was planned" in counted.last_divergence

"""Passes of ranks that take more memory than the common plan leaves free, or than there is without a plan."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, run
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics

STEPS, LOOKS = 4, 2


class Sampling(nn.Module):
    """Layers before a head that looks at each row many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(64, 8)
        self.order = 1

    def forward(self, x: Tensor, samples: int = 1) -> Tensor:
        for layer in list(self.layers)[:: self.order]:
            x = layer(x)
        return self.head(x.repeat(samples, 1))


torch.manual_seed(0)
MADE = Sampling()


def train(model: Any, optimizer: Any) -> None:
    for _ in range(STEPS):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(each: Together, larger: tuple[int, ...], samples: int) -> tuple[int, int, int]:
    """Return how many evaluations raised, how many passes left the plan, and how many later passes followed it."""
    budget, options = Budget(device="200KiB", host="64MiB"), Options(group_bytes="16KiB")
    told: dict[str, Any] = {"device": "emulated", "precision": "fp32", "budget": budget, "options": options}
    model, optimizer = chunked(deepcopy(MADE), AdamW(), collectives=each, **told)
    train(model, optimizer)
    raised = 0
    for _ in range(LOOKS):
        try:
            with torch.no_grad():
                model(torch.ones(8, 64), samples if each.mesh.rank in larger else 1)
        except DoesNotFit:
            raised += 1
    before = statistics(model)
    train(model, optimizer)
    after = statistics(model)
    release(model)
    return raised, after.divergences, after.planned_passes - before.planned_passes


@pytest.mark.parametrize("samples", [80, 100], ids=["a little more", "more"])
@pytest.mark.parametrize("larger", [(0, 1), (1,)], ids=["every rank", "one rank"])
def test_it_raises_where_it_does_not_fit_and_training_goes_on_by_the_plan(
    larger: tuple[int, ...], samples: int
) -> None:
    for rank, found in enumerate(run(2, partial(evaluated, larger=larger, samples=samples))[0]):
        raised = LOOKS if rank in larger else 0
        assert found == (raised, raised, STEPS)


DEVICES = {"emulated": Budget(device="200KiB", host="64MiB"), "cpu": Budget(host="900KiB")}


def first_pass(
    each: Together, device: str, precision: str, *, samples: int, training: bool, order: int
) -> tuple[bool, bool]:
    """Return whether a first pass raised, and whether more memory was in use than the budget has."""
    told: dict[str, Any] = {"device": device, "precision": precision, "options": Options(group_bytes="16KiB")}
    made = deepcopy(MADE)
    made.order = order
    model, optimizer = chunked(made, AdamW(), collectives=each, budget=DEVICES[device], **told)
    raised = False
    try:
        with torch.set_grad_enabled(training):
            loss = model(torch.ones(8, 64), samples).float().square().mean()
        if training:
            loss.backward()
            optimizer.step()
    except DoesNotFit:
        raised = True
    tier = statistics(model).tiers["host" if device == "cpu" else "device"]
    release(model)
    return raised, tier.peak_bytes > tier.budget_bytes


@pytest.mark.parametrize("every", [20, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("order", [1, -1], ids=["sums in turn", "sums in another order"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_without_a_plan_raises_if_it_went_over_the_budget(
    device: str, precision: str, training: bool, order: int, every: int
) -> None:
    """From some number of samples on it does not fit, on any rank. Up to there it keeps to the budget."""
    raised = []
    for samples in range(1, 202, every):
        case = partial(first_pass, samples=samples, training=training, order=order)
        mine, yours = run(2, partial(case, device=device, precision=precision))[0]
        assert mine == yours
        assert mine[0] or not mine[1], f"{samples} samples"
        raised.append(mine[0])
    assert raised == sorted(raised)
    assert set(raised) == {False, True}


def later_call(each: Together) -> list[bool]:
    """Return which passes raised after training by a plan, of which the second call gets a larger number."""
    budget, options = Budget(device="320KiB", host="64MiB"), Options(group_bytes="16KiB")
    told: dict[str, Any] = {"device": "emulated", "precision": "fp32", "budget": budget, "options": options}
    model, optimizer = chunked(deepcopy(MADE), AdamW(), collectives=each, **told)
    raised = []
    for samples in [1] * 6 + [160] * 4:
        try:
            losses = [model(torch.ones(8, 64), number).square().mean() for number in (1, samples)]
            sum(losses).backward()
            optimizer.step()
            raised.append(False)
        except DoesNotFit:
            raised.append(True)
        losses = []
        optimizer.zero_grad()
    assert statistics(model).planned_passes > 2, "there was a plan"
    release(model)
    return raised


def test_a_larger_number_in_a_later_call_is_measured_from_the_next_pass_on() -> None:
    assert run(2, later_call)[0] == [[False] * 7 + [True] * 3] * 2

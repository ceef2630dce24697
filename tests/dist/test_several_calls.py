"""Ranks that call the model several times before one backward pass, or parts of it: they follow one plan.

Results have the bits of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, run
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics

WIDTH, STEPS = 32, 6
Loss = Callable[[Any, int, int], Tensor]


def network() -> nn.Module:
    """Made from numbers of its own: ranks are threads, and share PyTorch's generator."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
    return model


class Caller:
    """A model, or its parts, called with inputs of its type."""

    def __init__(self, model: Any, kind: torch.dtype) -> None:
        self._model, self._kind = model, kind
        self.first: Any = lambda x: model[:2](x.to(kind)).float()
        self.second: Any = lambda x: model[2:](x.to(kind)).float()

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = self._model(x.to(self._kind)).float()
        return found


def batch(step: int, rank: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def siamese(model: Any, step: int, rank: int) -> Tensor:
    x = batch(step, rank)
    return (model(x) - model(x.flip(0))).square().mean() + model(x + 1).square().mean()


def teacher_between(model: Any, step: int, rank: int) -> Tensor:
    """A call without gradients between two with."""
    x = batch(step, rank)
    first = model(x)
    with torch.no_grad():
        target = model(x.flip(0))
    return (first - target).square().mean() + model(x).square().mean()


def more_on_one_rank(model: Any, step: int, rank: int) -> Tensor:
    """Rank 1 makes a third call."""
    x = batch(step, rank)
    loss = (model(x) - model(x.flip(0))).square().mean()
    return loss + model(x + 1).square().mean() if rank == 1 else loss


def larger_at_times(model: Any, step: int, rank: int) -> Tensor:
    """The second call of one rank has a larger batch in one step."""
    other = batch(step + 1, rank, rows=16 if (step, rank) == (3, 0) else 4)
    return model(batch(step, rank)).square().mean() + model(other).square().mean()


def evaluated_before(model: Any, step: int, rank: int) -> Tensor:
    """Calls of their own without gradients, also of a larger batch."""
    with torch.no_grad():
        model(batch(step, rank))
        model(batch(step, rank, rows=12))
    return siamese(model, step, rank)


def parts(model: Any, step: int, rank: int) -> Tensor:
    """Calls of parts, and not of the model."""
    return model.second(model.first(batch(step, rank)) + 1).square().mean()


def parts_and_model(model: Any, step: int, rank: int) -> Tensor:
    """The model first, and a part with a larger batch at times."""
    rows = 16 if (step, rank) == (3, 0) else 4
    return model(batch(step, rank)).square().mean() + model.second(batch(step, rank, rows)).square().mean()


def other_parts(model: Any, step: int, rank: int) -> Tensor:
    """Another part on each rank."""
    return (model.first if (step + rank) % 2 else model.second)(batch(step, rank)).square().mean()


def parts_alone(model: Any, step: int, rank: int) -> Tensor:
    """Rank 0 looks at a part by itself, without gradients."""
    if rank == 0:
        with torch.no_grad():
            model.first(batch(step, rank))
    return parts(model, step, rank)


LOSSES: dict[str, tuple[Loss, int]] = {
    "siamese": (siamese, STEPS - 1),
    "teacher between": (teacher_between, STEPS - 1),
    "more on one rank": (more_on_one_rank, STEPS - 1),
    "evaluated before": (evaluated_before, STEPS - 1),
    "parts": (parts, STEPS - 1),
    "parts and model": (parts_and_model, STEPS - 2),
    "other parts": (other_parts, STEPS - 1),
    "parts alone": (parts_alone, STEPS - 1),
    "larger at times": (larger_at_times, STEPS - 2),
}
"""The losses, and at least how many passes follow a plan to their end."""


def trained(collectives: Together | None, loss: Loss, ranks: int, precision: str) -> tuple[dict[str, Tensor], Any]:
    """Weights after all steps, and what was counted; one process adds all parts."""
    device: dict[str, Any] = {"device": "cpu", "budget": Budget(host="64MiB"), "accumulation_steps": ranks}
    if collectives is not None:
        device = {"device": "emulated", "budget": Budget(device="48KiB", host="4MiB"), "collectives": collectives}
    model, optimizer = chunked(
        network(), AdamW(lr=0.01), precision=precision, options=Options(group_bytes=4096, poison=True), **device
    )
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    caller = Caller(model, kind)
    mine = range(ranks) if collectives is None else [collectives.mesh.rank]
    for step in range(STEPS):
        for rank in mine:
            loss(caller, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    counted = statistics(model)
    release(model)
    return values, counted


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_they_follow_one_plan_with_the_bits_of_one_process(name: str, ranks: int) -> None:
    loss, planned = LOSSES[name]
    expected, _ = trained(None, loss, ranks, "fp32")
    found, _ = run(ranks, trained, loss, ranks, "fp32")
    for values, counted in found:
        assert all(torch.equal(values[each], value) for each, value in expected.items())
        memory = counted.tiers["device"]
        assert memory.peak_bytes <= memory.budget_bytes
        assert loss in (evaluated_before, parts_alone) or counted.passes == STEPS, "all calls are one pass"
        assert counted.planned_passes - counted.divergences >= planned, counted


def many_times(model: Any, step: int, rank: int) -> Tensor:
    """More calls than a plan is made for."""
    x = batch(step, rank, rows=1)
    losses = [model(x + call).square().mean() for call in range(17)]
    return torch.stack(losses).sum()


def test_many_calls_run_without_a_plan_and_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = trained(None, many_times, 2, "fp32")
    with caplog.at_level(logging.INFO, logger="ps_core"):
        found, _ = run(2, trained, many_times, 2, "fp32")
    for values, counted in found:
        assert all(torch.equal(values[each], value) for each, value in expected.items())
        assert counted.planned_passes == 0
    (line,) = [each for each in caplog.messages if "no plan" in each]
    assert line.endswith("run on demand: the model is called within backward, or many times before backward")

"""Passes of several calls, of which a later one takes more memory than was planned: no size of a batch tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from _runs import chunked_model
from ps_core import Budget, DoesNotFit, Options
from ps_core.engine import statistics
from ps_core.engine._execution.nonmodel_memory import NonModelMemory
from test_unexpected_memory_of_evaluations import Sampling, rows

STEPS, MANY = 6, 160
BUDGETS = {
    "emulated": Budget(device="320KiB", host="64MiB"),
    "cpu": Budget(host="660KiB"),
}


def train(model: Any, optimizer: Any, steps: int, calls: Sequence[tuple[Any, ...]]) -> None:
    for _ in range(steps):
        sum(model(*each).square().mean() for each in calls).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def trained(calls: Sequence[tuple[Any, ...]], device: str = "emulated") -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(0)
    told: dict[str, Any] = {"device": device, "budget": BUDGETS[device], "options": Options(group_bytes="16KiB")}
    with chunked_model(Sampling(), precision="fp32", **told) as (model, optimizer):
        train(model, optimizer, STEPS, calls)
        yield model, optimizer


@contextmanager
def count_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Return a list that grows by one with each pass that is measured."""
    found: list[None] = []
    start = NonModelMemory.start_pass

    def started(self: NonModelMemory) -> None:
        found.append(None)
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(NonModelMemory, "start_pass", started)
        yield found


@pytest.mark.parametrize("device", BUDGETS)
@pytest.mark.parametrize("place", [1, 2])
def test_a_larger_number_in_a_later_call_is_measured_from_the_next_pass_on(place: int, device: str) -> None:
    """Counting cannot begin within a pass, so the first one is not measured."""
    calls = [(rows(), 1)] * 3
    with trained(calls, device) as (model, optimizer):
        calls[place] = rows(), MANY
        train(model, optimizer, 1, calls)
        for _ in range(4):
            with pytest.raises(DoesNotFit):
                train(model, optimizer, 1, calls)
            optimizer.zero_grad()


@pytest.mark.parametrize("device", BUDGETS)
def test_numbers_of_all_calls_count_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call was measured with either number, but not both calls with the larger one."""
    few, some = (rows(), 1), (rows(), 2)
    with trained([few, few], device) as (model, optimizer), count_measured(monkeypatch) as measured:
        for calls in ([some, few], [few, some], [some, some]):
            before = len(measured)
            train(model, optimizer, 4, calls)
            assert len(measured) > before


@pytest.mark.parametrize("device", BUDGETS)
def test_a_larger_batch_in_a_later_call_is_measured_with_its_number(device: str) -> None:
    """The plan serves both sizes. With the number, only the smaller one was measured."""
    with trained([(rows(), 1)] * 2, device) as (model, optimizer):
        train(model, optimizer, 3, [(rows(), 1), (rows(1), MANY)])
        train(model, optimizer, 1, [(rows(), 1), (rows(), MANY)])
        with pytest.raises(DoesNotFit):
            train(model, optimizer, 2, [(rows(), 1), (rows(), MANY)])


@pytest.mark.parametrize("device", BUDGETS)
def test_what_repeats_itself_is_measured_no_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [(rows(), 1), (rows(), 2), (rows(4), 1)]
    with trained(calls, device) as (model, optimizer), count_measured(monkeypatch) as measured:
        before = statistics(model).planned_passes
        train(model, optimizer, 8, calls)
        assert not measured
        calls[1] = rows(), 3
        train(model, optimizer, 8, calls)
        assert len(measured) == 1, "the one behind the first with another number"
        assert statistics(model).planned_passes == before + 16


def test_numbers_that_always_differ_in_later_calls_follow_the_plan() -> None:
    with trained([(rows(), 1)] * 2) as (model, optimizer):
        before = statistics(model).planned_passes
        for number in range(6):
            train(model, optimizer, 1, [(rows(), 1), (rows(), 1 + number / 100)])
        assert statistics(model).planned_passes == before + 6


def test_calls_without_gradients_are_measured_each_by_itself() -> None:
    with trained([(rows(), 1)] * 2) as (model, _), torch.no_grad():
        model(rows(), 1)
        with pytest.raises(DoesNotFit):
            model(rows(), 2 * MANY)

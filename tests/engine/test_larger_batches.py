"""A batch larger than the plan's gets the room it would have had as the first; and one that grows unseen is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import let_go, tightest
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._execution import plan_scheduler

SMALL, LARGE, HUGE = 8, 256, 2048


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))


@contextmanager
def model_under(device: int, model: nn.Module | None = None) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    made, optimizer = chunked(
        model or layers(),
        AdamW(lr=1e-3),
        device="emulated",
        budget=Budget(device=device, host="4MiB"),
        options=Options(group_bytes=2**15, poison=True),
    )
    try:
        yield made, optimizer
    finally:
        let_go(made)


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))


def train(made: tuple[nn.Module, Any], rows: int) -> Tensor:
    model, optimizer = made
    loss = model(batch(rows)).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def homes_above(model: nn.Module) -> int:
    engine = next(model.parameters())._owner  # type: ignore[attr-defined]
    return sum(chunk.bytes for group in engine.groups for chunk in group.chunks.values() if chunk.home.tier == 0)


@pytest.fixture(scope="module")
def needed() -> int:
    """The least in which training on the large batch begins."""

    def attempt(size: int) -> None:
        with model_under(size) as made:
            for _ in range(2):
                train(made, LARGE)

    return tightest(attempt, rounds=2)[0]


def test_a_larger_batch_fits_where_it_would_have_as_the_first(needed: int) -> None:
    order = (SMALL, SMALL, LARGE, LARGE, SMALL, LARGE)
    with model_under(needed) as made:
        losses = []
        for index, rows in enumerate(order):
            losses.append(train(made, rows))
            assert (homes_above(made[0]) > 0) is (index < 2)
        told = statistics(made[0])
    assert (told.divergences, told.replans) == (1, 1)
    assert told.planned_passes == 4
    assert told.tiers["device"].peak_bytes <= needed
    with model_under(2**24) as made:
        assert torch.equal(torch.stack(losses), torch.stack([train(made, rows) for rows in order]))


def refused(device: int, *orders: int) -> DoesNotFit:
    with model_under(device) as made:
        *before, last = orders
        for rows in before:
            train(made, rows)
        with pytest.raises(DoesNotFit) as caught:
            train(made, last)
    return caught.value


def test_what_does_not_fit_even_so_is_refused_in_the_words_of_a_first_batch(needed: int) -> None:
    first, later = refused(needed, HUGE), refused(needed, SMALL, SMALL, HUGE)
    assert str(first) == str(later)
    assert first.proven
    assert later.proven
    assert (first.needed_bytes, first.tier) == (later.needed_bytes, "device")


def test_after_a_larger_evaluation_homes_go_back_to_where_the_plan_has_them(needed: int) -> None:
    """Once its non-model bytes are known, and few enough, they need not leave any more."""
    with model_under(needed) as made:
        for rows in (SMALL, SMALL):
            train(made, rows)
        above = homes_above(made[0])
        for left in (0, above):
            with torch.inference_mode():
                made[0](batch(LARGE))
            assert homes_above(made[0]) == left
            train(made, SMALL)
            assert homes_above(made[0]) == above > 0
        told = statistics(made[0])
        assert (told.divergences, told.planned_passes) == (2, 3)


class Growing(nn.Module):
    """What it does with a batch is not to be seen from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.repeat(self.times, 1))


def test_a_pass_that_holds_more_than_was_planned_is_noticed_and_planned_anew(
    needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_scheduler, "_WATCHED_EVERY", 3)
    with model_under(needed + needed // 8, Growing()) as made:  # what the plan left of it is all that may grow unseen
        model, losses, divergences = made[0], [], []
        for index in range(12):
            model.times = 1 if index < 4 else LARGE // SMALL
            losses.append(train(made, SMALL))
            divergences.append(statistics(model).divergences)
        told = statistics(model)
    noticed = divergences.index(1)
    assert 4 <= noticed <= 6
    assert divergences == [0] * noticed + [1] * (12 - noticed)
    assert "takes more than was planned" in told.last_divergence
    assert told.replans == 1
    assert told.planned_passes == 12 - 3  # the first, the one that was noticed, the next, which is recorded
    with model_under(2**24, Growing()) as made:
        for index, loss in enumerate(losses):
            made[0].times = 1 if index < 4 else LARGE // SMALL
            assert torch.equal(loss, train(made, SMALL))


class WithLoss(nn.Sequential):
    """It returns its loss, so that its first pass is planned too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


def test_below_there_is_room_left_for_a_gradient_that_is_to_be_summed() -> None:
    """In fp32 every gradient is put down there before it is added; homes that are moved down must not fill it."""
    host = 3 * 2**19 - 2**15  # all homes but half a gradient
    made, optimizer = chunked(
        WithLoss(*layers()),
        AdamW(lr=1e-3),
        device="emulated",
        precision="fp32",
        budget=Budget(device=2_000_000, host=host),
        options=Options(group_bytes=2**15, poison=True),
    )
    try:
        for rows in (SMALL, LARGE, SMALL, LARGE):
            made(batch(rows)).backward()
            optimizer.step()
        told = statistics(made)
        assert (told.divergences, told.replans, told.planned_passes) == (1, 1, 3)
        assert told.tiers["host"].peak_bytes <= host
    finally:
        let_go(made)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_read_between_steps_move_nothing(gradients: bool, accumulate: int) -> None:
    """A moving average, or norms for a log: no batch began that pass, and nothing is short."""
    made, optimizer = chunked(
        layers(),
        AdamW(lr=1e-3),
        device="emulated",
        budget=Budget(device="4MiB", host="4MiB"),
        options=Options(group_bytes=2**15, poison=True),
        accumulation_steps=accumulate,
    )
    try:
        above = []
        for _ in range(5):
            for _ in range(accumulate):
                made(batch(SMALL)).float().square().mean().backward()
            optimizer.step()
            with torch.set_grad_enabled(gradients):
                assert all(parameter.norm() > 0 for parameter in made.parameters())
            above.append(homes_above(made))
        told = statistics(made)
        assert (told.divergences, told.planned_passes) == (0, 4 * accumulate), told.last_divergence
        assert above[1:] == above[1:2] * 4 > [0]
    finally:
        let_go(made)


def test_where_reading_all_parameters_needs_it_homes_make_room() -> None:
    with model_under(480_000) as made:
        for rows in (SMALL, SMALL):
            train(made, rows)
        assert homes_above(made[0]) > 0
        with torch.no_grad():
            read = torch.nn.utils.parameters_to_vector(made[0].parameters())
        assert homes_above(made[0]) == 0
        train(made, SMALL)
        told = statistics(made[0])
        assert (told.divergences, told.planned_passes) == (0, 2)
        assert read.isfinite().all()

"""Batches of several structures: one plan serves them where it can, and a loop is not planned anew at each step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import let_go
from ps_core import AdamW, Budget
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.plan_scheduler import PlanScheduler

AMPLE = 2**24
OTHER = "inputs of another structure than the plan's batch"


class Net(nn.Module):
    """Computes a loss with labels or without; ``skips``: without labels it leaves out the last layers."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.skips = skips

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.body[: 3 if self.skips and y is None else 6]:
            x = layer(x)
        return x.square().mean() if y is None else nn.functional.mse_loss(x, y)


class Predicts(Net):
    """Returns predictions where there are no labels."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return x if y is None else nn.functional.mse_loss(x, y)


@contextmanager
def managed(net: nn.Module, kib: int = 140, **others: Any) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    budget = Budget(device=f"{kib}KiB", host="4MiB")
    model, optimizer = chunked(net, AdamW(lr=1e-3), device="emulated", budget=budget, precision="fp32", **others)
    try:
        yield model, optimizer
    finally:
        let_go(model)


def batch(number: int, rows: int = 8, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))


def train(model: nn.Module, optimizer: Any, *inputs: Tensor) -> Tensor:
    loss = model(*inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def in_turn(model: nn.Module, optimizer: Any, steps: int = 20) -> Tensor:
    """Losses of steps with labels and without, in turn."""
    losses = []
    for step in range(steps):
        x = batch(step)
        losses.append(train(model, optimizer, *((x,) if step % 2 else (x, x))))
    return torch.stack(losses)


@pytest.mark.parametrize("kib", [140, 100])
def test_one_plan_serves_batches_with_labels_and_without(kib: int) -> None:
    with managed(Net(), kib) as (model, optimizer):
        found, told = in_turn(model, optimizer), statistics(model)
    assert told.replans <= 1
    assert told.divergences == 1
    assert told.last_divergence == OTHER
    assert told.planned_passes >= 18
    assert told.tiers["device"].peak_bytes <= kib * 2**10
    with managed(Net(), AMPLE // 2**10) as (model, optimizer):
        assert torch.equal(found, in_turn(model, optimizer))


def test_where_passes_differ_the_plan_stays_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ps_core"), managed(Net(skips=True)) as (model, optimizer):
        found, told = in_turn(model, optimizer, 40), statistics(model)
    assert told.replans == 2
    assert told.planned_passes >= 18, "those with the plan's batch"
    lines = [each.message for each in caplog.records if "come in turn" in each.message]
    assert len(lines) == 1
    with managed(Net(skips=True), AMPLE // 2**10) as (model, optimizer):
        assert torch.equal(found, in_turn(model, optimizer, 40))


def test_a_loop_that_goes_on_with_other_batches_is_planned_for_them() -> None:
    with managed(Net(skips=True)) as (model, optimizer):
        in_turn(model, optimizer, 10)
        for step in range(12):
            train(model, optimizer, batch(step))
        before = statistics(model)
        for step in range(4):
            train(model, optimizer, batch(step))
        after = statistics(model)
    assert after.planned_passes == before.planned_passes + 4


def test_shapes_none_of_which_is_the_largest_share_a_plan() -> None:
    """A wide one and a long one: neither covers the other."""

    class Rows(Net):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return super().forward(x.reshape(-1, 64))

    def odd(model: nn.Module, optimizer: Any) -> Tensor:
        inputs = [batch(step, *((4, 128) if step % 2 else (8, 64))) for step in range(16)]
        return torch.stack([train(model, optimizer, each) for each in inputs])

    with managed(Rows()) as (model, optimizer):
        found, told = odd(model, optimizer), statistics(model)
    assert told.replans <= 1
    assert told.planned_passes >= 14
    with managed(Rows(), AMPLE // 2**10) as (model, optimizer):
        assert torch.equal(found, odd(model, optimizer))


def test_an_evaluation_without_labels_is_named_and_then_served_by_the_plan() -> None:
    with managed(Predicts()) as (model, optimizer):
        for step in range(6):
            x = batch(step)
            train(model, optimizer, x, x)
            with torch.no_grad():
                model(x if step < 4 else x[:4])
        told = statistics(model)
    assert told.last_divergence == OTHER
    assert (told.divergences, told.planned_passes, told.passes) == (1, 11, 12)
    assert told.tiers["device"].peak_bytes <= 140 * 2**10


def test_an_evaluation_that_takes_more_than_the_plan_leaves_stays_on_demand() -> None:
    with managed(Predicts(), 110) as (model, optimizer):
        x = batch(0)
        for _ in range(3):
            train(model, optimizer, x, x)
            with torch.no_grad():
                model(batch(1, 40))
        told = statistics(model)
    assert told.divergences == 3
    assert told.tiers["device"].peak_bytes <= 110 * 2**10


def test_evaluations_are_measured_anew_for_another_plan() -> None:
    with managed(Predicts()) as (model, optimizer):
        owner = next(model.parameters())._owner  # type: ignore[attr-defined]
        assert isinstance(owner, Engine)
        scheduler = owner.passes.scheduler
        assert isinstance(scheduler, PlanScheduler)
        for rows in (8, 12):
            x = batch(0, rows)
            train(model, optimizer, x, x)
            train(model, optimizer, x, x)
            assert scheduler._others.evaluations == ()
            with torch.no_grad():
                model(x)
            assert len(scheduler._others.evaluations) == 1


def test_a_model_without_an_optimizer_is_not_planned_at_each_call() -> None:
    torch.manual_seed(0)
    model, _ = chunked(
        Predicts(), None, device="emulated", budget=Budget(device="70KiB", host="4MiB"), precision="fp32"
    )
    try:
        with torch.no_grad():
            for step in range(12):
                x = batch(step)
                model(*((x,) if step % 2 else (x, x)))
        told = statistics(model)
    finally:
        let_go(model)
    assert told.replans <= 1
    assert told.planned_passes >= 9


def test_on_one_tier_each_structure_is_measured_once() -> None:
    torch.manual_seed(0)
    model, optimizer = chunked(Net(), AdamW(lr=1e-3), device="cpu", precision="fp32")
    engine = next(model.parameters())._owner  # type: ignore[attr-defined]
    try:
        tracked = []
        for step in range(8):
            x = batch(step)
            loss = model(*((x,) if step % 2 else (x, x)))
            tracked.append(engine.passes.tracked)
            loss.backward()
            optimizer.step()
    finally:
        let_go(model)
    assert tracked == [True, True] + [False] * 6

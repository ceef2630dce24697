"""Passes that call the model several times before one backward pass: planned, and with the bits of any budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _runs import let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, materialized, statistics

KIB, AMPLE = 200, 2**14


def batch(number: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(number))


@contextmanager
def managed(kib: int, net: nn.Module | None = None, **options: Any) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    model, optimizer = chunked(
        net or nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
        AdamW(lr=1e-3),
        device="emulated",
        budget=Budget(device=f"{kib}KiB", host="4MiB"),
        precision="fp32",
        options=Options(poison=True, **options),
    )
    try:
        yield model, optimizer
    finally:
        let_go(model)


def siamese(model: nn.Module, number: int) -> Tensor:
    return (model(batch(number)) - model(batch(number + 1))).square().mean()


def policy_then_reference(model: nn.Module, number: int) -> Tensor:
    found = model(batch(number))
    with torch.no_grad():
        reference = model(batch(number))
    return (found - reference - 1).square().mean()


def preference(model: nn.Module, number: int) -> Tensor:
    """Two calls of the policy, two of the reference."""
    chosen, rejected = model(batch(number)), model(batch(number + 1, 4))
    with torch.no_grad():
        base = model(batch(number)).mean() - model(batch(number + 1, 4)).mean()
    return (chosen.mean() - rejected.mean() - base - 1).square()


def recomputed(model: nn.Module, number: int) -> Tensor:
    def twice(x: Tensor) -> Tensor:
        for layer in model:  # type: ignore[attr-defined]
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    return (model(batch(number)) + twice(batch(number))).square().mean()


LOOPS: dict[str, Callable[[nn.Module, int], Tensor]] = {
    each.__name__: each for each in (siamese, policy_then_reference, preference, recomputed)
}


def train(model: nn.Module, optimizer: Any, loop: Callable[[nn.Module, int], Tensor], steps: int = 12) -> Tensor:
    losses = []
    for number in range(steps):
        loss = loop(model, number)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.parametrize("step", ["after_backward", "in_backward", "speculative"])
@pytest.mark.parametrize("name", LOOPS)
def test_several_calls_are_planned_and_have_the_bits_of_unlimited_memory(name: str, step: Any) -> None:
    with managed(KIB, step=step) as (model, optimizer):
        found, told = train(model, optimizer, LOOPS[name]), statistics(model)
    assert told.planned_passes >= 10, told.last_divergence
    assert told.divergences == 0
    assert told.tiers["device"].peak_bytes <= KIB * 2**10
    with managed(AMPLE) as (model, optimizer):
        assert torch.equal(found, train(model, optimizer, LOOPS[name]))


def test_a_larger_batch_in_the_second_call_leaves_the_plan_and_is_planned() -> None:
    def uneven(model: nn.Module, number: int) -> Tensor:
        return model(batch(number)).mean() * model(batch(number, 8 if number < 5 else 24)).square().mean()

    with managed(KIB) as (model, optimizer):
        found, told = train(model, optimizer, uneven), statistics(model)
    assert told.last_divergence == "a batch larger than the plan's, in a later call"
    assert (told.divergences, told.replans) == (1, 1)
    assert told.planned_passes == 12 - 2 - 2
    assert told.tiers["device"].peak_bytes <= KIB * 2**10
    with managed(AMPLE) as (model, optimizer):
        assert torch.equal(found, train(model, optimizer, uneven))


def test_one_more_call_than_planned_leaves_the_plan_even_within_one_moment() -> None:
    """With one group all calls are one moment; only their batches tell that more bytes are needed."""

    def more(model: nn.Module, number: int) -> Tensor:
        calls = 1 if number < 4 else 3
        return torch.stack([model(batch(number + each)).square().mean() for each in range(calls)]).sum()

    with managed(AMPLE, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), group_bytes=2**16) as (model, optimizer):
        train(model, optimizer, more, 8)
        told = statistics(model)
    assert told.planned_passes == 3
    assert told.last_divergence == "the model is called more often than in the plan's pass"


def test_a_first_call_whose_graph_lives_on_does_not_become_the_plan() -> None:
    with managed(KIB) as (model, optimizer):
        loss = model(batch(0)).mean()  # tried out, and forgotten when the loop takes the name
        for number in range(8):
            loss = model(batch(number)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        told = statistics(model)
    assert told.planned_passes >= 6
    assert told.divergences == 0


def test_an_evaluation_under_such_a_plan_runs_on_demand_and_keeps_the_budget() -> None:
    with managed(KIB) as (model, optimizer):
        for number in range(6):
            train(model, optimizer, siamese, 1)
            with torch.no_grad():
                model(batch(number))
        told = statistics(model)
    assert "an evaluation calls the model once" in told.last_divergence
    assert told.planned_passes == 4
    assert told.tiers["device"].peak_bytes <= KIB * 2**10


def test_evaluations_beside_a_forgotten_graph_become_passes_of_their_own() -> None:
    with managed(KIB) as (model, optimizer):
        train(model, optimizer, lambda each, number: each(batch(number)).square().mean(), 4)
        kept = model(batch(0))
        before = statistics(model).passes
        with torch.no_grad():
            for number in range(40):
                model(batch(number))
        assert statistics(model).passes - before >= 20
        del kept
        found = train(model, optimizer, lambda each, number: each(batch(number)).square().mean(), 4)
    assert found.isfinite().all()


def two_backwards(model: nn.Module, number: int) -> Tensor:
    first, second = model(batch(number)).mean(), model(batch(number + 1)).mean()
    first.backward()
    return second


def by_autograd_grad(model: nn.Module, number: int) -> Tensor:
    torch.autograd.grad(model(batch(number)).mean(), list(model.parameters()))
    return torch.zeros((), requires_grad=True) * 1


def by_parameters(model: nn.Module, number: int) -> Tensor:
    x = batch(number)
    for weight in model.parameters():
        x = x @ weight if weight.dim() == 2 else x + weight
    return x.mean()


def state_dict_between(model: nn.Module, number: int) -> Tensor:
    found = model(batch(number))
    model.state_dict()
    return found.square().mean()


def weights_between(model: nn.Module, number: int) -> Tensor:
    """As a momentum encoder is updated once the encoder was called."""
    found = model(batch(number))
    with materialized(model):
        pass
    return found.square().mean()


BETWEEN = (
    "a step, a state dict or materialized(model) comes between forward and backward: move it before forward or "
    "behind backward"
)


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (two_backwards, "backward leaves a graph behind: call it once, for the sum of all losses"),
        (by_autograd_grad, "backward gives no parameter a gradient, as with torch.autograd.grad: call backward()"),
        (by_parameters, "its parameters are read outside of any call of its modules"),
        (state_dict_between, BETWEEN),
        (weights_between, BETWEEN),
    ],
)
def test_one_line_says_why_a_loop_is_never_planned(
    loop: Callable[[nn.Module, int], Tensor], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ps_core"), managed(KIB) as (model, optimizer):
        train(model, optimizer, loop)
        assert statistics(model).planned_passes == 0
    lines = [each.message for each in caplog.records]
    assert lines == [f"Sequential: no plan can be made, so passes run on demand: {reason}"]


def test_a_state_dict_before_forward_or_behind_backward_leaves_the_plan_alone() -> None:
    with managed(KIB) as (model, optimizer):
        for number in range(4):
            model.state_dict()
            model(batch(number)).square().mean().backward()
            with materialized(model):
                pass
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 3


def test_a_loop_that_is_planned_says_nothing_of_this(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ps_core"), managed(KIB) as (model, optimizer):
        train(model, optimizer, siamese)
    assert not [each.message for each in caplog.records if "no plan" in each.message]


def test_on_one_tier_where_nothing_is_planned_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = chunked(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), AdamW(lr=1e-3), device="cpu")
    try:
        with caplog.at_level(logging.INFO, "ps_core"):
            train(model, optimizer, lambda each, number: each(batch(number, 4 + number)).float().square().mean(), 8)
    finally:
        let_go(model)
    assert not caplog.records

"""Ranks that follow a plan, and passes that it is not for: more of them, fewer backward passes, other gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from _one_process import adds_like, check_weights
from _threads import Together, going_by, run
from _zero_cases import states
from ps_core import AdamW
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from test_planned_ranks import WIDTH, Case, Pass, both_trained, gradients_of_both, inputs, one_pass, passed


def stepped_alike(
    each: Together,
    ours: tuple[Any, Any],
    alone: tuple[Any, Any],
    run_alone: Callable[[int], None],
    count: int,
    precision: str,
) -> None:
    """Step the ranks and one process, in which ``run_alone`` adds the same ``count`` parts; all states are equal."""
    (model, optimizer), (single, reference) = ours, alone
    adds_like(each.mesh, single, reference, run_alone, count, rounds=precision != "fp32")
    for front in (optimizer, reference):
        front.step()
        front.zero_grad()
    found, wanted = states(optimizer), states(reference)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    check_weights(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_more_passes_than_the_plan_is_for_give_the_bits_of_one_process(device: str, precision: str) -> None:
    def steps(each: Together) -> None:
        case = Case(device, precision, 100)
        (model, optimizer), (single, reference) = case.made(each, 1), case.made(None, 2)
        for step, passes in enumerate((1, 1, 2, 3, 4, 1)):
            count = 2 * passes
            for part in range(each.rank, count, 2):
                passed(model, step, part, count)
            run_alone = partial(passed, single, step, count=count)
            stepped_alike(each, (model, optimizer), (single, reference), run_alone, count, precision)
        release(model)
        release(single)

    run(2, steps)


@pytest.mark.parametrize("then", ["step", "read", "forget"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_whose_forward_has_no_backward_does_not_leave_the_others_alone(precision: str, then: str) -> None:
    """Its part of the plan's sums comes before the step, and before gradients are read or forgotten."""

    def no_backward(each: Together) -> None:
        fronts = both_trained(each, precision)
        (model, optimizer), (single, reference) = fronts
        if each.rank:
            one_pass(model, 2, each.rank, Pass((0, 1)), [])
        else:
            model(torch.ones(3, 16), Pass((0, 1)), [])
        reference.zero_grad()
        one_pass(single, 2, 1, Pass((0, 1)), [])
        if then == "read":
            for mine, other in zip(model.parameters(), single.parameters(), strict=True):
                found, wanted = mine.grad, other.grad
                assert (found is None) == (wanted is None)
                if found is not None and wanted is not None:
                    assert torch.equal(found.clone(), wanted.clone())
        if then == "forget":
            for front in (optimizer, reference):
                front.zero_grad()
            gradients_of_both(each, fronts, 3, [Pass((0, 1))] * 2, precision)
        optimizer.step()
        reference.step()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        for model, _ in fronts:
            release(model)

    run(2, no_backward)


class BiasLater(nn.Module):
    """A layer whose bias has a gradient only where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        seeded = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.25, generator=seeded)

    def forward(self, x: torch.Tensor, learns_bias: bool) -> torch.Tensor:
        bias = self.layer.bias if learns_bias else self.layer.bias.detach()
        return nn.functional.linear(x, self.layer.weight, bias).float().square().sum()


@pytest.mark.parametrize("first", ["one rank", "all ranks"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_a_planned_group_never_had_is_not_lost(precision: str, first: str) -> None:
    def steps(each: Together) -> None:
        fronts = [
            chunked(
                BiasLater(),
                AdamW(lr=1e-2),
                device="cpu",
                precision=precision,
                accumulation_steps=1 if together else 2,
                collectives=together,
            )
            for together in (each, None)
        ]
        (model, optimizer), (single, reference) = fronts
        for step in range(4):
            learns = [step > 1, step > 1 and first == "all ranks"]

            def alone(part: int, model: nn.Module = single, step: int = step, learns: Any = learns) -> None:
                x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + part))
                model(x, learns[part]).backward()

            alone(each.rank, model)
            adds_like(each.mesh, single, reference, alone, 2, rounds=precision != "fp32")
            for front in (optimizer, reference):
                front.step()
                front.zero_grad()
            found, wanted = states(optimizer), states(reference)
            assert all(torch.equal(found[name], value) for name, value in wanted.items()), step
        release(model)
        release(single)

    run(2, steps)


def looks_while_another_loads(each: Together, written: Event) -> None:
    """Rank 0 is done with its evaluation first, and loads other values."""
    model, optimizer = Case("cpu", "fp32").made(each, 1)
    x, others = torch.ones(3, WIDTH), {name: value + 1 for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(x)
        if each.rank == 1:
            model[1].register_forward_pre_hook(lambda *_: (written.wait(0.5), None)[1])
        again = model(x)
    assert torch.equal(before, again)
    model.load_state_dict(others)
    written.set()
    with torch.no_grad():
        assert not torch.equal(model(x), before)
    passed(model, 0, each.rank, 2)
    optimizer.step()
    release(model)


def test_values_that_one_rank_loads_are_not_seen_in_an_evaluation_of_another() -> None:
    run(2, looks_while_another_loads, Event())


def evaluates_alone(each: Together) -> tuple[list[float], dict[str, Any]]:
    model, optimizer = Case("emulated", "bf16", 36).made(each, 1)
    losses = []
    for step in range(3):
        if each.rank == 0 and step == 0:  # there is no plan yet
            with torch.no_grad():
                losses.append(float(model(inputs(step, 9)).float().sum()))
        passed(model, step, each.rank, 2)
        optimizer.step()
        optimizer.zero_grad()
    found = states(optimizer)
    release(model)
    return losses, found


def test_one_rank_evaluates_alone_where_there_is_no_plan() -> None:
    ((losses, found), (none, other)), _ = run(2, evaluates_alone)
    assert len(losses) == 1
    assert not none
    assert all(torch.equal(value, other[name]) for name, value in found.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layer_that_is_frozen_is_not_summed_where_no_plan_says_what_is(precision: str) -> None:
    def steps(each: Together) -> None:
        case = Case("cpu", precision, 100)
        (model, optimizer), (single, reference) = case.made(each, 1), case.made(None, 2)
        for step in range(4):
            for one in (model, single):
                one[2].requires_grad_(step % 2 == 0)
            passed(model, step, each.rank, 2)
            run_alone = partial(passed, single, step, count=2)
            stepped_alike(each, (model, optimizer), (single, reference), run_alone, 2, precision)
        release(model)
        release(single)

    with going_by(plan=False):
        _, meeting = run(2, steps)
    assert meeting.log.count("sum gradients of 2.weight") == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_does_not_go_past_a_sum_that_it_has_a_gradient_for(precision: str) -> None:
    """The plan has the experts of two ranks one behind the other; a rank that uses both has its gradients later.

    Nothing before the first expert is trained, so backward does not need that expert's weight.
    """

    def steps(each: Together) -> None:
        fronts = both_trained(each, precision, (Pass((0,)), Pass((2, 1))), frozen="stem")
        for step, parts in enumerate(([Pass((0,)), Pass((0, 1))], [Pass((0,)), Pass((2, 1))]), 2):
            gradients_of_both(each, fronts, step, parts, precision)
            for _, optimizer in fronts:
                optimizer.step()
                optimizer.zero_grad()
            found, wanted = (states(optimizer) for _, optimizer in fronts)
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
        for model, _ in fronts:
            release(model)


@pytest.mark.parametrize("case", [Case("cpu"), Case("emulated", "bf16", 36)])
def test_a_shard_that_a_sum_lies_over_is_gathered_from_its_master(case: Case) -> None:
    def steps(each: Together) -> None:
        model, optimizer = case.made(each, 1)
        engine = hooks_of(model).engine
        residency, group = engine.residency, engine.groups[0]
        assert isinstance(residency, ShardedResidency)
        for step in range(2):
            before, lent = residency.shard_for_peers(group)
            wanted = before.clone()
            if lent is not None:
                residency.return_slot(lent)
            passed(model, step, each.rank, 2)
            assert all(record.contents is not SlotContents.WEIGHT for record in group.tensors)
            found, lent = residency.shard_for_peers(group)
            assert lent is not None
            mine = group.clip(slice(0, group.numel))  # the rest is padding
            assert torch.equal(found[mine], wanted[mine])
            residency.return_slot(lent)
            optimizer.step()
            optimizer.zero_grad()
        release(model)

    run(2, steps)

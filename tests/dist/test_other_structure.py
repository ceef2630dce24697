"""Evaluations on ranks whose inputs have another structure than the plan's batch: named, measured, then planned."""

from __future__ import annotations

import torch

from _threads import Together, run
from ps_core.engine import release, statistics
from test_planned_ranks import Case, inputs, passed

OTHER = "inputs of another structure than the plan's batch"


def test_an_evaluation_of_another_structure_is_named_and_then_served_by_the_plan() -> None:
    def evaluates(each: Together) -> None:
        (model, optimizer), (single, reference) = (
            Case("emulated", "fp32", 100).made(each, 1),
            Case("emulated", "fp32", 100).made(None, 2),
        )
        for step in range(4):
            passed(model, step, each.rank, 2)
            for part in range(2):
                passed(single, step, part, 2)
            for front in (optimizer, reference):
                front.step()
                front.zero_grad()
            with torch.no_grad():
                x = inputs(step, each.rank)
                assert torch.equal(model(x[None]), single(x[None]))
        told = statistics(model)
        assert (told.divergences, told.last_divergence) == (1, OTHER)
        release(model)
        release(single)

    run(2, evaluates)


def test_a_rank_whose_evaluation_has_another_structure_leaves_nobody_waiting() -> None:
    def evaluates(each: Together) -> None:
        model, optimizer = Case("emulated", "bf16", 100).made(each, 1)
        for step in range(4):
            passed(model, step, each.rank, 2)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                x = inputs(step, each.rank)
                found = model(x[None] if each.rank else x)
            assert found.isfinite().all()
        told = statistics(model)
        assert told.divergences == (1 if each.rank else 0)
        release(model)

    run(2, evaluates)

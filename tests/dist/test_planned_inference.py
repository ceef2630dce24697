"""A model without an optimizer on several ranks: its passes follow one plan, made between passes."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.planned_scheduler import RanksScheduler
from test_planned_ranks import Broken, Experts, Pass

WIDTH, LAYERS, PASSES = 40, 6, 6


def made(together: Together | None, precision: str, room_kib: int | None) -> nn.Module:
    """Return a model without an optimizer; ``room_kib``: of the emulated accelerator, None: there is none."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    seeded = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
    device = "cpu" if room_kib is None or together is None else "emulated"
    host = 2**21 if together is None else together.ranks * 2**21
    return chunked(
        model,
        None,
        device=device,
        budget=Budget(host=host, device=None if device == "cpu" else (room_kib or 0) * 2**10),
        precision=precision,
        collectives=together,
        options=Options(group_bytes=WIDTH * (WIDTH + 2) * (4 if precision == "fp32" else 2), poison=device != "cpu"),
    )[0]


def batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def evaluates(each: Together, precision: str, room_kib: int | None) -> list[dict[str, float]]:
    """Evaluate beside one process; what each pass moved, then what the plan predicts."""
    model, single = made(each, precision, room_kib), made(None, precision, room_kib)
    rows = []
    for number in range(PASSES):
        before, wire = Counter(statistics(model).moved_bytes), each.received_bytes
        mine = batch(3, 10 * number + each.rank)
        with torch.no_grad():
            assert torch.equal(model(mine), single(mine))
        rows.append({**(Counter(statistics(model).moved_bytes) - before), "wire": each.received_bytes - wire})
        if not each.rank:
            each.meeting.log.append(f"pass {number}")
    told = statistics(model)
    assert told.divergences == 0, told.last_divergence
    assert told.planned_passes == PASSES - 1
    assert all(tier.peak_bytes <= tier.budget_bytes for tier in told.tiers.values())
    scheduler = hooks_of(model).engine.passes.scheduler
    assert isinstance(scheduler, RanksScheduler)
    assert scheduler.planned is not None
    rows.append(dict(scheduler.planned.prediction.moved_bytes))
    for front in (model, single):
        release(front)
    return rows


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("room_kib", [None, 24, 60])
def test_evaluation_without_an_optimizer_follows_one_plan(ranks: int, precision: str, room_kib: int | None) -> None:
    found, meeting = run(ranks, evaluates, precision, room_kib)
    for *passes, predicted in found:
        for moved in passes[2:]:
            for name, size in predicted.items():
                assert moved.get(name, 0) == pytest.approx(size, rel=0.02), name
    said = meeting.log[meeting.log.index("pass 2") + 1 : meeting.log.index("pass 3")]
    mapped = room_kib is None and precision == "fp32"  # then ranks wait for each other, and copy nothing
    each = [f"{'' if mapped else 'gather '}{number}.weight in an evaluation" for number in range(LAYERS)]
    assert said == each, "steady state has the plan's gathers and nothing else"


def test_larger_batches_are_served_and_planned_from_then_on() -> None:
    def grows(each: Together) -> None:
        model, single = made(each, "bf16", 40), made(None, "bf16", None)
        for number in range(20):
            rows = 3 + (2 * number if each.rank == number % 2 else 0)
            mine = batch(rows, number + 100 * each.rank)
            with torch.inference_mode():
                assert torch.equal(model(mine), single(mine))
        told = statistics(model)
        assert told.replans == 4, "before passes 3, 5, 9 and 17, as before 2 there was no plan"
        for number in range(20, 60):
            with torch.inference_mode():
                model(batch(3, number))
        assert statistics(model).divergences == told.divergences
        for front in (model, single):
            release(front)

    _, meeting = run(2, grows)
    assert meeting.log.count("values: whether a pass is to be planned") == 6, "before 2, 3, 5, 9, 17 and 33"


def unlike(each: Together, seed: int, precision: str, room_kib: int | None) -> None:
    """Evaluate unlike batches with unlike experts; some forwards break off, and some tensors outlive their pass."""
    draw = random.Random(seed)
    fronts = [
        chunked(
            Experts(),
            None,
            device="cpu" if room_kib is None or together is None else "emulated",
            budget=Budget(host=2**22, device=room_kib and together and room_kib * 2**10),
            precision=precision,
            collectives=together,
            options=Options(group_bytes=16 * 18 * (4 if precision == "fp32" else 2)),
        )[0]
        for together in (each, None)
    ]
    held: list[torch.Tensor] = []
    for number in range(12):
        parts = [
            Pass(
                tuple(draw.sample(range(4), draw.randrange(4))),
                draw.choice((3, 5)),
                fails=number > 1 and draw.random() < 0.1,
                holds=draw.random() < 0.2,
            )
            for _ in range(each.ranks)
        ]
        mine = parts[each.rank]
        x = torch.randn(mine.rows, 16, generator=torch.Generator().manual_seed(number + 50 * each.rank))
        with torch.no_grad(), suppress(Broken):
            found = fronts[0](x, mine, held)
            assert torch.equal(found, fronts[1](x, mine, held))
        if number % 3 == 2:
            held.clear()
    assert statistics(fronts[0]).planned_passes
    held.clear()
    for front in fronts:
        release(front)


@pytest.mark.parametrize("room_kib", [None, 16, 40])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_evaluate_unlike_batches_give_what_one_process_gives(
    seed: int, precision: str, room_kib: int | None
) -> None:
    run(2 + seed % 2, unlike, seed, precision, room_kib)


def test_a_gradient_for_the_inputs_of_a_frozen_model_is_that_of_one_process() -> None:
    def attacks(each: Together) -> None:
        fronts: list[Any] = [made(each, "fp32", 40), made(None, "fp32", None)]
        for number in range(6):
            mine = [batch(3, number + 10 * each.rank).requires_grad_() for _ in fronts]
            with torch.no_grad():
                assert torch.equal(fronts[0](mine[0]), fronts[1](mine[1]))
            for front, x in zip(fronts, mine, strict=True):
                front(x).square().sum().backward()
            assert mine[0].grad is not None
            assert mine[1].grad is not None
            assert torch.equal(mine[0].grad, mine[1].grad)
        assert statistics(fronts[0]).planned_passes == 5
        for front in fronts:
            release(front)

    run(2, attacks)

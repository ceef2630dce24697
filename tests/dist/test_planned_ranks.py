"""Ranks that follow one plan: the bits of one process, and the bytes that the plan predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from _one_process import adds_like, check_weights
from _threads import Together, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._sharding.planned_scheduler import RanksScheduler

WIDTH, LAYERS, STEPS = 40, 6, 5


@dataclass(frozen=True)
class Case:
    """What is trained, and in how much memory."""

    device: str = "emulated"
    precision: str = "bf16"
    room: int = 0
    """KiB of the accelerator."""
    accumulate: int = 1
    max_norm: float | None = None

    def made(self, together: Together | None, parts: int) -> Any:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        seeded = torch.Generator().manual_seed(0)  # ranks are threads, which share PyTorch's own generator
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
        ranks = 1 if together is None else together.ranks
        alone = together is None
        device = "cpu" if alone else self.device
        budget = Budget(host=ranks * 2**22) if device == "cpu" else Budget(device=self.room * 2**10, host=ranks * 2**22)
        size = 4 if self.precision == "fp32" else 2
        return chunked(
            model,
            AdamW(lr=1e-2),
            device=device,
            budget=budget,
            precision=self.precision,
            accumulation_steps=self.accumulate * parts,
            max_grad_norm=self.max_norm,
            collectives=together,
            options=Options(group_bytes=WIDTH * (WIDTH + 1) * size, poison=device != "cpu"),
        )


def inputs(step: int, part: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def passed(model: nn.Module, step: int, part: int, count: int) -> float:
    loss = model(inputs(step, part)).float().square().sum() / count
    loss.backward()
    return float(loss.detach())


def train(each: Together, case: Case) -> list[dict[str, Any]]:
    """Train beside one process that adds the same parts; what each step moved, and what was predicted."""
    each.follows_plans = True
    model, optimizer = case.made(each, 1)
    single, reference = case.made(None, max(2, each.ranks))
    rounds, rows = case.precision != "fp32" and case.accumulate == 1, []
    for step in range(STEPS):
        count = each.ranks * case.accumulate
        before, wire = Counter(statistics(model).moved_bytes), each.received_bytes
        for part in range(each.rank, count, each.ranks):
            passed(model, step, part, count)
        adds_like(
            each.mesh, single, reference, lambda part, step=step: passed(single, step, part, count), count,
            rounds=rounds,
        )
        optimizer.step()
        rows.append({**(Counter(statistics(model).moved_bytes) - before), "wire": each.received_bytes - wire})
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
        assert optimizer.last_norm == pytest.approx(reference.last_norm, rel=1e-5)
        found, wanted = states(optimizer), states(reference)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (step, name)
        check_weights(model)
    scheduler = hooks_of(model).engine.passes.scheduler
    assert isinstance(scheduler, RanksScheduler)
    told = statistics(model)
    assert scheduler.planned is not None
    assert told.divergences == 0, told.last_divergence
    assert told.planned_passes == (STEPS - 1) * case.accumulate
    rows.append(dict(scheduler.planned.prediction.moved_bytes))
    release(model)
    release(single)
    return rows


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case("cpu"),
        Case("cpu", "fp32"),
        *(
            Case("emulated", precision, room, accumulate)
            for precision, rooms in (("bf16", (36, 60, 200)), ("fp32", (45, 100)))
            for room in rooms
            for accumulate in (1, 3)
        ),
    ],
)
def test_ranks_that_follow_one_plan_give_the_bits_of_one_process(ranks: int, case: Case) -> None:
    found, _ = run(ranks, train, case)
    for *steps, predicted in found:
        for step in steps[2:]:  # the first is on demand, and moves shards to the plan's places
            for name, size in predicted.items():
                assert step.get(name, 0) == pytest.approx(size, rel=0.02), name

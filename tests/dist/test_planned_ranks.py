"""Ranks that follow one plan: the bits of one process, and the bytes that the plan predicted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from _one_process import adds_like, check_weights
from _threads import Together, going_by, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._sharding.planned_scheduler import RanksScheduler
from ps_core.engine._sharding.sharded_residency import ShardedResidency

WIDTH, LAYERS, STEPS = 40, 6, 5


class Casts(nn.Linear):
    """A layer that takes inputs of any type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.weight.dtype
        return nn.functional.linear(x.to(kind), self.weight, self.bias.to(kind))


@dataclass(frozen=True)
class Case:
    """What is trained, and in how much memory."""

    device: str = "emulated"
    precision: str = "bf16"
    room: int = 0
    """KiB of the accelerator."""
    accumulate: int = 1
    max_norm: float | None = None
    common: bool = True
    """Ranks map each other's fp32 weights where the CPU computes."""
    host: int = 2**12
    """KiB of host memory a rank."""
    disk: str = ""
    """The folder of a disk tier; empty: there is none."""
    kept: tuple[str, ...] = ()
    """Patterns of the parameters that are kept in fp32."""

    def made(self, together: Together | None, parts: int) -> Any:
        model = nn.Sequential(*((Casts if self.kept else nn.Linear)(WIDTH, WIDTH) for _ in range(LAYERS)))
        seeded = torch.Generator().manual_seed(0)  # ranks are threads, which share PyTorch's own generator
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
        ranks = 1 if together is None else together.ranks
        alone = together is None
        if together is not None and not self.common:
            together.common_file = None
        device = "cpu" if alone else self.device
        host = 2**22 if alone else ranks * self.host * 2**10
        room = None if device == "cpu" else self.room * 2**10
        below = {"disk": "64MiB", "disk_dir": self.disk} if self.disk and not alone else {}
        budget = Budget(**{"device": room, "host": host, **below})
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
            options=Options(
                group_bytes=WIDTH * (WIDTH + 2) * size,
                poison=device != "cpu",
                keep_fp32=self.kept,
                cast_inputs=not self.kept,
            ),
        )


def inputs(step: int, part: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))


def passed(model: nn.Module, step: int, part: int, count: int) -> float:
    loss = model(inputs(step, part)).float().square().sum() / count
    loss.backward()
    return float(loss.detach())


def train(each: Together, case: Case) -> list[dict[str, Any]]:
    """Train beside one process that adds the same parts; what each step moved, and what was predicted."""
    model, optimizer = case.made(each, 1)
    single, reference = case.made(None, max(2, each.processes))
    rounds, rows = case.precision != "fp32" and case.accumulate == 1, []
    for step in range(STEPS):
        count = each.processes * case.accumulate
        before, wire = Counter(statistics(model).moved_bytes), each.received_bytes
        for part in range(each.process, count, each.processes):
            passed(model, step, part, count)
        adds_like(
            each.mesh,
            single,
            reference,
            partial(passed, single, step, count=count),
            count,
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
        Case("cpu", "fp32", common=False),
        Case("cpu", "fp32", accumulate=3),
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


@pytest.mark.parametrize("case", [Case("cpu"), Case("emulated", "fp32", 45, 3), Case("emulated", "bf16", 36)])
def test_ranks_that_follow_the_plan_say_nothing_but_its_collectives(case: Case) -> None:
    """A step has two messages besides: what it goes by, and the norms."""

    def steps(each: Together) -> None:
        model, optimizer = case.made(each, 1)
        for step in range(4):
            for part in range(case.accumulate):
                passed(model, step, part * each.ranks + each.rank, 2)
            optimizer.step()
            optimizer.zero_grad()
            if not each.rank:
                each.meeting.log.append(f"step {step}")
        release(model)

    _, meeting = run(2, steps)
    said = meeting.log[meeting.log.index("step 2") + 1 : meeting.log.index("step 3")]
    others = [what for what in said if not what.startswith(("gather ", "sum "))]
    assert others == ["values: what optimizer.step() goes by", "values: norms of gradients"]


@pytest.mark.parametrize("case", [Case("cpu"), Case("emulated", "fp32", 45)])
def test_an_answer_for_a_shard_is_of_the_weights_after_the_step_that_is_asked_for(case: Case) -> None:
    """Another rank may ask in its next pass while this one's step goes on still."""

    def steps(each: Together) -> None:
        model, optimizer = case.made(each, 1)
        engine = hooks_of(model).engine
        residency, group = engine.residency, engine.groups[0]
        assert isinstance(residency, ShardedResidency)
        for step in range(4):
            passed(model, step, each.rank, 2)
            assert residency.answer(0, step) is not None
            assert residency.answer(0, step + 1) is None
            optimizer.step()
            found = residency.answer(0, step + 1)
            assert found is not None
            whole = torch.cat([engine.read(record).flatten() for record in group.tensors])
            mine = whole[each.rank * group.shard_numel :][: group.shard_numel]
            assert torch.equal(found.view(whole.dtype)[: mine.numel()], mine)
            optimizer.zero_grad()
        release(model)

    run(2, steps)


# Ranks that do different things.


@dataclass(frozen=True)
class Pass:
    """What one rank does in one pass."""

    chosen: tuple[int, ...]
    rows: int = 3
    fails: bool = False
    """Its forward raises before the head, and the rank goes on without a backward pass."""
    holds: bool = False
    """A tensor refers to an expert's memory until the step."""


class Broken(Exception):
    """Raised by a rank's forward."""


class Experts(nn.Module):
    """A stem, experts in whatever order a rank says, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Casts(16, 16)
        self.experts = nn.ModuleList(Casts(16, 16) for _ in range(4))
        self.head = Casts(16, 1)
        seeded = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.25, generator=seeded)

    def forward(self, x: torch.Tensor, done: Pass, held: list[torch.Tensor]) -> torch.Tensor:
        x = self.stem(x)
        for index in done.chosen:
            x = x + self.experts[index](x).tanh()
            if done.holds:
                held.append(self.experts[index].weight.detach())
        if done.fails:
            raise Broken
        return self.head(x).float().sum()


def one_pass(model: nn.Module, step: int, rank: int, done: Pass, held: list[torch.Tensor]) -> None:
    seeded = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(done.rows, 16, generator=seeded)
    with suppress(Broken):
        model(x, done, held).backward()


def unlike(
    each: Together,
    program: list[list[Pass]],
    precision: str,
    device_kib: int | None,
    kept: tuple[str, ...] = (),
    **below: Any,
) -> list[str]:
    """Train beside one process that adds what the ranks give; why passes left the plan."""
    budget = Budget(**{"device": device_kib and device_kib * 2**10, "host": 2**24, **below})
    fronts = []
    for together in (each, None):
        alone = together is None
        fronts.append(
            chunked(
                Experts(),
                AdamW(lr=1e-2),
                device="cpu" if alone or device_kib is None else "emulated",
                budget=None if alone else budget,
                precision=precision,
                accumulation_steps=2 if alone else 1,
                collectives=together,
                options=Options(group_bytes=16 * 18 * (4 if precision == "fp32" else 2), keep_fp32=kept),
            )
        )
    (model, optimizer), (single, reference) = fronts
    assert optimizer is not None
    assert reference is not None
    why: list[str] = []
    for step, parts in enumerate(program):
        held: list[torch.Tensor] = []
        one_pass(model, step, each.process, parts[each.process], held)

        def alone(part: int, step: int = step, parts: list[Pass] = parts) -> None:
            if not parts[part].fails:
                one_pass(single, step, part, parts[part], [])

        reference.zero_grad()
        adds_like(each.mesh, single, reference, alone, each.processes, rounds=precision != "fp32")
        if not step % 3:
            look = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
            with torch.no_grad():
                assert torch.equal(model(look, Pass((1, 2)), []), single(look, Pass((1, 2)), []))
        optimizer.step()
        held.clear()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        found, wanted = states(optimizer), states(reference)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (step, name, statistics(model).last_divergence)
        check_weights(model)
        if statistics(model).last_divergence not in why:
            why.append(statistics(model).last_divergence)
    release(model)
    release(single)
    return why


def cannot_move_yet(each: Together, case: Case) -> None:
    """Rank 0 cannot move its shards as the plan is made, nor before the next pass."""
    (model, optimizer), (single, reference) = case.made(each, 1), case.made(None, 2)
    homes = hooks_of(model).engine.passes.scheduler._homes  # type: ignore[attr-defined]
    move, tries = homes.move_to_plan, iter((False, False) if each.rank == 0 else ())
    homes.move_to_plan = lambda plan: next(tries, True) and move(plan)
    for step in range(5):
        passed(model, step, each.rank, 2)
        rounds = case.precision != "fp32"
        adds_like(each.mesh, single, reference, partial(passed, single, step, count=2), 2, rounds=rounds)
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert statistics(model).divergences == (each.rank == 0)
    assert statistics(model).planned_passes == 4
    release(model)
    release(single)


@pytest.mark.parametrize("case", [Case("cpu"), Case("emulated", "fp32", 45), Case("emulated", "bf16", 60)])
def test_a_plan_is_in_force_on_all_ranks_although_one_cannot_move_its_shards_yet(case: Case) -> None:
    run(2, cannot_move_yet, case)


def test_ranks_that_never_do_alike_do_not_plan_in_every_step() -> None:
    def grows(each: Together) -> None:
        model, optimizer = Case("cpu").made(each, 1)
        for step in range(30):
            model(torch.ones(1 + step, WIDTH)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).replans == 10
        release(model)

    _, meeting = run(2, grows)
    assert meeting.log.count("the recorded pass") == 8 + 3, "at once, then after 2, 4 and 8 steps"


def both_trained(
    each: Together, precision: str, first: tuple[Pass, Pass] = (Pass((0, 1)), Pass((0, 1))), *, frozen: str = "none"
) -> tuple[tuple[nn.Module, Any], tuple[nn.Module, Any]]:
    """Ranks that follow a plan for the parts that they did ``first``, and one process that did the same."""
    models = Experts(), Experts()
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
    fronts: list[tuple[nn.Module, Any]] = [
        chunked(
            model,
            AdamW(lr=1e-2),
            device="cpu",
            precision=precision,
            accumulation_steps=1 if together else 2,
            collectives=together,
            options=Options(group_bytes=16 * 18 * (4 if precision == "fp32" else 2)),
        )
        for model, together in zip(models, (each, None), strict=True)
    ]
    for step in range(2):
        gradients_of_both(each, fronts, step, first, precision)
        for _, optimizer in fronts:
            optimizer.step()
            optimizer.zero_grad()
    return fronts[0], fronts[1]


def gradients_of_both(each: Together, fronts: Any, step: int, parts: Sequence[Pass], precision: str) -> None:
    (model, _), (single, reference) = fronts
    one_pass(model, step, each.rank, parts[each.rank], [])

    def alone(part: int) -> None:
        one_pass(single, step, part, parts[part], [])

    adds_like(each.mesh, single, reference, alone, 2, rounds=precision != "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_the_plan_does_not_sum_are_whole_before_one_is_read(precision: str) -> None:
    def reads(each: Together) -> None:
        fronts = both_trained(each, precision)
        gradients_of_both(each, fronts, 2, [Pass((0, 2)), Pass((1,))], precision)
        for mine, other in zip(fronts[0][0].parameters(), fronts[1][0].parameters(), strict=True):
            found, wanted = mine.grad, other.grad
            assert (found is None) == (wanted is None)
            if found is not None and wanted is not None:
                assert torch.equal(found.clone(), wanted.clone())
        for model, _ in fronts:
            release(model)

    run(2, reads)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_the_plan_does_not_sum_are_forgotten_with_the_others(precision: str) -> None:
    def forgets(each: Together) -> None:
        fronts = both_trained(each, precision)
        one_pass(fronts[0][0], 9, each.rank, (Pass((0, 2)), Pass((1,)))[each.rank], [])
        fronts[0][1].zero_grad()
        gradients_of_both(each, fronts, 2, [Pass((0, 1))] * 2, precision)
        for _, optimizer in fronts:
            optimizer.step()
        found, wanted = (states(optimizer) for _, optimizer in fronts)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        for model, _ in fronts:
            release(model)

    run(2, forgets)


@pytest.mark.parametrize("device_kib", [None, 12, 40])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_do_other_than_the_plan_give_the_bits_of_one_process(
    seed: int, precision: str, device_kib: int | None
) -> None:
    draw = random.Random(seed)
    ranks = 2 + seed % 2

    run(ranks, unlike, drawn(draw, ranks), precision, device_kib)


def drawn(draw: random.Random, ranks: int) -> list[list[Pass]]:
    """What each rank does in each step."""

    def part(step: int) -> Pass:
        if step < 2:
            return Pass((0, 1))
        chosen = tuple(draw.sample(range(4), draw.randrange(4)))
        return Pass(chosen, draw.choice((3, 3, 5, 2)), fails=draw.random() < 0.1, holds=draw.random() < 0.2)

    return [[part(step) for _ in range(ranks)] for step in range(9)]


def uses_a_layer_twice(each: Together) -> tuple[int, dict[str, torch.Tensor]]:
    """Rank 0 leaves the plan in one pass, with gradients over a gathered weight; it follows the plan again after it."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    seeded = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.1, generator=seeded)

    class InOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            for index in order:
                x = x + torch.tanh(self.layers[index](x))
            return x.float().square().mean()

    options, budget = Options(group_bytes=2**13), Budget(host="8MiB")  # a weight is a group, and so are biases
    model, optimizer = chunked(InOrder(), AdamW(lr=1e-2), collectives=each, budget=budget, options=options)
    for step in range(6):
        twice = step == 2 and each.rank == 0
        model(torch.ones(2, 64), (0, 0, 1, 2, 3) if twice else (0, 1, 2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    left, found = statistics(model).divergences, states(optimizer)
    release(model)
    return left, found


def test_a_gathered_copy_that_a_pass_leaves_behind_is_released_once() -> None:
    (one, found), (other, _) = run(2, uses_a_layer_twice)[0]
    assert (one, other) == (1, 0)
    with going_by(plan=False):
        wanted = run(2, uses_a_layer_twice)[0][0][1]
    assert all(torch.equal(found[name], value) for name, value in wanted.items())

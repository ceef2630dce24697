"""Plans with something wrong: what verify accepts can be simulated, and what simulate refuses it refuses by name."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _mutants import mutate
from _plans import ORIGINS, random_plan
from _programs import TINY
from ps_core._errors import InvalidInput, PatrickStarError, PlanMismatch
from ps_core._extents import Precision
from ps_core._plan import Copy, Instr, Plan, Segment
from ps_core._program import Program
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import MACHINES
from ps_core._verify import faults

EMULATED = replace(MACHINES["cpu"], name="emulated", played_copy_bandwidth=1e10)
NONSENSE: tuple[Any, ...] = (None, "x", -1, 2.5, 10**30, 10**400, (), (None,), float("nan"))


def ways(program: Program) -> tuple[dict[str, bool], ...]:
    """The ways to step that this program may be simulated with."""
    alone = program.accumulate == program.ranks == program.copies == 1
    early = {"step_in_backward": True}
    undone = ({**early, "speculative": True},) if alone else ()
    return ({}, *undone, *((early,) if alone and program.precision is not Precision.FP16 else ()))


def altered(plan: Plan, rng: random.Random) -> Plan:
    """The plan with a field of an instruction, a home slot, a segment or itself replaced by nonsense."""
    which, bad = rng.randrange(len(plan.segments)), rng.choice(NONSENSE)
    segment = plan.segments[which]
    sort = rng.choice(("op", "op", "op", "instruction", "home", "plan", "segment"))
    if sort == "plan":
        return replace(plan, **{rng.choice(("tiers", "home", "segments")): bad})
    if sort == "home" and plan.home:
        place = rng.randrange(len(plan.home))
        home = list(plan.home)
        home[place] = replace(home[place], **{rng.choice(fields(home[place])).name: bad})
        return replace(plan, home=tuple(home))
    if sort == "segment" or not segment.instrs:
        changed = replace(segment, **{rng.choice(fields(segment)).name: bad})
    else:
        rows, place = list(segment.instrs), rng.randrange(len(segment.instrs))
        row, op = rows[place], rows[place].op
        other = replace(op, **{rng.choice(fields(op)).name: bad}) if sort == "op" and fields(op) else bad
        name = rng.choice([field.name for field in fields(Instr)])
        rows[place] = replace(row, op=other) if sort == "op" else replace(row, **{name: bad})
        changed = Segment(segment.name, tuple(rows))
    return replace(plan, segments=(*plan.segments[:which], changed, *plan.segments[which + 1 :]))


def check(program: Program, plan: Plan) -> bool:
    """Simulate in every way; return True if verify accepts the plan."""
    accepted = not faults(program, plan, limit=1)
    for machine in (MACHINES["v100"], EMULATED):
        for way in ways(program):
            try:
                simulate(program, plan, machine, **way)
            except PatrickStarError:
                assert not accepted
    return accepted


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS), st.integers(1, 3))
def test_what_verify_accepts_can_be_simulated(seed: int, origin: str, changes: int) -> None:
    """Offload, disk, accumulation, several ranks: instructions dropped, duplicated, reordered or altered."""
    rng = random.Random(seed)
    program, plan = random_plan(rng, origin)
    for _ in range(6):
        found = plan
        for _ in range(changes):
            mutant = mutate(found, rng)
            found = found if mutant is None else mutant.plan
        check(program, found)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS))
def test_nonsense_is_refused_by_name(seed: int, origin: str) -> None:
    rng = random.Random(seed)
    program, plan = random_plan(rng, origin, TINY)
    for _ in range(10):
        check(program, altered(plan, rng))


def test_enough_mutants_are_accepted_for_that_to_mean_something() -> None:
    rng, accepted = random.Random("accepted"), 0
    for turn in range(60):
        program, plan = random_plan(rng, ORIGINS[turn % len(ORIGINS)], TINY)
        accepted += sum(check(program, mutant.plan) for _ in range(5) if (mutant := mutate(plan, rng)) is not None)
    assert accepted > 25


@pytest.mark.parametrize("origin", ORIGINS)
def test_instructions_may_be_listed_in_another_order(origin: str) -> None:
    """As `verify` accepts them: each queue in its order, however the queues are interleaved."""
    rng = random.Random(f"order {origin}")
    for _ in range(10):
        program, plan = random_plan(rng, origin)
        apart = tuple(
            replace(segment, instrs=tuple(sorted(segment.instrs, key=lambda instr: -instr.queue)))
            for segment in plan.segments
        )
        assert check(program, replace(plan, segments=apart))


def test_instructions_that_no_order_allows() -> None:
    program, plan = random_plan(random.Random(0), "planner", TINY)
    for segment in plan.segments:
        assert segment.numbered_by_place() is segment
    which = next(place for place, segment in enumerate(plan.segments) if len(segment.instrs) > 2)
    segment = plan.segments[which]
    first, second, *others = segment.instrs
    circle = (replace(first, after=(second.id,)), replace(second, after=(first.id,)), *others)
    for rows, words in (
        (circle, f"{segment.name.value}: instructions wait for each other"),
        ((*segment.instrs, first), f"{segment.name.value}: two instructions have the same id"),
    ):
        with pytest.raises(PlanMismatch, match=words):
            replace(segment, instrs=rows).numbered_by_place()
        assert faults(program, replace(plan, segments=(*plan.segments[:which], replace(segment, instrs=rows))))


def test_an_id_that_is_no_number() -> None:
    program, plan = random_plan(random.Random(2), "serial", TINY)
    segments = tuple(
        replace(segment, instrs=tuple(replace(instr, id=(instr.id,)) for instr in segment.instrs))  # type: ignore[arg-type]
        for segment in plan.segments
    )
    found = faults(program, replace(plan, segments=segments), limit=1)
    assert "expected whole numbers as ids" in str(found[0])


def test_what_is_no_plan_at_all() -> None:
    program, plan = random_plan(random.Random(2), "serial", TINY)
    with pytest.raises(InvalidInput, match="tiers must be one of"):
        simulate(program, replace(plan, tiers=()), MACHINES["v100"])
    with pytest.raises(
        InvalidInput, match=r"tiers must be a tuple of Tier\(name, capacity_bytes\), found \('device',\)"
    ):
        simulate(program, replace(plan, tiers=("device",)), MACHINES["v100"])  # type: ignore[arg-type]
    name = program.iteration()[0]
    row = Instr(0, 1, Copy(None, 0, 0, 0, None))  # type: ignore[arg-type]
    segments = tuple(replace(each, instrs=(row,)) if each.name == name else each for each in plan.segments)
    with pytest.raises(PlanMismatch, match="not a plan of this program; verify says why: "):
        simulate(program, replace(plan, segments=segments), MACHINES["v100"])

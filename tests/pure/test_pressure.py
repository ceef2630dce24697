"""Arenas under pressure: who leaves, who must not, and what is done about those who are measured late."""

from __future__ import annotations

import random

import pytest

from _programs import SMALL, TINY, random_program, random_tiers
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._layout import lay_out
from ps_core._plan import Copy, Reserve, Tier
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.search import Setup, find_plan
from ps_core._planner.tier_division import NoRoom, make_frame
from ps_core._program import Program
from ps_core._simulate.machine import machine
from ps_core._trace import Moment, Phase, Tensor, Trace
from ps_core._verify import verify

F, B = Phase.FORWARD, Phase.BACKWARD
MICRO = SegmentName.MICRO_LAST
SIZE = 128 * 2


def reads(name, phase, *tensors, grads=()):
    return Moment(name=name, phase=phase, reads=tensors, grads=grads)


def program(*moments, count=3, ranks=1):
    tensors = (
        Tensor(name="tied", numel=128),
        *(Tensor(name=f"frozen {index}", numel=128, trainable=False) for index in range(1, count)),
    )
    trace = Trace(model="pressure", tensors=tensors, moments=moments)
    return Program(trace=trace, layout=lay_out(trace, group_numel=1, ranks=ranks))


PASS = (reads("f0", F, 0), reads("f1", F, 1), reads("f2", F, 2))
TURN, END = reads("turn", B, 0, grads=(0,)), reads("end", B, grads=(0,))
BACK = (TURN, reads("b1", B, 1), reads("b2", B, 2), reads("b3", B, 1), END)


def planned(made, *sizes):
    tiers = tuple(map(Tier, ("device", "host", "disk"), sizes))
    plan = make_plan(make_frame(made, tiers, filled(made, tiers, resident=0, lower_bytes=0)))
    verify(made, plan)
    return plan


def fetched(plan, tier):
    """Groups copied to a tier in the micro-batch, in order."""
    tiers = {slot: held.tier for slot, held in enumerate(plan.home)}
    found = []
    for instr in plan.segment(MICRO).instrs:
        if isinstance(instr.op, Reserve):
            tiers[instr.op.slot] = instr.op.tier
        elif isinstance(instr.op, Copy) and tiers[instr.op.target] == tier:
            found.append(instr.op.extent.index)
    return found


def test_a_gradient_half_way_stays_although_it_is_wanted_last():
    """Saving and fetching it again would cost twice what fetching a clean extent does."""
    plan = planned(program(*PASS, *BACK), 2 * SIZE + 128, 1 << 20)
    assert fetched(plan, 0) == [0, 1, 2, 1, 2, 1]
    assert fetched(plan, 1) == [0]


def test_a_copy_that_fell_behind_leaves_before_one_that_is_wanted():
    """The host holds seven extents: when an eighth comes, the tied weight's copy there is out of date."""
    there = [reads(f"f{index}", F, index) for index in range(7)]
    back = [reads(f"b{index}", B, index) for index in (7, 1, 2, 3, 4, 5, 6)]
    plan = planned(program(*there, TURN, *back, END, count=8), 9 * SIZE + 1024, 7 * SIZE, 1 << 20)
    assert fetched(plan, 1)[:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert fetched(plan, 0) == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("seed", "bounds", "fits"),
    [(120, SMALL, True), (374, SMALL, True), (1231, TINY, True), (369, SMALL, False), (2040, TINY, True)],
)
def test_half_gathered_gradients_late_norms_and_gathers_that_find_no_room(seed, bounds, fits):
    rng = random.Random(seed)
    made = random_program(rng, bounds)
    tiers = random_tiers(rng, made)
    placement = filled(made, tiers, resident=rng.randint(0, len(made.layout.groups)))
    if fits:
        verify(made, make_plan(make_frame(made, tiers, placement)))
    else:
        with pytest.raises(NoRoom):
            make_plan(make_frame(made, tiers, placement))


def test_what_only_the_prologue_needs_is_found_out_in_time():
    """A large weight that no moment touches must still be rebuilt from its master, where a processor is.

    Keeping the small one on the host looks better, but leaves the host too little for that.
    """
    trace = Trace(
        model="idle",
        tensors=(Tensor(name="idle", numel=6400), Tensor(name="used", numel=64)),
        moments=(reads("f", F, 1), reads("b", B, 1, grads=(1,))),
    )
    tiers = (Tier("host", 6 * 6400 + 256), Tier("disk", 200_000))
    found = find_plan(trace, tiers, machine("cpu"), setup=Setup(group_numel=64))
    assert {found.plan.home_tier(Extent(Kind.P32, group)) for group in (0, 1)} == {1}
    roomy = find_plan(trace, (Tier("host", 6 * 6400 + 2048), tiers[1]), machine("cpu"), setup=Setup(group_numel=64))
    assert roomy.plan.home_tier(Extent(Kind.P32, 0)) == 0

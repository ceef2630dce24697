"""What somebody holds on to from one moment to the next stays where it is, in every plan and by every judge."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from _orders import find_fault
from _programs import random_program
from _symbolic import Symbolic, batch
from ps_core._errors import DoesNotFit, InvalidInput, PlanMismatch
from ps_core._extents import Extent, Kind, Precision, SegmentName, Use
from ps_core._layout import lay_out
from ps_core._options import SGD
from ps_core._plan import Instr, Queue, Run, Shift, Tier
from ps_core._planner.bounds import largest_extent_bytes, lower_bounds
from ps_core._planner.held_slots import Holds, gap_bytes
from ps_core._planner.low_memory_plan import tight_plan
from ps_core._program import Program
from ps_core._reference.execute_plan import Execution, Order, execute
from ps_core._reference.training_rules import Training
from ps_core._trace import Moment, Phase, Tensor, Trace
from ps_core._verify import faults, verify

F, B = Phase.FORWARD, Phase.BACKWARD
MICRO = SegmentName.MICRO_LAST
WIDE = 1 << 20


def trace(*backward, sizes=(64, 64, 64), forward=((0,), (1,), (2,)), nonmodel=0):
    """Groups of these sizes; each moment of backward: what it reads, holds from the one before, and has grads of."""
    moments = [Moment(name=f"f{index}", phase=F, reads=reads) for index, reads in enumerate(forward)]
    moments += [
        Moment(name=f"b{index}", phase=B, reads=reads, holds=holds, grads=grads, nonmodel_bytes=nonmodel)
        for index, (reads, holds, grads) in enumerate(backward)
    ]
    tensors = tuple(Tensor(name=f"t{index}", numel=numel) for index, numel in enumerate(sizes))
    return Trace(model="holds", tensors=tensors, moments=tuple(moments))


def program(made, **options):
    return Program(trace=made, layout=lay_out(made, group_numel=1), **options)


BLOCK = (
    ((0,), (), ()),
    ((0, 1), (0,), ()),
    ((0, 1, 2), (0, 1), (2,)),
    ((0, 1), (0, 1), (1,)),
    ((0,), (0,), (0,)),
)
"""Three groups of a block recomputed, then backward: the first in is the last out."""
CHAIN = (((0,), (), ()), ((0, 1), (0,), (0,)), ((1, 2), (1,), (1,)), ((2,), (2,), (2,)))
"""Each is let go of while the next is held already."""


def weight(index):
    return Extent(Kind.P16, index)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: trace(((0,), (3,), ())), "holds of 'b0' names 3, but there are 3"),
        (lambda: trace(((0,), (0,), ())), "'b0' holds 't0' from the moment before: both must read it"),
        (lambda: trace(((2,), (), ()), ((1,), (2,), ())), "'b1' holds 't2' from the moment before: both must read it"),
    ],
)
def test_a_trace_holds_only_what_two_moments_read(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


def test_the_first_moment_holds_nothing():
    moment = Moment(name="f", phase=F, reads=(0,), holds=(0,))
    with pytest.raises(InvalidInput, match="both must read it"):
        Trace(model="m", tensors=(Tensor(name="a", numel=1),), moments=(moment,))


@pytest.mark.parametrize("options", [{}, {"precision": Precision.FP32}, {"accumulate": 2}, {"training": False}])
def test_the_program_says_which_uses_are_held(options):
    made = program(trace(*BLOCK, forward=((0,), (0, 1), (2,))), **options)
    held = [[use.extent.index for use in made.uses(MICRO, visit) if use.held] for visit in made.visits]
    assert held == [[], [], [], [], [0], [0, 1], [0, 1], [0]]
    assert Use(weight(0), 0, 0) == Use(weight(0), 0, 0, held=False)


def test_what_is_held_in_forward_is_held_in_an_evaluation_too():
    moments = (Moment(name="f0", phase=F, reads=(0,)), Moment(name="f1", phase=F, reads=(0,), holds=(0,)))
    made = program(Trace(model="m", tensors=(Tensor(name="a", numel=1),), moments=moments), training=False)
    assert [made.uses(SegmentName.EVAL, visit)[0].held for visit in made.visits] == [False, True]
    assert Holds(made, SegmentName.EVAL).starting(0) == [weight(0)]


def test_what_is_held_longest_is_put_down_first():
    both = (((0, 1), (), ()), ((0, 1), (0, 1), (0,)), ((1,), (1,), (1,)))
    holds = Holds(program(trace(*both)), MICRO)
    assert [holds.starting(moment) for moment in range(6)] == [[], [], [], [weight(1), weight(0)], [], []]
    assert [sorted(holds.into(moment)) for moment in (3, 4, 5, 6)] == [[], [weight(0), weight(1)], [weight(1)], []]


def test_gaps_by_hand():
    assert gap_bytes(program(trace(*BLOCK))) == 0
    assert gap_bytes(program(trace(*CHAIN))) == 128
    assert gap_bytes(program(trace(*CHAIN, sizes=(64, 64, 128)))) == 128 + 128
    assert gap_bytes(program(trace())) == 0


# ---------------------------------------------------------------- plans


def snug(made, slack=0):
    """A compute tier of the lower bound and so much more, and a large one below it."""
    need = lower_bounds(made, (Tier("device", WIDE), Tier("host", WIDE)))[0].needed_bytes
    return Tier("device", need + slack), Tier("host", WIDE)


def without_holds(made):
    moments = tuple(replace(moment, holds=()) for moment in made.trace.moments)
    return replace(made, trace=replace(made.trace, moments=moments))


def moved_while_held(made, plan):
    """Slots of held extents that a plan's instructions move between the moments that hold them."""
    found, slots, moved = [], {}, set()
    for instr in plan.segment(MICRO).instrs:
        if isinstance(instr.op, Shift):
            moved.add(instr.op.slot)
        elif isinstance(instr.op, Run):
            uses = made.uses(MICRO, made.visits[instr.op.visit])
            here = {use.extent: slot for use, slot in zip(uses, instr.op.slots, strict=True)}
            held = [use.extent for use in uses if use.held]
            found += [extent for extent in held if slots[extent] != here[extent] or here[extent] in moved]
            slots, moved = here, set()
    return found


SQUEEZE = trace(
    ((0, 1), (), ()),
    ((1, 2), (1,), (2,)),
    ((1,), (1,), (1,)),
    ((0,), (), (0,)),
    sizes=(128, 64, 192),
    forward=((1,), (0,), (2,)),
)
"""The third is as large as the first and what is left; but the second may lie in between."""


def test_a_plan_for_tight_memory_leaves_what_is_held_where_it_is():
    made = program(SQUEEZE)
    free, tiers = without_holds(made), snug(made)
    careless = tight_plan(free, tiers)
    verify(free, careless)
    assert moved_while_held(made, careless) == [weight(0)]
    with pytest.raises(PlanMismatch, match="still referenced since the moment before, to stay in slot"):
        verify(made, careless)
    plan = tight_plan(made, tiers)
    verify(made, plan)
    assert moved_while_held(made, plan) == []


def test_verify_knows_of_every_slot_that_is_moved_while_it_is_held():
    """Plans made without regard to what is held: refused just where it is moved."""
    rng, tally = random.Random("careless"), {True: 0, False: 0}
    while min(tally.values()) < 15:
        made = random_program(rng, training=True)
        if any(use.held for visit in made.visits for use in made.uses(MICRO, visit)):
            free = without_holds(made)
            plan = tight_plan(free, (*snug(free, largest_extent_bytes(free)), Tier("disk", WIDE)))
            moved = bool(moved_while_held(made, plan))
            found = [fault for fault in faults(made, plan) if fault.segment == MICRO]
            assert ["still referenced" in str(fault) for fault in found] == [True] * moved
            tally[moved] += 1


def trained(made, plan, order=Order.RANDOM):
    training = Training(batch=batch, iterations=2, optimizer=SGD(lr=0.1))
    return execute(Symbolic(made.trace), made, plan, training, Execution(order=order))


def test_the_reference_refuses_a_plan_that_moves_what_is_held():
    made = program(SQUEEZE)
    tiers = snug(made)
    careless, plan = tight_plan(without_holds(made), tiers), tight_plan(made, tiers)
    assert trained(made, plan) == trained(without_holds(made), careless)
    with pytest.raises(PlanMismatch, match="still referenced since the moment before, was moved to"):
        trained(made, careless)


def test_blocks_that_nest_need_no_more_than_the_bound():
    made = program(trace(*BLOCK, sizes=(64, 192, 320), nonmodel=500))
    verify(made, tight_plan(made, snug(made)))


def test_where_holds_take_turns_room_may_be_lacking():
    made = program(trace(*CHAIN, sizes=(64, 64, 320), nonmodel=500))
    assert gap_bytes(made) == 256
    with pytest.raises(DoesNotFit) as caught:
        tight_plan(made, snug(made))
    assert not caught.value.proven
    verify(without_holds(made), tight_plan(without_holds(made), snug(made)))
    verify(made, tight_plan(made, snug(made, largest_extent_bytes(made) + gap_bytes(made))))


# ---------------------------------------------------------------- judges


def with_shifts(after, *offsets):
    """A sound plan in which one weight is held by two moments; after one of these its slot is shifted so often."""
    made = program(trace(((0,), (), ()), ((0,), (0,), (0,)), sizes=(64,), forward=((0,),)))
    plan = tight_plan(made, (Tier("device", 4096), Tier("host", 4096)))
    micro = plan.segment(MICRO)
    place = next(place for place, row in enumerate(micro.instrs) if isinstance(row.op, Run) and row.op.visit == after)
    slot, ids = micro.instrs[place].op.slots[0], len(micro.instrs)
    shifts = [Instr(ids + place, Queue.COMPUTE, Shift(slot, offset)) for place, offset in enumerate(offsets)]
    instrs = (*micro.instrs[: place + 1], *shifts, *micro.instrs[place + 1 :])
    rows = tuple(replace(row, instrs=instrs) if row is micro else row for row in plan.segments)
    return made, replace(plan, segments=rows)


@pytest.mark.parametrize(
    ("after", "offsets", "sound"),
    [(1, (), True), (1, (0,), True), (1, (1024, 0), False), (1, (1024,), False), (0, (1024, 0), True)],
)
def test_moving_there_and_back_is_moving(after, offsets, sound):
    made, plan = with_shifts(after, *offsets)
    micro = plan.segment(MICRO)
    told = find_fault(made, plan, micro, random.Random(0))
    assert (told is None) is sound
    if sound:
        verify(made, plan)
        trained(made, plan)
        return
    assert told is not None
    assert "still referenced" in told
    (fault,) = faults(made, plan, limit=1)
    assert f"moved by instruction {len(micro.instrs) - 1}" in str(fault)
    assert fault.others == (len(micro.instrs) - 1,)
    with pytest.raises(PlanMismatch, match="still referenced"):
        trained(made, plan)


def test_programs_of_the_other_tests_hold_something():
    rng = random.Random(0)
    made = [random_program(rng) for _ in range(400)]
    assert sum(any(moment.holds for moment in each.trace.moments) for each in made) > 80
    assert sum(gap_bytes(each) > 0 for each in made) > 4

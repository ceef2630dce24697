"""Every rule of a plan, broken once: verify says where, what it expected and what it found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from _serial import Waits, serial_plan
from ps_core._errors import PlanMismatch
from ps_core._extents import Extent, Kind, Precision, SegmentName
from ps_core._layout import lay_out
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Held,
    Instr,
    Norm,
    Plan,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Segment,
    Shift,
    Step,
    Tier,
)
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.tier_division import make_frame
from ps_core._program import Program
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._verify import faults, verify
from ps_core._verify.plan_fault import Fault

P16 = Extent(Kind.P16, 0)
TRACE = Trace(
    model="two layers",
    tensors=(Tensor(name="a", numel=64), Tensor(name="b", numel=128), Tensor(name="still", numel=3, trainable=False)),
    moments=(
        Moment(name="fa", phase=Phase.FORWARD, reads=(0,), makes=(0,), nonmodel_bytes=300),
        Moment(name="fb", phase=Phase.FORWARD, reads=(1, 2), nonmodel_bytes=1000),
        Moment(name="bb", phase=Phase.BACKWARD, reads=(1,), grads=(1,), nonmodel_bytes=700),
        Moment(name="ba", phase=Phase.BACKWARD, reads=(0,), grads=(0,), takes=(0,), nonmodel_bytes=500),
    ),
    activations=(Activation(name="x", bytes=100),),
)


def program(ranks=1, **options):
    return Program(trace=TRACE, layout=lay_out(TRACE, group_numel=128, ranks=ranks), **options)


# ---------------------------------------------------------------- four instructions written by hand

ONE = Trace(
    model="one",
    tensors=(Tensor(name="w", numel=64), Tensor(name="u", numel=64)),
    moments=(
        Moment(name="first", phase=Phase.FORWARD, reads=(0,), nonmodel_bytes=100),
        Moment(name="second", phase=Phase.FORWARD, reads=(0,), nonmodel_bytes=300),
        Moment(name="third", phase=Phase.FORWARD, reads=(0,), nonmodel_bytes=200),
    ),
)
ONLY = Program(trace=ONE, layout=lay_out(ONE, group_numel=64), training=False)
C, UP, DOWN, COLL, CPU = Queue.COMPUTE, Queue.H2D, Queue.D2H, Queue.COLL, Queue.CPU
GOOD = (
    Instr(0, UP, Reserve(2, 0, 0, 128)),
    Instr(1, UP, Copy(P16, 0, 0, 2, 128)),
    Instr(2, C, Run(0, (2,), 100), (1,)),
    Instr(3, C, Run(1, (2,), 300)),
    Instr(4, C, Run(2, (2,), 200)),
    Instr(5, CPU, Release(2), (4,)),
)
HOME = (Held(1, 0, 128, P16), Held(1, 128, 128, Extent(Kind.P16, 1)))


def by_hand(*instrs, home=HOME, device=512, host=512, names=("device", "host")):
    tiers = tuple(Tier(name, size) for name, size in zip(names, (device, host), strict=True))
    return Plan(tiers=tiers, home=home, segments=(Segment(SegmentName.EVAL, instrs),))


def put(place, **changes):
    """The good plan with one instruction's fields changed."""
    instrs = list(GOOD)
    instrs[place] = replace(instrs[place], **changes)
    return by_hand(*instrs)


def add(place, *instrs):
    return by_hand(*GOOD[:place], *instrs, *GOOD[place:])


def fault_of(made, plan):
    found = faults(made, plan)
    assert found, "verify accepts it"
    with pytest.raises(PlanMismatch) as raised:
        verify(made, plan)
    assert str(raised.value) == str(found[0])
    return found[0]


def test_a_sound_plan_is_accepted():
    verify(ONLY, by_hand(*GOOD))
    assert faults(ONLY, by_hand(*GOOD)) == ()


def test_a_fault_says_segment_instruction_expectation_and_finding():
    fault = fault_of(ONLY, put(2, after=()))
    assert str(fault) == (
        "segment eval, instruction 2 (Run): expected slot 2 reserved, or in place, in every order; "
        "found instruction 0 not waited for"
    )
    assert (fault.segment, fault.instr, fault.others) == ("eval", 2, (0,))
    assert str(Fault("this", "that")) == "the plan: expected this; found that"


def test_waiting_for_the_reserve_only_is_a_race_with_the_copy():
    fault = fault_of(ONLY, put(2, after=(0,)))
    assert "a wait for instruction 1, which uses slot 2" in str(fault)


def test_order_in_the_list_does_not_matter_but_for_queues():
    verify(ONLY, by_hand(GOOD[2], GOOD[3], GOOD[5], GOOD[0], GOOD[4], GOOD[1]))


def test_what_is_written_again_unchanged_is_no_race():
    """A second copy of the same content may run while the slot is read."""
    twin = Instr(9, UP, GOOD[1].op)
    verify(ONLY, by_hand(*GOOD[:2], twin, *GOOD[2:5], replace(GOOD[5], after=(4, 9))))


def test_a_release_waits_for_harmless_writers_too():
    twin = Instr(9, UP, GOOD[1].op)
    fault = fault_of(ONLY, by_hand(*GOOD[:2], twin, *GOOD[2:]))
    assert fault.instr == 5
    assert fault.others == (9,)


U16 = Extent(Kind.P16, 1)


def test_copying_back_what_is_there_already_is_sound():
    back = Instr(9, DOWN, Copy(P16, 0, 2, 0, 128), (1,))
    verify(ONLY, by_hand(*GOOD[:2], back, *GOOD[2:5], replace(GOOD[5], after=(4, 9))))


RULES = {
    "the same id twice": (put(1, id=0), "every id once"),
    "no such queue": (put(0, queue=9), "expected a queue; found 9"),
    "unknown wait": (put(2, after=(77,)), "a wait for 77"),
    "deadlock": (put(1, after=(2,)), "wait for each other"),
    "waits for itself": (put(2, after=(2,)), "wait for each other"),
    "wrong queue for a copy": (put(1, queue=DOWN, after=(0,)), "expected queue H2D; found D2H"),
    "wrong queue for a moment": (put(2, queue=CPU), "expected queue COMPUTE; found CPU"),
    "instruction of another segment": (put(1, op=Step(0, (2,))), "an instruction for eval; found Step"),
    "a moment twice": (add(5, Instr(9, C, GOOD[4].op)), "no more moments; found moment 2"),
    "moments out of order": (put(2, op=Run(1, (2,), 300)), "moment 0; found moment 1"),
    "a moment missing": (by_hand(*GOOD[:4], replace(GOOD[5], after=(3,))), "moment 'third' run; found it never is"),
    "too few slots": (put(2, op=Run(0, (), 100)), "1 slots; found 0"),
    "fewer non-model bytes than needed": (put(2, op=Run(0, (2,), 99)), "100 non-model bytes; found 99"),
    "more non-model bytes than there are": (put(2, op=Run(0, (2,), 513)), "addresses below 512"),
    "non-model data over a slot": (put(3, op=Run(1, (2,), 385)), "addresses 127 to 412 free; found slot 2"),
    "home slot read on its tier": (put(2, op=Run(0, (0,), 100)), "slot 0 on tier 0; found it is on tier 1"),
    "slot never reserved": (put(1, op=Copy(P16, 0, 0, 3, 128)), "slot 3 live; found it is not"),
    "wrong version": (put(1, op=Copy(P16, 1, 0, 2, 128)), "p16 of 0, version 1 in slot 0; found p16 of 0, version 0"),
    "wrong extent": (put(1, op=Copy(U16, 0, 1, 2, 128)), "p16 of 0, version 0 in slot 2; found p16 of 1, version 0"),
    "nothing there": (by_hand(GOOD[0], *GOOD[2:]), "a wait for 1"),
    "poison": (put(1, op=Copy(P16, 0, 2, 0, 128), queue=DOWN), "slot 2 reserved"),
    "part of an extent": (put(1, op=Copy(P16, 0, 0, 2, 64)), "128 bytes; found 64"),
    "same tier": (put(1, op=Copy(P16, 0, 2, 2, 128)), "neighbouring tiers; found tiers 0 and 0"),
    "no such tier": (put(0, op=Reserve(2, 2, 0, 128)), "one of 2 tiers; found tier 2"),
    "out of line": (put(0, op=Reserve(2, 0, 64, 128)), "multiples of 128; found 128 bytes at 64"),
    "empty": (put(0, op=Reserve(2, 0, 0, 0)), "multiples of 128; found 0 bytes at 0"),
    "outside the tier": (put(0, op=Reserve(2, 0, 512, 128)), "addresses of device below 512; found 512 to 640"),
    "home's number": (put(0, op=Reserve(1, 0, 0, 128)), "a slot number of its own; found slot 1 again"),
    "a number again": (add(6, Instr(9, CPU, Reserve(2, 0, 0, 128))), "found slot 2 again"),
    "over home": (put(0, op=Reserve(2, 1, 0, 128)), "addresses 0 to 128 free; found slot 0 at 0"),
    "left behind": (by_hand(*GOOD[:5]), "nothing but home at the end; found slot 2"),
    "home left": (add(6, Instr(9, CPU, Release(1))), "home of p16 of 1 in place at the end; found no such slot"),
    "home overwritten": (
        add(5, Instr(9, DOWN, Copy(P16, 0, 2, 1, 128), (1,)), Instr(10, CPU, Release(2), (4, 9))),
        "slot 2 live",
    ),
    "lost": (
        by_hand(*GOOD[:5], Instr(9, DOWN, Copy(P16, 0, 2, 1, 128), (1,)), Instr(5, CPU, Release(2), (4, 9))),
        "home of p16 of 1 to end with version 0; found p16 of 0, version 0",
    ),
    "released while read": (put(5, after=(3,)), "a wait for instruction 4, which uses slot 2"),
    "reserved too early": (
        add(6, Instr(9, DOWN, Reserve(3, 0, 0, 128)), Instr(10, DOWN, Release(3))),
        "free in every order; found instruction 5, which gives up those at 0, not waited for",
    ),
    "reserved where non-model data still are": (
        add(3, Instr(9, C, Reserve(3, 0, 384, 128)), Instr(10, C, Release(3))),
        "addresses 384 to 512 free; found non-model data at 412",
    ),
    "reserved before non-model data are gone": (
        add(4, Instr(9, UP, Reserve(3, 0, 256, 128)), Instr(10, UP, Release(3))),
        "instruction 3, which gives up those at 212, not waited for",
    ),
    "shifted by the wrong queue": (add(5, Instr(9, CPU, Shift(2, 128), (4,))), "queue COMPUTE; found CPU"),
    "shifted out of line": (add(5, Instr(9, C, Shift(2, 64))), "found 128 bytes at 64"),
    "shifted, not waited for": (
        add(5, Instr(9, C, Shift(2, 128))),
        "slot 2 reserved, or in place, in every order; found instruction 9 not waited for",
    ),
    "shifted onto somebody": (add(5, Instr(9, CPU, Shift(1, 0))), "addresses 0 to 128 free; found slot 0 at 0"),
}


@pytest.mark.parametrize(("plan", "message"), RULES.values(), ids=RULES)
def test_broken_by_hand(plan, message):
    assert message in str(fault_of(ONLY, plan))


def test_a_slot_may_use_what_nonmodel_data_leave_between_two_moments():
    between = Instr(9, C, Reserve(3, 0, 128, 128)), Instr(10, C, Release(3))
    verify(ONLY, add(4, *between))
    verify(ONLY, add(3, *between))
    assert "non-model data" in str(fault_of(ONLY, add(4, Instr(9, C, Reserve(3, 0, 256, 128)), between[1])))


def test_a_shift_in_place_or_with_overlap_is_sound():
    shifts = Instr(8, C, Shift(2, 0)), Instr(9, C, Shift(2, 128))
    verify(ONLY, by_hand(*GOOD[:5], *shifts, replace(GOOD[5], after=(9,))))
    home = (Held(1, 0, 128, P16), Held(1, 128, 256, U16))
    slide = (Instr(8, CPU, Shift(1, 256)), Instr(9, CPU, Shift(1, 128)))
    verify(ONLY, by_hand(*GOOD, *slide, home=home))


def test_home_may_be_left_and_taken_again():
    back = (
        Instr(6, UP, Release(0)),
        Instr(7, DOWN, Reserve(3, 1, 0, 128), (6,)),
        Instr(8, DOWN, Copy(P16, 0, 2, 3, 128), (1,)),
        Instr(5, CPU, Release(2), (4, 8)),
    )
    verify(ONLY, by_hand(*GOOD[:5], *back))
    early = (back[0], replace(back[1], after=()), *back[2:])
    assert "not waited for" in str(fault_of(ONLY, by_hand(*GOOD[:5], *early)))


def test_two_racing_writes_are_a_fault_for_the_reader_only():
    """P16 of 0 and of 1 race into slot 2, from the tiers on either side."""
    tiers = (Tier("device", 512), Tier("host", 512), Tier("disk", 512))
    home = (Held(2, 0, 128, P16), Held(0, 128, 128, U16))
    trace = replace(ONE, moments=())
    nothing = Program(trace=trace, layout=lay_out(trace, group_numel=64), training=False)
    race = (
        Instr(0, CPU, Reserve(2, 1, 0, 128)),
        Instr(1, Queue.DISK_R, Copy(P16, 0, 0, 2, 128), (0,)),
        Instr(2, DOWN, Copy(U16, 0, 1, 2, 128), (0,)),
    )

    def made(*more):
        segments = (Segment(SegmentName.EVAL, (*race, *more)),)
        return Plan(tiers=tiers, home=home, segments=segments)

    release = Instr(9, CPU, Release(2), (1, 2))
    verify(nothing, made(release))
    fault = fault_of(nothing, made(Instr(3, UP, Copy(U16, 0, 2, 1, 128), (1, 2)), release))
    assert "p16 of 1, version 0 in slot 2; found writes that no order settles" in str(fault)
    assert fault.others == (1, 2)


def test_frames():
    good = by_hand(*GOOD)
    cases = {
        "a stack of tiers": replace(good, tiers=good.tiers[::-1]),
        "segments eval; found ": replace(good, segments=()),
        "2 step tiers; found 1": replace(good, step_tiers=(0,)),
        "extents that have a home; found m of 0": by_hand(*GOOD, home=(*HOME, Held(0, 0, 256, Extent(Kind.M, 0)))),
        "128 bytes at 64": by_hand(*GOOD, home=(HOME[0], replace(HOME[1], offset=64))),
        "addresses 0 to 128 free": by_hand(*GOOD, home=(HOME[0], replace(HOME[1], offset=0))),
        "a home for p16 of 1; found none": by_hand(*GOOD, home=HOME[:1]),
    }
    for message, plan in cases.items():
        fault = fault_of(ONLY, plan)
        assert message in str(fault)
        assert str(fault).startswith("the plan: ")


def test_a_home_that_is_too_small():
    made = program(training=False)
    plan = serial_plan(made, random.Random(0))
    which = next(place for place, held in enumerate(plan.home) if held.bytes > 128)
    home = (*plan.home[:which], replace(plan.home[which], bytes=128), *plan.home[which + 1 :])
    assert "256 bytes for home slot" in str(fault_of(made, replace(plan, home=home)))


def test_one_fault_a_segment_and_no_more_than_asked_for():
    made = program()
    plan = serial_plan(made, random.Random(0))
    empty = replace(plan, segments=tuple(Segment(segment.name, ()) for segment in plan.segments))
    found = faults(made, empty)
    assert [fault.segment for fault in found] == ["prologue", "micro_last", "step", "skip", "eval"]
    assert len(faults(made, empty, limit=2)) == 2


# ---------------------------------------------------------------- training, changed one operation at a time


def changed(made, segment, kind, stack=("device", "host"), **fields):
    """A serial plan with the first operation of a kind changed; a field may be a function of the plan and old op."""
    plan = serial_plan(made, random.Random(3), stack, waits=Waits.CHAIN, restless=0)
    verify(made, plan)
    instrs = list(plan.segment(segment).instrs)
    place = next(place for place, instr in enumerate(instrs) if isinstance(instr.op, kind))
    if not fields:
        gone = instrs.pop(place)
        instrs = [
            replace(instr, after=tuple(wait if wait != gone.id else gone.after[0] for wait in instr.after))
            for instr in instrs
        ]
    else:
        queue = fields.pop("queue", instrs[place].queue)
        values = {name: value(instrs[place].op) if callable(value) else value for name, value in fields.items()}
        instrs[place] = replace(instrs[place], op=replace(instrs[place].op, **values), queue=queue)
    segments = [Segment(segment, tuple(instrs)) if row.name is segment else row for row in plan.segments]
    return replace(plan, segments=tuple(segments))


LAST, FIRST = SegmentName.MICRO_LAST, SegmentName.MICRO_FIRST
FP32 = {"precision": Precision.FP32}
DISK = ("host", "disk")
TRAINING = [
    ({}, LAST, Norm, {}, "the norm of group 0 before the decision; found none before it"),
    ({}, LAST, Norm, {"group": 2}, "a group that gets a gradient; found group 2"),
    ({}, LAST, Norm, {"group": 1}, "p16 of 1, version 1 in slot"),
    ({}, LAST, Norm, {"queue": Queue.COLL}, "found COLL"),
    ({}, LAST, Decide, {}, "1 decisions; found 0"),
    ({}, LAST, Decide, {"seq": 1}, "seq 0; found 1"),
    ({}, LAST, Decide, {"queue": Queue.CPU}, "queue COLL; found CPU"),
    ({}, SegmentName.STEP, Step, {"group": 2}, "a group that gets a gradient; found group 2"),
    ({}, SegmentName.STEP, Step, {"slots": lambda op: op.slots[1:]}, "4 slots; found 3"),
    ({}, SegmentName.STEP, Step, {"slots": lambda op: op.slots[:3] + op.slots[:1]}, "different slots; found slots"),
    ({}, SegmentName.STEP, Step, {"slots": lambda op: op.slots[:2] + op.slots[:1:-1]}, "m of 0, version 0 in slot"),
    ({}, SegmentName.STEP, Step, {}, "m of 0, version 1 in slot"),
    (FP32, SegmentName.STEP, Step, {"group": 1}, "p32 of 1, version 0"),
    ({"accumulate": 2}, SegmentName.STEP, Step, {"group": 1}, "256 bytes in slot"),
    ({}, SegmentName.SKIP, Cast, {"group": 1}, "p32 of 1, version 0"),
    ({}, SegmentName.SKIP, Cast, {}, "p16 of 0, version 2 in slot"),
    ({}, SegmentName.PROLOGUE, Cast, {"weight": lambda op: op.master}, "different slots"),
    ({"accumulate": 2}, FIRST, Accumulate, {"first": False}, "first True; found False"),
    ({"accumulate": 2}, LAST, Accumulate, {"first": True}, "first False; found True"),
    ({"accumulate": 2}, LAST, Accumulate, {"group": 2}, "a group that gets a gradient; found group 2"),
    ({"accumulate": 2}, LAST, Accumulate, {}, "acc of"),
    ({"accumulate": 2}, LAST, Norm, {"group": 1}, "acc of 1, version 2"),
    (FP32, LAST, Norm, {"group": 1}, "acc of 1, version 1"),
    ({"ranks": 2}, LAST, Gather, {"group": 1}, "p16 of 1, version 0"),
    ({"ranks": 2}, LAST, Gather, {"seq": 1}, "seq 0; found 1"),
    ({"ranks": 2}, LAST, Gather, {"full": lambda op: op.shard}, "different slots"),
    ({"ranks": 2}, LAST, ReduceScatter, {"group": 0}, "full of 0, version 1"),
    ({"ranks": 2}, LAST, ReduceScatter, {"wire": lambda op: op.shard, "shard": lambda op: op.wire}, "wire slot of"),
    ({"ranks": 2, "accumulate": 2}, LAST, ReduceScatter, {"group": 0}, "grad of 0, version 1"),
]


@pytest.mark.parametrize(("options", "segment", "kind", "fields", "message"), TRAINING)
def test_broken_in_training(options, segment, kind, fields, message):
    made = program(**options)
    assert message in str(fault_of(made, changed(made, segment, kind, **fields)))


@pytest.mark.parametrize(
    ("options", "kind"), [({}, Norm), (FP32, Norm), (FP32, Accumulate), ({"ranks": 2}, ReduceScatter)]
)
def test_a_gradient_is_summed_and_measured_once(options, kind):
    """A second time changes no bit, but it is no part of a training step, and the reference refuses it."""
    made = program(**options)
    plan = serial_plan(made, random.Random(3), ("device",), waits=Waits.CHAIN, restless=0)
    rows, seqs = [], count()
    for instr in plan.segment(LAST).instrs:
        rows += [instr, replace(instr, id=1000 + instr.id)] if isinstance(instr.op, kind) else [instr]
    rows = [replace(row, op=replace(row.op, seq=next(seqs))) if hasattr(row.op, "seq") else row for row in rows]
    segments = tuple(Segment(LAST, tuple(rows)) if row.name is LAST else row for row in plan.segments)
    found = str(fault_of(made, replace(plan, segments=segments)))
    assert f"expected one {kind.__name__} of group " in found


def test_a_slot_too_small_for_what_is_written():
    made = program(ranks=2)
    plan = changed(made, LAST, Gather, full=lambda op: op.full)
    gather = next(instr.op for instr in plan.segment(LAST).instrs if isinstance(instr.op, Gather))
    instrs = [
        replace(instr, op=replace(instr.op, bytes=128))
        if isinstance(instr.op, Reserve) and instr.op.slot == gather.full
        else instr
        for instr in plan.segment(LAST).instrs
    ]
    segments = tuple(Segment(LAST, tuple(instrs)) if row.name is LAST else row for row in plan.segments)
    assert f"256 bytes in slot {gather.full}; found 128" in str(fault_of(made, replace(plan, segments=segments)))


def test_disks_do_not_compute():
    made = program()
    plan = serial_plan(made, random.Random(1), DISK, waits=Waits.CHAIN, restless=0)
    on_disk = next(slot for slot, held in enumerate(plan.home) if held.tier == 1 and held.extent.kind is Kind.P16)
    instrs = [
        replace(instr, op=replace(instr.op, slot=on_disk)) if isinstance(instr.op, Norm) else instr
        for instr in plan.segment(LAST).instrs
    ]
    segments = tuple(Segment(LAST, tuple(instrs)) if row.name is LAST else row for row in plan.segments)
    assert "a tier that can compute; found disk" in str(fault_of(made, replace(plan, segments=segments)))


def test_steps_run_where_the_plan_says():
    made = program()
    plan = serial_plan(made, random.Random(1), ("device",))
    verify(made, replace(plan, step_tiers=(0, 0, -1)))
    assert "expected tier 1; found tier 0" in str(fault_of(made, replace(plan, step_tiers=(1, 0, -1))))


def test_a_norm_that_is_not_waited_for():
    made = program()
    plan = serial_plan(made, random.Random(3), ("device",), restless=0)
    instrs = plan.segment(LAST).instrs
    norms = {instr.id for instr in instrs if isinstance(instr.op, Norm)}
    assert norms
    free = [replace(instr, after=()) if isinstance(instr.op, Decide) else instr for instr in instrs]
    segments = tuple(Segment(LAST, tuple(free)) if row.name is LAST else row for row in plan.segments)
    fault = fault_of(made, replace(plan, segments=segments))
    assert "found none that is waited for" in str(fault)
    assert set(fault.others) <= norms


def test_a_group_is_stepped_in_backward_once_its_norm_is_known():
    """The norm finds gradients that are not finite, before anything is changed."""
    made = program(precision=Precision.FP32)
    tiers = (Tier("device", 1 << 16), Tier("host", 1 << 16))
    placement = filled(made, tiers, resident=0, streamed=frozenset(made.stepped), in_backward=True)
    plan = make_plan(make_frame(made, tiers, placement, Policy.BELADY))
    verify(made, plan)
    rows = list(plan.segment(LAST).instrs)
    norm = next(row for row in rows if isinstance(row.op, Norm))
    step = next(row for row in rows if isinstance(row.op, Step) and row.op.group == norm.op.group)
    assert rows.index(norm) < rows.index(step)
    rows.remove(norm)
    rows.insert(rows.index(step) + 1, replace(norm, after=(*norm.after, step.id)))
    kept = [replace(row, after=tuple(each for each in row.after if each != norm.id or row is not step)) for row in rows]
    segments = tuple(Segment(LAST, tuple(kept)) if row.name is LAST else row for row in plan.segments)
    found = str(fault_of(made, replace(plan, segments=segments)))
    assert f"expected the norm of group {norm.op.group} before its step; found none before it" in found


def ill_typed(plan, what):
    micro = next(segment for segment in plan.segments if segment.name is SegmentName.MICRO_LAST)
    if what in ("home", "tiers", "segments"):
        return replace(plan, **{what: None})
    if what == "extent":
        return replace(plan, home=(replace(plan.home[0], extent=1.5), *plan.home[1:]))
    changes = {
        "after": lambda instr: replace(instr, after=None),
        "op": lambda instr: replace(instr, op=1.5),
        "slots": lambda instr: replace(instr, op=replace(instr.op, slots=None)),
        "nonmodel": lambda instr: replace(instr, op=replace(instr.op, nonmodel_bytes=float("nan"))),
    }
    place = next(place for place, instr in enumerate(micro.instrs) if isinstance(instr.op, Run))
    instrs = list(micro.instrs)
    instrs[place] = changes[what](instrs[place])
    changed = tuple(replace(row, instrs=tuple(instrs)) if row is micro else row for row in plan.segments)
    return replace(plan, segments=changed)


@pytest.mark.parametrize("what", ["home", "tiers", "segments", "extent", "after", "op", "slots", "nonmodel"])
def test_ill_typed_plans_are_no_plans(what):
    made = program()
    plan = serial_plan(made, random.Random(1), ("device", "host"))
    verify(made, plan)
    with pytest.raises(PlanMismatch):
        verify(made, ill_typed(plan, what))
    assert len(faults(made, ill_typed(plan, what))) == 1

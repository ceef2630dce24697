"""The reference: whatever the plan and the order, training comes out bit for bit as without any plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import ORIGINS, random_plan
from _programs import TINY
from _symbolic import Symbolic, batch
from ps_core._errors import IllegalTransition, InvalidInput, PlanMismatch
from ps_core._extents import Extent, Kind, Precision, SegmentName
from ps_core._layout import lay_out
from ps_core._options import SGD, Adam, AdamW, Group
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
    Release,
    Reserve,
    Run,
    Segment,
    Shift,
    Step,
    Tier,
    slots_of,
)
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.tier_division import make_frame
from ps_core._program import Program
from ps_core._reference.execute_plan import Execution, Observed, Order, execute
from ps_core._reference.operations import carry_out
from ps_core._reference.oracle import train_unconstrained
from ps_core._reference.state_lifecycle import Lifecycle
from ps_core._reference.toy_network import ByteNetwork, Shape
from ps_core._reference.training_rules import Scaler, Training
from ps_core._states import TensorState
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace

S = SegmentName
OPTIMIZERS = (
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.5, weight_decay=0.1),
    Adam(lr=0.05, weight_decay=0.1),
    AdamW(lr=0.05, groups=(Group(match=lambda name, _: name == "t0", lr=0.2, weight_decay=0.0),)),
)

# ---------------------------------------------------------------- any plan, any order

ORDERS = st.sampled_from(Order)


@pytest.mark.parametrize("origin", ORIGINS)
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), order=ORDERS, overlap=st.booleans(), optimizer=st.sampled_from(OPTIMIZERS))
def test_any_plan_in_any_order_gives_the_bits_of_training_without_one(origin, seed, order, overlap, optimizer):
    rng = random.Random(seed)
    program, plan = random_plan(rng, origin, TINY)
    decides = not plan.stepped_in_backward
    training = Training(
        batch=batch,
        iterations=3,
        optimizer=optimizer,
        max_grad_norm=rng.choice((None, 0.5)) if decides else None,
        loss_scale=8.0,
        evaluate_after=frozenset({1}),
        overflow_at=rng.choice((frozenset(), frozenset({1}))) if decides else frozenset(),
    )
    network = Symbolic(program.trace)
    execution = Execution(order=order, seed=seed, overlap=overlap)
    assert execute(network, program, plan, training, execution) == train_unconstrained(network, program, training)


def planned(network, *, device, host=None, disk=None, resident=0, streamed=(), numel=600, **options):
    """A plan of the small network in so many bytes."""
    ranks, within = options.pop("ranks", 1), options.pop("in_backward", False)
    layout = lay_out(network.trace, group_numel=numel, ranks=ranks)
    program = Program(trace=network.trace, layout=layout, **options)
    sizes = (("device", device), ("host", host), ("disk", disk))
    tiers = tuple(Tier(name, size) for name, size in sizes if size is not None)
    placement = filled(program, tiers, resident=resident, streamed=frozenset(streamed), in_backward=within)
    return program, make_plan(make_frame(program, tiers, placement))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"device": 36_000, "host": 200_000}),
        ({"checkpointing": True}, {"device": 36_000, "host": 200_000, "streamed": (1, 2), "numel": 300}),
        ({}, {"device": 48_000, "host": 300_000, "accumulate": 3, "precision": Precision.FP16}),
        ({"checkpointing": True}, {"device": 60_000, "host": 200_000, "ranks": 2, "accumulate": 2}),
        ({}, {"device": 44_000, "host": 200_000, "ranks": 3, "precision": Precision.FP16}),
        ({}, {"device": 60_000, "host": 90_000, "disk": 200_000, "precision": Precision.FP32}),
    ],
)
def test_the_small_network_trains_alike_under_a_budget(shape, options):
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8, **shape))
    program, plan = planned(network, **options)
    training = Training(
        batch=network.batch,
        iterations=4,
        optimizer=AdamW(lr=0.02),
        max_grad_norm=1.0,
        loss_scale=1024.0,
        evaluate_after=frozenset({0, 2}),
        overflow_at=frozenset({1}),
    )
    want = train_unconstrained(network, program, training)
    assert len(want.losses) == 4 * program.accumulate * program.ranks
    assert len(want.evaluations) == 2 * program.ranks
    assert want.skipped == (1,)
    for execution in (None, Execution(order=Order.LATEST), Execution(seed=5, overlap=True)):
        assert execute(network, program, plan, training, execution) == want


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_groups_are_stepped_within_backward_where_only_their_own_gradient_decides(precision):
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8))
    room = {"device": 36_000, "host": 200_000, "streamed": (1, 2), "numel": 300, "precision": precision}
    program, plan = planned(network, **room, in_backward=True)
    assert plan.stepped_in_backward == {1, 2}
    training = Training(batch=network.batch, iterations=3, optimizer=AdamW(lr=0.02), evaluate_after=frozenset({1}))
    want = train_unconstrained(network, program, training)
    for execution in (None, Execution(order=Order.LATEST), Execution(seed=5, overlap=True)):
        assert execute(network, program, plan, training, execution) == want
    with pytest.raises(PlanMismatch, match="a step without a decision"):
        execute(network, program, plan, replace(training, max_grad_norm=1.0))
    with pytest.raises(FloatingPointError, match="a gradient of group 2 is not finite, so the group was not stepped"):
        execute(network, program, plan, replace(training, overflow_at=frozenset({1})))
    late = planned(network, **room)[1].segment(S.STEP)
    twice = replace(plan, segments=tuple([late if row.name is S.STEP else row for row in plan.segments]))
    with pytest.raises(PlanMismatch, match="process 0, step, slot at"):
        execute(network, program, twice, training)


def test_gradients_of_all_processes_are_summed():
    """Gradient descent at half the rate on two processes with the same data is one at the full rate, bit for bit."""
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8))
    results = []
    for ranks in (1, 2):
        program, plan = planned(network, device=200_000, host=200_000, ranks=ranks, precision=Precision.FP32)
        training = Training(batch=lambda *_: b"abacadaba", optimizer=SGD(lr=0.25 / ranks), iterations=2)
        results.append(execute(network, program, plan, training))
    assert results[0].masters == results[1].masters
    assert results[1].norms == tuple(2 * norm for norm in results[0].norms)
    assert results[1].losses[::2] == results[1].losses[1::2] == results[0].losses


def test_results_do_not_depend_on_groups_or_policy_but_do_on_data():
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8))
    training = Training(batch=network.batch, iterations=2, max_grad_norm=0.1)
    outcomes = {
        execute(network, *planned(network, device=60_000, host=200_000, numel=numel, resident=numel % 3), training)
        for numel in (100, 400, 1600)
    }
    assert len(outcomes) == 1
    other = replace(training, batch=lambda iteration, micro, rank: network.batch(iteration + 1, micro, rank))
    program, plan = planned(network, device=60_000, host=200_000)
    assert execute(network, program, plan, other) not in outcomes


def test_the_observer_sees_every_instruction_within_budget():
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8))
    program, plan = planned(network, device=36_000, host=200_000)
    seen: list[Observed] = []
    execute(network, program, plan, Training(batch=network.batch, iterations=2), Execution(observer=seen.append))
    names = [S.PROLOGUE, S.MICRO_LAST, S.STEP, S.MICRO_LAST, S.STEP]
    assert len(seen) == sum(len(plan.segment(name).instrs) for name in names)
    assert list(dict.fromkeys((row.iteration, row.segment) for row in seen)) == list(
        zip([-1, 0, 0, 1, 1], names, strict=True)
    )
    nonmodel = [row.nonmodel_bytes for row in seen if isinstance(row.instr.op, Run)]
    assert nonmodel == [visit.nonmodel_bytes for visit in program.visits] * 2
    for row in seen:
        assert row.used_bytes[0] + row.nonmodel_bytes <= 36_000
        assert row.used_bytes[1] <= 200_000


def test_evaluation_only():
    network = ByteNetwork(Shape(layers=2, width=8, hidden=12, tokens=8))
    program, plan = planned(network, device=20_000, host=100_000, training=False)
    training = Training(batch=network.batch, iterations=2)
    want = train_unconstrained(network, program, training)
    assert len(want.evaluations) == 2
    assert want.losses == want.masters == ()
    assert execute(network, program, plan, training) == want


# ---------------------------------------------------------------- one plan by hand, and what may be wrong with it

TRACE = Trace(
    model="one",
    tensors=(Tensor(name="t0", numel=60),),
    moments=(
        Moment(name="forward", phase=Phase.FORWARD, reads=(0,), nonmodel_bytes=100),
        Moment(name="backward", phase=Phase.BACKWARD, reads=(0,), grads=(0,), nonmodel_bytes=50),
    ),
)
PROGRAM = Program(trace=TRACE, layout=lay_out(TRACE, group_numel=64))
P16 = Extent(Kind.P16, 0)
KINDS = (Kind.P32, Kind.M, Kind.V)
STATES = tuple(Held(1, 128 + 256 * place, 256, Extent(kind, 0)) for place, kind in enumerate(KINDS))


def queue_up(*rows) -> tuple[Instr, ...]:
    return tuple(Instr(number, queue, op, after) for number, (queue, op, after) in enumerate(rows))


FETCH = ((Queue.H2D, Reserve(4, 0, 0, 128), ()), (Queue.H2D, Copy(P16, 0, 0, 4, 128), ()))
MICRO = (
    *FETCH,
    (Queue.COMPUTE, Run(0, (4,), 100), (1,)),
    (Queue.COMPUTE, Run(1, (4,), 50), ()),
    (Queue.COMPUTE, Norm(0, 4), ()),
    (Queue.D2H, Copy(P16, 1, 4, 0, 128), (3,)),
    (Queue.COLL, Decide(0), (4,)),
    (Queue.D2H, Release(4), (4,)),
)
HAND = Plan(
    tiers=(Tier("device", 256), Tier("host", 1024)),
    home=(Held(1, 0, 128, P16), *STATES),
    segments=(
        Segment(S.PROLOGUE, queue_up((Queue.CPU, Cast(0, 1, 0), ()))),
        Segment(S.MICRO_LAST, queue_up(*MICRO)),
        Segment(S.STEP, queue_up((Queue.CPU, Step(0, (0, 1, 2, 3)), ()))),
        Segment(S.SKIP, queue_up((Queue.CPU, Cast(0, 1, 0), ()))),
        Segment(S.EVAL, queue_up(*FETCH, (Queue.COMPUTE, Run(0, (4,), 100), (1,)), (Queue.D2H, Release(4), (2,)))),
    ),
)
TRAINING = Training(
    batch=batch, iterations=3, optimizer=SGD(lr=0.1), evaluate_after=frozenset({1}), overflow_at=frozenset({1})
)


def run_hand(plan=HAND, program=PROGRAM, **options):
    return execute(Symbolic(program.trace), program, plan, TRAINING, Execution(**options))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("order", Order)
def test_a_plan_by_hand(order, overlap):
    want = train_unconstrained(Symbolic(TRACE), PROGRAM, TRAINING)
    for seed in range(5):
        assert run_hand(order=order, seed=seed, overlap=overlap) == want


def with_ops(name: SegmentName, changes: dict[int, object], *, drop=(), add=()) -> Plan:
    """The plan by hand with some instructions of one segment changed, left out, or put behind."""
    segments = []
    for segment in HAND.segments:
        instrs = segment.instrs
        if segment.name is name:
            instrs = tuple(
                replace(instr, op=changes.get(instr.id, instr.op)) for instr in instrs if instr.id not in drop
            )
            instrs += tuple(Instr(50 + place, *row) for place, row in enumerate(add))
        segments.append(Segment(segment.name, instrs))
    return replace(HAND, segments=tuple(segments))


BROKEN = {
    "above the budget": (with_ops(S.MICRO_LAST, {0: Reserve(4, 0, 256, 128)}), "not within the 256 bytes"),
    "over another slot": (with_ops(S.MICRO_LAST, {0: Reserve(4, 1, 128, 128)}), "overlaps a slot at 128"),
    "reserved twice": (with_ops(S.STEP, {0: Reserve(0, 0, 0, 128)}), "cannot be reserved"),
    "no such tier": (with_ops(S.STEP, {0: Reserve(9, 7, 0, 128)}), "cannot be reserved"),
    "never reserved": (with_ops(S.MICRO_LAST, {}, drop=(0,)), "slot 4 is used while it is not reserved"),
    "wrong version": (with_ops(S.MICRO_LAST, {1: Copy(P16, 1, 0, 4, 128)}), "in version 1, found"),
    "nothing there": (with_ops(S.MICRO_LAST, {}, drop=(1,)), "found poison"),
    "copy of too little": (with_ops(S.MICRO_LAST, {1: Copy(P16, 0, 0, 4, 64)}), "a copy of 64 bytes"),
    "copy within a tier": (
        with_ops(S.MICRO_LAST, {0: Reserve(4, 1, 896, 128)}),
        "a copy of 128 bytes from tier 1 to 1",
    ),
    "other non-model bytes": (with_ops(S.MICRO_LAST, {2: Run(0, (4,), 99)}), "runs moment 0 with 99"),
    "no such moment": (with_ops(S.EVAL, {2: Run(1, (4,), 50)}), "runs moment 1"),
    "a slot too many": (with_ops(S.MICRO_LAST, {2: Run(0, (4, 4), 100)}), "has 2 slots, expected 1"),
    "computing on the host": (with_ops(S.MICRO_LAST, {2: Run(0, (0,), 100)}), "on tier 1, expected 0"),
    "too small": (with_ops(S.MICRO_LAST, {0: Reserve(4, 0, 0, 64)}), "too small for p16 of 0"),
    "in the way of non-model data": (with_ops(S.MICRO_LAST, {0: Reserve(4, 0, 128, 128)}), "overlaps a slot at 128"),
    "norm twice": (
        with_ops(S.MICRO_LAST, {}, add=((Queue.COMPUTE, Norm(0, 0), (6,)),)),
        "the norm of group 0 is taken twice",
    ),
    "norm left out": (with_ops(S.MICRO_LAST, {4: Reserve(9, 0, 0, 0)}), "decide for"),
    "step undecided": (with_ops(S.PROLOGUE, {0: Step(0, (0, 1, 2, 3))}), "without a decision"),
    "step short of slots": (with_ops(S.STEP, {0: Step(0, (0, 1, 2))}), "has 3 slots, expected 4"),
    "rebuilt for nothing": (with_ops(S.EVAL, {3: Cast(0, 1, 0)}), "eval rebuilds group 0"),
    "not given back": (with_ops(S.MICRO_LAST, {}, drop=(7,)), "ends with 5 slots, not 4"),
    "left home": (with_ops(S.STEP, {}, add=((Queue.CPU, Shift(3, 700), ()),)), "the home of v of 0 is not in place"),
    "home again elsewhere": (
        with_ops(S.STEP, {}, add=((Queue.CPU, Release(3), ()), (Queue.CPU, Reserve(9, 1, 640, 128), ()))),
        "the home of v of 0 is not in place",
    ),
    "gradient stays away": (with_ops(S.MICRO_LAST, {}, drop=(5,)), "expected p16 of 0 in version 1"),
    "a home that is gone": (
        with_ops(S.STEP, {}, add=((Queue.CPU, Release(3), ()), (Queue.CPU, Release(3), ()))),
        "slot 3 is used while it is not reserved",
    ),
}


@pytest.mark.parametrize(("plan", "message"), BROKEN.values(), ids=BROKEN)
def test_a_plan_that_breaks_a_rule_is_refused(plan, message):
    with pytest.raises(PlanMismatch, match=message):
        run_hand(plan)


def test_a_deadlock_is_named():
    instrs = tuple(
        replace(instr, after=(2,)) if instr.id == 1 else instr for instr in HAND.segment(S.MICRO_LAST).instrs
    )
    plan = replace(HAND, segments=(HAND.segments[0], Segment(S.MICRO_LAST, instrs)))
    with pytest.raises(PlanMismatch, match=r"deadlock: each of the instructions \[2, 1, 5, 6\]"):
        run_hand(plan)


def test_a_missing_wait_shows_in_some_order():
    """A copy that does not wait for the gradient it carries, a release that does not wait for its readers."""
    for victim in (5, 7):
        instrs = tuple(
            replace(instr, after=()) if instr.id == victim else instr for instr in HAND.segment(S.MICRO_LAST).instrs
        )
        instrs = tuple(replace(instr, queue=Queue.CPU) if instr.id == 7 == victim else instr for instr in instrs)
        plan = replace(HAND, segments=(HAND.segments[0], Segment(S.MICRO_LAST, instrs), *HAND.segments[2:]))
        caught = 0
        for seed in range(10):
            try:
                run_hand(plan, seed=seed)
            except PlanMismatch:
                caught += 1
        assert caught > 0


def test_segments_that_overlap_are_checked_by_what_they_read_and_in_the_end():
    lost = with_ops(S.STEP, {}, add=((Queue.CPU, Shift(3, 704), ()),))
    with pytest.raises(PlanMismatch, match="slot 3 is used while it is not reserved"):
        run_hand(lost, overlap=True)
    program = Program(trace=TRACE, layout=PROGRAM.layout, training=False)
    astray = Segment(S.EVAL, (*HAND.segment(S.EVAL).instrs, Instr(9, Queue.CPU, Shift(0, 128), (3,))))
    plan = replace(HAND, home=HAND.home[:1], segments=(astray,))
    once = replace(TRAINING, iterations=1)
    with pytest.raises(PlanMismatch, match="the home of p16 of 0 is not in place"):
        execute(Symbolic(TRACE), program, plan, once, Execution(overlap=True))


def test_what_an_earlier_segment_left_out_of_date_is_refused():
    stale = with_ops(S.MICRO_LAST, {}, drop=(5,))
    with pytest.raises(PlanMismatch, match="in version 1, found poison"):
        run_hand(stale, overlap=True)


def test_more_nonmodel_bytes_than_memory():
    plan = replace(HAND, tiers=(Tier("device", 128), Tier("host", 1024)))
    trace = replace(TRACE, moments=(replace(TRACE.moments[0], nonmodel_bytes=200), TRACE.moments[1]))
    program = Program(trace=trace, layout=PROGRAM.layout)
    segment = with_ops(S.MICRO_LAST, {2: Run(0, (4,), 200)}).segments[1]
    with pytest.raises(PlanMismatch, match="200 non-model bytes do not fit device"):
        run_hand(replace(plan, segments=(HAND.segments[0], segment)), program)


def test_moments_out_of_order_are_refused():
    """A gradient that needs no payload, run before the moment that still reads it."""
    moments = (TRACE.moments[0], replace(TRACE.moments[1], grads=()), replace(TRACE.moments[1], reads=()))
    trace = replace(TRACE, moments=moments)
    program = Program(trace=trace, layout=PROGRAM.layout)
    rows = (*MICRO[:3], (Queue.COMPUTE, Run(2, (4,), 50), ()), (Queue.COMPUTE, Run(1, (4,), 50), ()), *MICRO[4:])
    plan = replace(HAND, segments=(HAND.segments[0], Segment(S.MICRO_LAST, queue_up(*rows))))
    with pytest.raises(PlanMismatch, match="the gradient of 't0' comes before its last use"):
        run_hand(plan, program)


def test_an_accumulator_is_started_once():
    rng = random.Random(1)
    while True:
        program, plan = random_plan(rng, "tight", TINY)
        if program.accumulate > 1 and program.stepped:
            break
    segments = []
    for segment in plan.segments:
        instrs = tuple(
            replace(instr, op=replace(instr.op, first=True)) if isinstance(instr.op, Accumulate) else instr
            for instr in segment.instrs
        )
        segments.append(replace(segment, instrs=instrs))
    with pytest.raises(PlanMismatch, match="started at the wrong time"):
        execute(Symbolic(program.trace), program, replace(plan, segments=tuple(segments)), TRAINING)


def test_a_gathered_gradient_may_not_be_dropped_halfway():
    """Tensor states notice: the payload would go while a contribution is still to come."""
    moments = (*TRACE.moments, replace(TRACE.moments[1], reads=()))
    trace = replace(TRACE, moments=moments)
    program = Program(trace=trace, layout=lay_out(trace, group_numel=64, ranks=2))
    lifecycle = Lifecycle(program)
    lifecycle.after(Gather(0, 0, 1, 0))
    for visit in program.visits[:2]:
        lifecycle.before_run(visit)
        lifecycle.after_run(visit)
    with pytest.raises(IllegalTransition, match="release"):
        lifecycle.dropped(Kind.FULL, 0)
    lifecycle.before_run(program.visits[2])
    lifecycle.after_run(program.visits[2])
    lifecycle.dropped(Kind.FULL, 0)
    assert lifecycle.book.state(0) is TensorState.FREE


def test_collectives_and_decisions_belong_to_all_processes():
    with pytest.raises(PlanMismatch, match="Decide is no instruction for one process"):
        carry_out(None, None, Decide(0))  # type: ignore[arg-type]
    assert slots_of(Decide(0)) == ()


def test_a_program_for_another_network_is_refused():
    with pytest.raises(InvalidInput, match="another network"):
        execute(Symbolic(replace(TRACE, tokens=3)), PROGRAM, HAND, TRAINING)


@pytest.mark.parametrize("wrong", [{"iterations": -1}, {"growth_interval": 0}, {"loss_scale": 0.0}])
def test_training_is_checked(wrong):
    with pytest.raises(InvalidInput, match="at least"):
        Training(batch=batch, **wrong)


# ---------------------------------------------------------------- when a step is taken


def test_the_loss_scale_falls_with_overflow_and_grows_after_a_while():
    scaler = Scaler(Training(batch=batch, loss_scale=4.0, growth_interval=2), Precision.FP16)
    scales = []
    for finite in (True, True, False, True, False, False, False, False):
        scaler.decide(1 << 298, finite)
        scales.append(scaler.loss_scale)
    assert scales == [4, 8, 4, 4, 2, 1, 1, 1]
    assert scaler.steps == 3


def test_only_fp16_scales_the_loss():
    scaler = Scaler(Training(batch=batch, loss_scale=4.0, growth_interval=1), Precision.BF16)
    assert scaler.decide(1 << 298, True).grad_scale == 1.0
    assert scaler.decide(0, False).skip
    assert scaler.loss_scale == 1.0


def test_clipping_is_by_the_norm_of_the_unscaled_gradient():
    scaler = Scaler(Training(batch=batch, loss_scale=8.0, max_grad_norm=0.5), Precision.FP16)
    decision = scaler.decide(64 * 16 << 298, True)
    assert decision.norm == 4.0
    assert decision.grad_scale == pytest.approx(0.5 / 4.0 / 8.0)
    assert scaler.decide(1 << 290, True).grad_scale == 0.125


def test_activations_travel_through_slots():
    """The bytes a moment makes are those the moment that takes them finds, wherever they have been meanwhile."""
    trace = Trace(
        model="kept",
        tensors=(Tensor(name="w", numel=8),),
        activations=(Activation(name="x", bytes=100),),
        moments=(
            Moment(name="forward", phase=Phase.FORWARD, reads=(0,), makes=(0,)),
            Moment(name="backward", phase=Phase.BACKWARD, reads=(0,), grads=(0,), takes=(0,)),
        ),
    )
    program = Program(trace=trace, layout=lay_out(trace, group_numel=64))
    act = Extent(Kind.ACT, 0)
    rows = (
        *FETCH,
        (Queue.COMPUTE, Reserve(5, 0, 128, 128), ()),
        (Queue.COMPUTE, Run(0, (4, 5), 0), (1,)),
        (Queue.D2H, Reserve(6, 1, 896, 128), ()),
        (Queue.D2H, Copy(act, 0, 5, 6, 128), (3,)),
        (Queue.D2H, Release(5), ()),
        (Queue.H2D, Reserve(7, 0, 128, 128), (6,)),
        (Queue.H2D, Copy(act, 0, 6, 7, 128), ()),
        (Queue.COMPUTE, Run(1, (4, 7), 0), (8,)),
        (Queue.COMPUTE, Norm(0, 4), ()),
        (Queue.D2H, Copy(P16, 1, 4, 0, 128), (9,)),
        (Queue.COLL, Decide(0), (10,)),
        (Queue.D2H, Release(4), (10,)),
        (Queue.D2H, Release(6), ()),
        (Queue.D2H, Release(7), ()),
    )
    look = queue_up(*FETCH, (Queue.COMPUTE, Run(0, (4,), 0), (1,)), (Queue.D2H, Release(4), (2,)))
    learn = Segment(S.MICRO_LAST, queue_up(*rows))
    plan = replace(HAND, segments=(HAND.segments[0], learn, *HAND.segments[2:4], Segment(S.EVAL, look)))
    assert run_hand(plan, program) == train_unconstrained(Symbolic(trace), program, TRAINING)

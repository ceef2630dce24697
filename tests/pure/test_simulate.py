"""The clock, against schedules worked out by hand and against a slow clock that follows the definition word by word."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import ORIGINS, random_plan
from _programs import TINY
from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._layout import lay_out
from ps_core._plan import (
    Copy,
    Decide,
    Held,
    Instr,
    Norm,
    Op,
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
from ps_core._program import Program
from ps_core._simulate.clock import QUEUE_NAMES, Prediction, moved_bytes, peak_bytes, simulate
from ps_core._simulate.instruction_times import Costs
from ps_core._simulate.machine import Machine
from ps_core._trace import Moment, Phase, Tensor, Trace

NUMEL = 64  # 16-bit: one slot of 128 bytes
LEFT = Machine(
    name="powers",
    memory_bytes=1,
    host_memory_bytes=1,
    matmul_flops=1.0,
    matmul_flops_fp32=1.0,
    device_bandwidth=128.0,
    h2d_bandwidth=32.0,
    d2h_bandwidth=64.0,
    host_bandwidth=256.0,
    disk_read_bandwidth=16.0,
    disk_write_bandwidth=16.0,
    collective_bandwidth=64.0,
    internode_bandwidth=64.0,
    latency_s=2.0**-40,
    moment_overhead_s=2.0**-40,
    launch_s=0.0,
    tensor_overhead_s=0.0,
)
"""Seconds come out whole but for latencies, which rounding to a microsecond removes."""


def tiny(*, layers: int = 1, nonmodel: int = 128, training: bool = True) -> Program:
    """Layers of 64 parameters; forward moments take 4 s, backward ones 8 s."""
    forward = [
        Moment(name=f"f{i}", phase=Phase.FORWARD, reads=(i,), nonmodel_bytes=nonmodel, flops=4.0) for i in range(layers)
    ]
    backward = [
        Moment(name=f"b{i}", phase=Phase.BACKWARD, reads=(i,), grads=(i,), nonmodel_bytes=2 * nonmodel, flops=8.0)
        for i in reversed(range(layers))
    ]
    trace = Trace(
        model="tiny",
        tensors=tuple(Tensor(name=f"w{i}", numel=NUMEL) for i in range(layers)),
        moments=(*forward, *backward),
    )
    return Program(trace=trace, layout=lay_out(trace, group_numel=NUMEL), training=training)


def home(tier: int, kinds: tuple[Kind, ...] = (Kind.P16, Kind.P32, Kind.M, Kind.V)) -> tuple[Held, ...]:
    held, offset = [], 0
    for kind in kinds:
        size = NUMEL * (2 if kind is Kind.P16 else 4)
        held.append(Held(tier, offset, size, Extent(kind, 0)))
        offset += size
    return tuple(held)


def segment(name: SegmentName, *instrs: tuple[Queue, Op, tuple[int, ...]]) -> Segment:
    return Segment(name, tuple(Instr(i, queue, op, after) for i, (queue, op, after) in enumerate(instrs)))


def resident_plan() -> Plan:
    """Everything at home on the compute tier: run, run, norm, decide; step."""
    return Plan(
        tiers=(Tier("device", 4096),),
        home=home(0),
        segments=(
            segment(
                SegmentName.MICRO_LAST,
                (Queue.COMPUTE, Run(0, (0,), 128), ()),
                (Queue.COMPUTE, Run(1, (0,), 256), ()),
                (Queue.COMPUTE, Norm(0, 0), ()),
                (Queue.COLL, Decide(0), (2,)),
            ),
            segment(SegmentName.STEP, (Queue.COMPUTE, Step(0, (0, 1, 2, 3)), ())),
        ),
    )


def whole(prediction: Prediction) -> dict[str, object]:
    """With latencies rounded away."""

    def rounded(value: object) -> object:
        if isinstance(value, dict):
            return {key: rounded(inner) for key, inner in value.items()}
        return round(value, 6) if isinstance(value, float) else value

    return {key: rounded(value) for key, value in prediction.as_dict().items()}


def test_a_resident_model_by_hand() -> None:
    found = whole(simulate(tiny(), resident_plan(), LEFT))
    assert found == {
        "step_time_s": 4 + 8 + 1 + 14,  # norm 2 x 64 / 128, step 28 x 64 / 128
        "bound_step_time_s": 27,
        "forward_s": 4,
        "backward_s": 8,
        "update_s": 15,
        "stalled_s": 0,
        "launching_s": 0,
        "elapsed_s": 81,
        "busy_s": {**dict.fromkeys(QUEUE_NAMES.values(), 0), "compute": 27},
        "moved_bytes": {"wire": 0},
        "evictions": 0,
        "peak_bytes": {"device": 128 + 3 * 256 + 256},
    }
    assert json.loads(json.dumps(found)) == found


def offloaded_plan() -> Plan:
    """Everything at home on the host: fetched for each pass, the gradient sent down, stepped on the CPU."""
    weight, down, up = Extent(Kind.P16, 0), (4, 0, 0, 128), (5, 0, 0, 128)
    return Plan(
        tiers=(Tier("device", 1024), Tier("host", 4096)),
        home=home(1),
        segments=(
            segment(
                SegmentName.MICRO_LAST,
                (Queue.H2D, Reserve(*down), ()),
                (Queue.H2D, Copy(weight, 0, 0, 4, 128), ()),
                (Queue.COMPUTE, Run(0, (4,), 128), (1,)),
                (Queue.H2D, Release(4), (2,)),
                (Queue.H2D, Reserve(*up), ()),
                (Queue.H2D, Copy(weight, 0, 0, 5, 128), ()),
                (Queue.COMPUTE, Run(1, (5,), 256), (5,)),
                (Queue.COMPUTE, Norm(0, 5), ()),
                (Queue.D2H, Copy(weight, 1, 5, 0, 128), (6,)),
                (Queue.D2H, Release(5), (7,)),
                (Queue.COLL, Decide(0), (7,)),
            ),
            segment(SegmentName.STEP, (Queue.CPU, Step(0, (0, 1, 2, 3)), ())),
        ),
    )


def test_an_offloaded_model_by_hand() -> None:
    # Copy up 4 s, run 4, copy up 4, run 8; norm 1, meanwhile copy down 2; step 7 (after the copy down, by address);
    # the next copy up reads the weight the step wrote: 4 more before the next moment. 4 + 4 + 8 + 2 + 7 + 4 = 29.
    found = whole(simulate(tiny(), offloaded_plan(), LEFT))
    assert (found["step_time_s"], found["bound_step_time_s"]) == (29, 29)
    # Forward waits for the step and a copy up, backward for a copy up; what is left is the copy down.
    assert (found["forward_s"], found["backward_s"], found["update_s"]) == (7 + 12, 8, 2)
    assert found["stalled_s"] == 29 - 13
    assert found["busy_s"] == {
        "compute": 13,
        "host->device": 8,
        "device->host": 2,
        "disk->host": 0,
        "host->disk": 0,
        "collectives": 0,
        "cpu": 7,
    }
    assert found["moved_bytes"] == {"host->device": 256, "device->host": 128, "wire": 0}
    assert found["evictions"] == 1
    assert found["peak_bytes"] == {"device": 128 + 256, "host": 128 + 3 * 256}
    assert found["elapsed_s"] == 2 * 29 + 4 + 4 + 4 + 8 + 2 + 7


def test_one_iteration_is_taken_from_a_standing_start() -> None:
    found = simulate(tiny(), offloaded_plan(), LEFT, iterations=1)
    assert found.bound_step_time_s == found.elapsed_s
    assert round(found.elapsed_s, 6) == 29


def test_segments_join_at_addresses_and_nowhere_else() -> None:
    """A copy of bytes the step does not touch may run beside it, which the engine does not do; others wait."""
    weight = Extent(Kind.P16, 0)
    for offset, waits in ((0, True), (64 * 2 + 3 * 256, False)):
        plan = Plan(
            tiers=(Tier("device", 4096), Tier("host", 4096)),
            home=(*home(0), Held(1, 0, 128, weight)),
            segments=(
                segment(
                    SegmentName.MICRO_LAST,
                    (Queue.COMPUTE, Run(0, (0,), 0), ()),
                    (Queue.COMPUTE, Run(1, (0,), 0), ()),
                ),
                segment(
                    SegmentName.STEP,
                    (Queue.H2D, Reserve(5, 0, offset, 128), ()),
                    (Queue.H2D, Copy(weight, 0, 4, 5, 128), ()),
                    (Queue.H2D, Release(5), ()),
                ),
            ),
        )
        found = simulate(tiny(), plan, LEFT, iterations=1)
        assert round(found.elapsed_s, 6) == (16 if waits else 12)
        assert round(found.bound_step_time_s, 6) == (16 if waits else 12)
        assert round(found.step_time_s, 6) == 16
        assert round(found.stalled_s, 6) == 4


def test_nonmodel_data_wait_and_are_waited_for() -> None:
    weight = Extent(Kind.P16, 0)
    for nonmodel in (0, 1024, 2048):
        plan = Plan(
            tiers=(Tier("device", 4096), Tier("host", 4096)),
            home=(*home(0), Held(1, 0, 128, weight)),
            segments=(
                segment(
                    SegmentName.MICRO_LAST,
                    (Queue.COMPUTE, Run(0, (0,), nonmodel), ()),
                    (Queue.COMPUTE, Run(1, (0,), nonmodel // 2), ()),
                ),
                segment(
                    SegmentName.STEP,
                    (Queue.H2D, Reserve(5, 0, 4096 - 1024, 128), ()),
                    (Queue.H2D, Copy(weight, 0, 4, 5, 128), ()),
                    (Queue.H2D, Release(5), ()),
                ),
            ),
        )
        # The copy (4 s) needs bytes that only the first moment covers, or both (2048), or none; the next step's first
        # moment waits for it if it covers them. So it hides behind the second moment, or runs alone.
        found = simulate(tiny(), plan, LEFT, iterations=2)
        assert round(found.elapsed_s, 6) == {0: 24, 1024: 24, 2048: 12 + 4 + 12 + 4}[nonmodel]


def test_without_moments_time_is_shared_evenly() -> None:
    trace = Trace(model="none", tensors=(Tensor(name="w", numel=NUMEL),), moments=())
    program = Program(trace=trace, layout=lay_out(trace, group_numel=NUMEL), training=False)
    held = (Held(0, 0, 128, Extent(Kind.P16, 0)),)
    plan = Plan((Tier("device", 4096),), held, (segment(SegmentName.EVAL, (Queue.COMPUTE, Norm(0, 0), ())),))
    found = simulate(program, plan, LEFT, iterations=4)
    assert (round(found.step_time_s, 6), found.forward_s, found.backward_s) == (1, 0, 0)
    empty = Plan((Tier("device", 4096),), held, (segment(SegmentName.EVAL),))
    assert simulate(program, empty, LEFT).step_time_s == 0


def test_the_busiest_queue_bounds_the_step() -> None:
    """A queue nothing waits for yet falls behind: in the long run it sets the pace."""
    plan = Plan(
        tiers=(Tier("device", 4096), Tier("host", 4096)),
        home=(*home(0), Held(1, 0, 128, Extent(Kind.P16, 0)), Held(0, 2048, 128, Extent(Kind.P16, 0))),
        segments=(
            segment(
                SegmentName.MICRO_LAST,
                (Queue.COMPUTE, Run(0, (0,), 0), ()),
                (Queue.COMPUTE, Run(1, (0,), 0), ()),
                *[(Queue.H2D, Copy(Extent(Kind.P16, 0), 0, 4, 5, 128), ())] * 5,
            ),
            segment(SegmentName.STEP),
        ),
    )
    found = simulate(tiny(), plan, LEFT)
    assert (round(found.step_time_s, 6), round(found.bound_step_time_s, 6)) == (20, 20)
    assert round(found.stalled_s, 6) == 8


@pytest.mark.parametrize(("iterations", "ranks_per_node"), [(0, None), (3, 0), (3, 2), ("x", None), (3, "x")])
def test_senseless_arguments_are_refused(iterations: Any, ranks_per_node: Any) -> None:
    with pytest.raises(InvalidInput):
        simulate(tiny(), resident_plan(), LEFT, iterations=iterations, ranks_per_node=ranks_per_node)


def test_damage_that_shows_is_a_mismatch() -> None:
    plan = resident_plan()
    step = plan.segment(SegmentName.STEP)
    late = replace(step.instrs[0], after=(7,))
    lost = replace(step.instrs[0], op=Release(99))
    far = replace(step.instrs[0], op=Reserve(99, 3, 0, 128))
    for instr in (late, lost, far):
        broken = replace(plan, segments=(plan.segments[0], Segment(SegmentName.STEP, (instr,))))
        with pytest.raises(PlanMismatch):
            simulate(tiny(), broken, LEFT)


def test_peak_follows_the_list() -> None:
    """Non-model data between two moments are the smaller of the two; after the last there is none."""
    program = tiny()
    base = resident_plan()
    home_bytes = 128 + 3 * 256

    def peak(*instrs: tuple[Queue, Op, tuple[int, ...]]) -> int:
        micro = segment(SegmentName.MICRO_LAST, *instrs)
        return peak_bytes(program, replace(base, segments=(micro, base.segments[1])))["device"]

    runs = (Queue.COMPUTE, Run(0, (0,), 128), ()), (Queue.COMPUTE, Run(1, (0,), 256), ())
    take, give = (Queue.H2D, Reserve(4, 0, 2048, 512), ()), (Queue.H2D, Release(4), ())
    assert peak(*runs) == home_bytes + 256
    assert peak(take, give, *runs) == home_bytes + 512
    assert peak(runs[0], take, give, runs[1]) == home_bytes + 512 + 128
    assert peak(take, runs[0], give, runs[1]) == home_bytes + 512 + 128
    assert peak(*runs, take, give) == home_bytes + 512
    assert peak(take, *runs, give) == home_bytes + 512 + 256


def test_a_shifted_home_slot_is_followed() -> None:
    base = resident_plan()
    aside = (Queue.COMPUTE, Shift(0, 2048), ())
    back = (Queue.COMPUTE, Shift(0, 0), ())
    micro = segment(SegmentName.MICRO_LAST, aside, (Queue.COMPUTE, Run(0, (0,), 0), ()), back)
    copy = segment(SegmentName.STEP, (Queue.H2D, Reserve(4, 0, 2048, 128), ()), (Queue.H2D, Norm(0, 4), ()))
    found = simulate(tiny(), replace(base, segments=(micro, copy)), LEFT, iterations=1)
    assert round(found.elapsed_s, 6) == 2 + 4 + 2 + 4  # not at 2048 until the shift back has left it


# ---------------------------------------------------------------- against the definition


class Piece(NamedTuple):
    tier: int
    start: int
    end: int


def slow_clock(
    program: Program, plan: Plan, machine: Machine, names: tuple[SegmentName, ...]
) -> tuple[list[list[float]], float]:
    """Begin of every instruction, segment by segment, comparing every pair."""
    per_node = program.ranks * program.copies
    costs = Costs(program, plan.tiers, machine, per_node, accelerator=has_worker(plan))
    free = dict.fromkeys(Queue, 0.0)
    earlier: list[tuple[list[Piece], float]] = []
    begins = []
    for name in names:
        instrs = plan.segment(name).instrs
        where = {i: Piece(held.tier, held.offset, held.offset + held.bytes) for i, held in enumerate(plan.home)}
        sizes: dict[int, int] = {}
        rows: list[list[Piece]] = []
        for instr in instrs:
            op = instr.op
            if isinstance(op, Reserve):
                where[op.slot] = Piece(op.tier, op.offset, op.offset + op.bytes)
            touched = [where[slot] for slot in slots_of(op)]
            if isinstance(op, Shift):
                size = sizes[op.slot] = where[op.slot].end - where[op.slot].start
                where[op.slot] = Piece(where[op.slot].tier, op.offset, op.offset + size)
                touched.append(where[op.slot])
            if isinstance(op, Run):
                capacity = plan.tiers[0].capacity_bytes
                touched.append(Piece(0, capacity - op.nonmodel_bytes, capacity))
            rows.append(touched)
        seconds = costs.price(instrs, sizes).seconds
        ends: list[float] = []
        begun: list[float] = []
        for instr, touched, took in zip(instrs, rows, seconds, strict=True):
            begin = max([free[instr.queue], *(ends[i] for i in instr.after)])
            for pieces, end in earlier:
                if any(a.tier == b.tier and a.start < b.end and b.start < a.end for a in pieces for b in touched):
                    begin = max(begin, end)
            begun.append(begin)
            ends.append(begin + took)
            free[instr.queue] = begin + took
        earlier += list(zip(rows, ends, strict=True))
        begins.append(begun)
    return begins, max(free.values())


def random_machine(rng: random.Random) -> Machine:
    rates = [key for key in LEFT.__slots__ if key.endswith(("_bandwidth", "_flops", "_fp32"))]
    figures = {key: float(rng.randint(1, 64)) for key in rates}
    return replace(LEFT, **{**figures, "played_copy_bandwidth": 0.0}, latency_s=1e-3, moment_overhead_s=1e-3)


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS))
def test_the_clock_follows_the_definition(seed: int, origin: str) -> None:
    program, plan = random_plan(random.Random(seed), origin, TINY)
    machine = random_machine(random.Random(seed))
    found = simulate(program, plan, machine, iterations=2)
    begins, elapsed = slow_clock(program, plan, machine, program.iteration() * 2)
    assert found.elapsed_s == elapsed
    names = program.iteration()
    firsts = [
        begin
        for name, row in zip(names * 2, begins, strict=True)
        for instr, begin in zip(plan.segment(name).instrs, row, strict=True)
        if isinstance(instr.op, Run) and instr.op.visit == 0 and name is names[0]
    ]
    assert len(firsts) == 2
    bound = max(firsts[1] - firsts[0], *found.busy_s.values())
    assert found.bound_step_time_s == pytest.approx(min(bound, found.step_time_s))
    assert found.bound_step_time_s >= max(found.busy_s.values()) * (1 - 1e-12)
    assert found.step_time_s == pytest.approx(found.forward_s + found.backward_s + found.update_s)
    assert min(found.forward_s, found.backward_s, found.update_s) >= 0
    assert found.moved_bytes == moved_bytes(program, plan)
    assert found.peak_bytes == peak_bytes(program, plan)
    assert all(found.peak_bytes[tier.name] <= tier.capacity_bytes for tier in plan.tiers)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS), st.integers(1, 4))
def test_the_engine_is_never_faster_than_the_bound(seed: int, origin: str, iterations: int) -> None:
    """Without a worker's thread, a step takes all segments one by one, each what its own longest chain takes.

    Or more, where the host thread has work of its own between moments, and launches nothing meanwhile.
    """
    program, plan = random_plan(random.Random(seed), origin, TINY)
    machine = random_machine(random.Random(seed))
    found = simulate(program, plan, machine, iterations=iterations)
    assert found.step_time_s >= found.bound_step_time_s * (1 - 1e-12)
    assert found.step_time_s >= max(found.busy_s.values()) * (1 - 1e-12)
    if has_worker(plan):
        return
    names = program.iteration()
    alone = sum(slow_clock(program, plan, machine, (name,))[1] for name in names)
    if any(held_up(plan.segment(name)) for name in names):
        assert found.step_time_s >= alone * (1 - 1e-12)
    else:
        assert found.step_time_s == pytest.approx(alone)


def has_worker(plan: Plan) -> bool:
    """Whether a thread does the processor's work, beside the accelerator."""
    return plan.tiers[0].name == "device"


def held_up(one: Segment) -> bool:
    """Whether it has moments, and work for the processor."""
    works = any(each.queue is Queue.CPU and not isinstance(each.op, Reserve | Release) for each in one.instrs)
    return works and any(isinstance(each.op, Run) for each in one.instrs)


@settings(max_examples=40)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_a_queue_that_never_waits_is_never_idle(seconds: list[float]) -> None:
    """Not by an error of rounding either."""
    moments = [
        Moment(name=f"f{i}", phase=Phase.FORWARD, reads=(0,), nonmodel_bytes=0, flops=s) for i, s in enumerate(seconds)
    ]
    trace = Trace(model="uneven", tensors=(Tensor(name="w", numel=NUMEL),), moments=tuple(moments))
    program = Program(trace=trace, layout=lay_out(trace, group_numel=NUMEL), training=False)
    runs = [(Queue.COMPUTE, Run(visit, (0,), 0), ()) for visit in range(len(moments))]
    plan = Plan((Tier("device", 4096),), (Held(0, 0, 128, Extent(Kind.P16, 0)),), (segment(SegmentName.EVAL, *runs),))
    assert simulate(program, plan, LEFT).stalled_s == 0.0


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS))
def test_a_faster_machine_is_never_slower(seed: int, origin: str) -> None:
    rng = random.Random(seed)
    program, plan = random_plan(rng, origin, TINY)
    slow = random_machine(rng)
    rates = [key for key in slow.__slots__ if key.endswith(("_bandwidth", "_flops", "_fp32"))]
    fast = replace(slow, **{key: getattr(slow, key) * rng.choice((1, 2, 7)) for key in rates})
    assert simulate(program, plan, fast).elapsed_s <= simulate(program, plan, slow).elapsed_s


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS))
def test_never_shorter_than_the_longest_chain(seed: int, origin: str) -> None:
    """One step takes at least as long as the longest chain of waits inside any one segment."""
    program, plan = random_plan(random.Random(seed), origin, TINY)
    machine = random_machine(random.Random(seed))
    found = simulate(program, plan, machine, iterations=1)
    costs = Costs(program, plan.tiers, machine, program.ranks * program.copies)
    for name in program.iteration():
        instrs = plan.segment(name).instrs
        sizes = {op.slot: 0 for op in (instr.op for instr in instrs) if isinstance(op, Shift)}
        seconds = costs.price(instrs, sizes).seconds
        chain: list[float] = []
        for instr, took in zip(instrs, seconds, strict=True):
            chain.append(took + max((chain[i] for i in instr.after), default=0.0))
        assert found.elapsed_s >= max(chain, default=0.0)

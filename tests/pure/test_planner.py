"""Plans for random programs are sound, and plans for real sizes move no more than they must."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from _programs import programs, programs_and_tiers, random_program
from ps_core._errors import DoesNotFit
from ps_core._extents import Extent, Kind, Precision, SegmentName
from ps_core._layout import lay_out
from ps_core._plan import Copy, Gather, Norm, ReduceScatter, Release, Reserve, Run, Tier
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import Placement, filled, lay_home, work_tier
from ps_core._planner.search import Setup, find_plan
from ps_core._planner.tier_division import NoRoom, Zone, make_frame
from ps_core._program import Program
from ps_core._simulate.clock import moved_bytes
from ps_core._simulate.machine import machine
from ps_core._trace import Phase
from ps_core._units import align_up
from ps_core._verify import verify
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

GIB = 2**30
MICRO = SegmentName.MICRO_LAST


@given(programs_and_tiers(), st.sampled_from(Policy), st.data())
@settings(max_examples=400)
def test_every_plan_is_sound_or_refused(case, policy, data):
    program, tiers = case
    groups = range(len(program.layout.groups))
    resident = data.draw(st.integers(0, len(groups)))
    streamed = frozenset(data.draw(st.sets(st.sampled_from(groups)))) if groups and tiers[0].name == "device" else None
    lower = data.draw(st.none() | st.integers(0, tiers[min(1, len(tiers) - 1)].capacity_bytes))
    within = program.may_step_in_backward and data.draw(st.booleans())
    placement = filled(
        program, tiers, resident=resident, lower_bytes=lower, streamed=streamed or frozenset(), in_backward=within
    )
    try:
        plan = make_plan(make_frame(program, tiers, placement, policy))
    except NoRoom as refusal:
        assert 0 <= refusal.tier < len(tiers)  # noqa: PT017 - either outcome is right, if it is this one
    else:
        verify(program, plan)
        assert [segment.name for segment in plan.segments] == list(program.segments)
        assert plan.stepped_in_backward == set(placement.stepped_in_backward)


def uses_by_moment(program):
    """The extents that each moment uses, in segments of moments."""
    names = (name for name in program.segments if name.is_micro or name is SegmentName.EVAL)
    return [program.uses(name, visit) for name in names for visit in program.segment_visits(name)]


@given(programs(most_ranks=1))
@settings(max_examples=300)
def test_a_plan_needs_no_more_than_its_largest_moment(program):
    """Extents that lie in between move, and no slot is larger than it must be; but partial gradients stay."""
    moments = uses_by_moment(program)
    assume(not any(use.held or use.extent.kind is Kind.GRAD for uses in moments for use in uses))
    peak = max((visit.nonmodel_bytes for visit in program.visits), default=0)
    most = max((sum(program.bytes_of(use.extent) for use in uses) for uses in moments), default=0)
    tiers = (Tier("device", most + align_up(peak)), Tier("host", 1 << 40))
    verify(program, make_plan(make_frame(program, tiers, filled(program, tiers, resident=0))))


def test_what_is_held_stays_while_the_rest_is_packed():
    planned = 0
    for seed in range(200):
        program = random_program(random.Random(seed), most_ranks=1)
        moments = uses_by_moment(program)
        peak = max((visit.nonmodel_bytes for visit in program.visits), default=0)
        most = max((sum(program.bytes_of(use.extent) for use in uses) for uses in moments), default=0)
        tiers = (Tier("device", most + align_up(peak)), Tier("host", 1 << 40))
        with suppress(NoRoom):  # a gap between what is held may be too small, and partial gradients stay
            verify(program, make_plan(make_frame(program, tiers, filled(program, tiers, resident=0))))
            planned += any(use.held for uses in moments for use in uses)
    assert planned > 20


@pytest.mark.parametrize("more", [0, 1 << 20, 1 << 24, 1 << 26, 1 << 27, 1 << 28])
@pytest.mark.parametrize("name", ["gpt-10m", "gpt-1b", "gpt-18b"])
def test_just_above_the_bound_moves_overlap(name, more):
    """A table among layers left room in two pieces, 17 to 200 MiB above the bound: a step was 2.5 times as long."""
    trace, wide = analytic_trace(shape(name), Workload(batch=1, seq=128)), Tier("host", 1 << 40)
    with pytest.raises(DoesNotFit) as caught:
        find_plan(trace, (Tier("device", 0), wide), machine("a100-40"), setup=Setup())
    tiers = Tier("device", caught.value.needed_bytes + more), wide
    planned = find_plan(trace, tiers, machine("a100-40"), setup=Setup())
    assert planned.placement is not None, "else moves are made one by one"


def program_of(name, *, ranks=1, group=1.52, precision=Precision.BF16, accumulate=1, **workload):
    made = shape(name)
    trace = analytic_trace(made, Workload(precision_bytes=4 if precision is Precision.FP32 else 2, **workload))
    unit = 8 * made.hidden**2
    layout = lay_out(trace, group_numel=int(unit * group), ranks=ranks)
    return Program(trace=trace, layout=layout, precision=precision, accumulate=accumulate)


@cache
def planned(name, device_gib, resident=0, ranks=1, policy=Policy.BELADY, host_gib=300):
    program = program_of(name, ranks=ranks)
    tiers = (Tier("device", int(device_gib * GIB)), Tier("host", host_gib * GIB))
    frame = make_frame(program, tiers, filled(program, tiers, resident=resident), policy)
    plan = make_plan(frame)
    verify(program, plan)
    return program, plan


CASES = [
    ("gpt2-xl", 4.5, 0, 1),
    ("gpt2-xl", 9, 10, 1),
    ("gpt-4b", 6, 0, 1),
    ("gpt-4b", 10, 0, 1),
    ("gpt-4b", 14, 3, 1),
    ("gpt-10b", 16, 1, 1),
]
RANKED = [("gpt-4b", 12, 2, 2), ("gpt-10b", 9, 1, 8), ("gpt-18b", 16, 0, 4)]


def copies(plan, *, up):
    """Group of every weight copied to (or from) the compute tier in the micro-batch."""
    tiers = slot_tiers(plan, MICRO)
    ops = [instr.op for instr in plan.segment(MICRO).instrs if isinstance(instr.op, Copy)]
    return [op.extent.index for op in ops if op.extent.kind is Kind.P16 and (tiers[op.target] == 0) is up]


def slot_tiers(plan, name):
    tiers = {number: held.tier for number, held in enumerate(plan.home)}
    ops = (instr.op for instr in plan.segment(name).instrs)
    return tiers | {op.slot: op.tier for op in ops if isinstance(op, Reserve)}


def kept_over_the_turn(program, plan):
    """Groups whose weights are on the compute tier when forward is done, from the instructions alone."""
    tiers, holds = slot_tiers(plan, MICRO), {}
    for instr in plan.segment(MICRO).instrs:
        op = instr.op
        if isinstance(op, Copy) and tiers[op.target] == 0:
            holds[op.target] = op.extent.index
        elif isinstance(op, Gather):
            holds[op.full] = op.group
        elif isinstance(op, Release):
            holds.pop(op.slot, None)
        elif isinstance(op, Run) and program.visits[op.visit].phase is Phase.BACKWARD:
            return set(holds.values())
    raise AssertionError("no backward")


@pytest.mark.parametrize(("name", "device", "resident", "ranks"), CASES + RANKED)
def test_link_bytes_stay_within_two_percent_of_the_least(name, device, resident, ranks):
    program, plan = planned(name, device, resident, ranks)
    below = [group for group in range(len(program.layout.groups)) if plan.home_tier(Extent(Kind.P16, group))]
    size = {group: program.bytes_of(Extent(Kind.P16, group)) for group in below}
    kept = kept_over_the_turn(program, plan)
    least_up = sum(size[group] * (1 if group in kept else 2) for group in below)
    least_down = sum(size.values())
    moved = moved_bytes(program, plan)
    assert 0 < moved["host->device"] <= 1.02 * least_up
    assert moved["device->host"] == least_down
    assert sorted(copies(plan, up=False)) == below


@pytest.mark.parametrize(("name", "device", "resident", "ranks"), CASES + RANKED)
def test_model_data_is_fourteen_bytes_a_parameter_and_named_padding(name, device, resident, ranks):
    program, plan = planned(name, device, resident, ranks)
    home = sum(held.bytes for held in plan.home) * ranks
    assert home == 14 * program.layout.padded_numel
    assert home == 14 * program.trace.parameters + 14 * program.layout.padding_numel
    assert program.layout.padding_numel < len(program.layout.groups) * ranks * 64


@pytest.mark.parametrize(
    ("precision", "accumulate", "each"), [("fp32", 1, 16), ("fp32", 3, 16), ("bf16", 3, 18), ("fp16", 1, 14)]
)
def test_bytes_a_parameter_in_other_modes(precision, accumulate, each):
    program = program_of("gpt-50m", precision=Precision(precision), accumulate=accumulate, ranks=3)
    home, _ = lay_home(program, filled(program, (Tier("device", GIB),), resident=99), (Tier("device", GIB),))
    assert sum(held.bytes for held in home) * 3 == each * program.layout.padded_numel


@pytest.mark.parametrize(("name", "device", "resident", "ranks"), RANKED)
def test_zero_volume(name, device, resident, ranks):
    program, plan = planned(name, device, resident, ranks)
    ops = [instr.op for instr in plan.segment(MICRO).instrs]
    gathers = [op.group for op in ops if isinstance(op, Gather)]
    scatters = [op.group for op in ops if isinstance(op, ReduceScatter)]
    groups = list(range(len(program.layout.groups)))
    assert sorted(scatters) == groups
    assert all(1 <= gathers.count(group) <= 2 for group in groups)
    wire = moved_bytes(program, plan)["wire"]
    padded, exact = program.layout.padded_numel, program.trace.parameters
    assert wire * ranks <= 6 * (ranks - 1) * (exact + program.layout.padding_numel)
    kept = [group for group in groups if gathers.count(group) == 1]
    shard = [group.shard_numel for group in program.layout.groups]
    assert wire == (ranks - 1) * (6 * padded // ranks - 2 * sum(shard[group] for group in kept))


@pytest.mark.parametrize("policy", [Policy.LRU, Policy.FIFO, Policy.STATIC])
@pytest.mark.parametrize(("name", "device", "resident", "ranks"), CASES + RANKED)
def test_belady_never_moves_more_than_the_others(name, device, resident, ranks, policy):
    program, best = planned(name, device, resident, ranks)
    _, other = planned(name, device, resident, ranks, policy)
    ours, theirs = moved_bytes(program, best), moved_bytes(program, other)
    links = [link for link in ours if link != "wire"]
    assert sum(ours[link] for link in links) <= sum(theirs[link] for link in links)
    assert ours["wire"] <= theirs["wire"]


def test_the_policies_differ_where_it_matters():
    for case, link, policy in [
        (("gpt-4b", 10), "host->device", Policy.LRU),
        (("gpt-4b", 10), "host->device", Policy.FIFO),
        (("gpt-4b", 12, 2, 2), "wire", Policy.STATIC),
    ]:
        program, best = planned(*case)
        assert moved_bytes(program, best)[link] < moved_bytes(program, planned(*case, policy=policy)[1])[link]


def test_fetches_do_not_wait_for_the_moment_before():
    """Prefetch: all but the first few fetches of forward may start at least one moment before they are needed."""
    _, plan = planned("gpt-4b", 10)
    instrs = plan.segment(MICRO).instrs
    runs, late = {}, 0
    for instr in instrs:
        if isinstance(instr.op, Run):
            runs[instr.id] = instr.op.visit
        elif isinstance(instr.op, Copy) and instr.queue.name == "H2D":
            waits = [runs[wait] for wait in reserve_waits(instrs, instr) if wait in runs]
            late += any(wait >= instr.visit - 1 for wait in waits)
    assert late <= 4


def reserve_waits(instrs, copy):
    """What the reservation of a copy's target waits for."""
    before = instrs[: copy.id]
    reserve = next(i for i in reversed(before) if isinstance(i.op, Reserve) and i.op.slot == copy.op.target)
    rows, place = [reserve], reserve.id - 1
    while place >= 0 and isinstance(instrs[place].op, Release) and instrs[place].queue is copy.queue:
        rows.append(instrs[place])
        place -= 1
    return [wait for row in rows for wait in row.after]


def test_norms_follow_their_reduce_scatter_a_moment_later():
    _, plan = planned("gpt-10b", 9, 1, 8)
    instrs = plan.segment(MICRO).instrs
    place = {instr.op.group: instr.id for instr in instrs if isinstance(instr.op, ReduceScatter)}
    runs = [instr.id for instr in instrs if isinstance(instr.op, Run)]
    last = runs[-1]
    for instr in instrs:
        if isinstance(instr.op, Norm) and instr.id < last:
            assert any(place[instr.op.group] < run < instr.id for run in runs)


def test_a_home_too_large_for_a_tier_is_refused_at_once():
    program = program_of("gpt-50m")
    tiers = (Tier("device", GIB), Tier("host", GIB // 16))
    with pytest.raises(NoRoom, match="tier 1"):
        make_frame(program, tiers, filled(program, tiers, resident=0))
    tiers = (Tier("device", GIB // 2), Tier("host", GIB))
    with pytest.raises(NoRoom, match="tier 0"):
        make_frame(program, tiers, filled(program, tiers, resident=99))


def test_zones_divide_the_arena_without_gaps():
    program = program_of("gpt-4b", ranks=4)
    tiers = (Tier("device", 12 * GIB), Tier("host", 300 * GIB))
    frame = make_frame(program, tiers, filled(program, tiers, resident=0))
    arenas = frame.arenas(MICRO)
    zones = [arenas[0, zone].bytes for zone in Zone]
    assert all(size > 0 for size in zones)
    assert frame.deep
    assert frame.home_ends[0] + sum(zones) == frame.line_bytes == (12 * GIB - program.trace.peak_nonmodel_bytes) & -128
    assert frame.zone(Extent(Kind.FULL, 0), 0) is Zone.GATHERED
    assert frame.zone(Extent(Kind.FULL, 0), 1) is Zone.MAIN


def test_where_a_processor_works():
    three = tuple(Tier(name, GIB) for name in ("device", "host", "disk"))
    assert [work_tier(three, tier) for tier in range(3)] == [0, 1, 1]
    assert work_tier(three[1:], 1) == 0


def test_states_leave_the_middle_tier_before_weights_do():
    program = program_of("gpt-50m")
    states = 12 * program.layout.padded_numel
    tiers = (Tier("device", GIB), Tier("host", states // 2), Tier("disk", GIB))
    made = filled(program, tiers, resident=1, streamed=frozenset({2}))
    assert made.weights == (0, *(1,) * (len(made.weights) - 1))
    assert {1, 2} == set(made.states[1:])
    assert made.states[0] == 0
    assert made.steps[:3] == (0, 1, 0)
    assert isinstance(made, Placement)


def test_a_plan_names_its_segments_and_homes_and_has_a_fingerprint():
    program, plan = planned("gpt-50m", 1)
    _, again = planned("gpt-50m", 1, policy=Policy.LRU)
    assert plan.segment(MICRO).name is MICRO
    with pytest.raises(ValueError, match="no segment 'micro_mid'"):
        plan.segment(SegmentName.MICRO_MID)
    with pytest.raises(ValueError, match="act of 3 has no home"):
        plan.home_tier(Extent(Kind.ACT, 3))
    assert len(plan.fingerprint) == 16
    assert (
        plan.fingerprint
        == make_plan(make_frame(program, plan.tiers, filled(program, plan.tiers, resident=0))).fingerprint
    )
    assert again.policy == "lru"
    assert machine("v100").name == "v100"

"""The search: sound plans, as good as its candidates, and refusals that teach."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _programs import programs, setup_of
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._extents import Extent, Kind, Precision, SegmentName
from ps_core._layout import lay_out
from ps_core._plan import TIER_STACKS, Reserve, Tier
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.scores import Found, Scorer
from ps_core._planner.search import Setup, find_plan, group_sizes, with_policy
from ps_core._planner.tier_division import NoRoom, make_frame
from ps_core._program import Program
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import machine
from ps_core._trace import Tensor, Trace
from ps_core._verify import verify
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

GIB = 2**30
TINY = Trace(model="tiny", tensors=(Tensor(name="w", numel=64),), moments=())
A100 = machine("a100-40")


def find(name, tiers, batch=4, **setup):
    trace = analytic_trace(shape(name), Workload(batch=batch))
    return find_plan(trace, tiers, A100, setup=Setup(**setup))


def two(device, host):
    return (Tier("device", int(device * GIB)), Tier("host", int(host * GIB)))


def test_what_fits_wholly_stays_wholly():
    planned = find("gpt-50m", two(8, 8))
    assert set(planned.placement.states) == {0}
    assert planned.prediction.moved_bytes["host->device"] == 0
    verify(planned.program, planned.plan)


@pytest.mark.parametrize("step_in_backward", [True, False])
@pytest.mark.parametrize(("name", "device"), [("gpt-24x2048", 30), ("gpt-24x2048", 60), ("gpt-1b", 24)])
def test_where_everything_fits_nothing_moves(name, device, step_in_backward):
    """Although the processor, stepping a few groups beside the passes, would save a few per cent of a step."""
    trace = analytic_trace(shape(name), Workload(batch=8))
    setup = Setup(step_in_backward=step_in_backward)
    planned = find_plan(trace, two(device, 64), machine("h200"), setup=setup)
    assert set(planned.placement.weights) | set(planned.placement.states) == {0}
    assert set(planned.prediction.moved_bytes.values()) == {0}
    assert not planned.early


@pytest.mark.parametrize("stack", TIER_STACKS, ids="-".join)
@settings(max_examples=30)
@given(program=programs(), policy=st.sampled_from(Policy))
def test_where_everything_fits_nothing_moves_whatever_is_trained(stack, program, policy):
    tiers = tuple(Tier(name, 10**6) for name in stack)
    setup = replace(setup_of(program), policy=policy)
    moved = dict(find_plan(program.trace, tiers, A100, setup=setup).prediction.moved_bytes)
    moved.pop("wire")
    assert set(moved.values()) <= {0}


def test_the_fastest_group_size_is_taken_where_everything_fits():
    tiers, every = two(30, 64), {}
    trace = analytic_trace(shape("gpt-1b"), Workload(batch=8))
    for numel in group_sizes(trace, Setup()):
        planned = find_plan(trace, tiers, A100, setup=Setup(group_numel=numel))
        every[numel] = planned.prediction.step_time_s
    assert find_plan(trace, tiers, A100, setup=Setup()).prediction.step_time_s == min(every.values())


@pytest.mark.slow
def test_the_plan_found_is_no_slower_than_any_number_of_resident_groups():
    tiers = two(14, 80)
    planned = find("gpt-4b", tiers)
    program, best = planned.program, planned.prediction.step_time_s
    for resident in range(len(program.layout.groups)):
        try:
            plan = make_plan(make_frame(program, tiers, filled(program, tiers, resident=resident)))
        except Exception:
            continue
        assert best <= 1.03 * simulate(program, plan, A100).step_time_s


def test_states_are_streamed_only_while_the_accelerator_waits_and_only_if_that_is_faster(monkeypatch):
    program = Program(trace=TINY, layout=lay_out(TINY, group_numel=1))
    scorer = Scorer(program, two(1, 1), A100, policy=Policy.BELADY, ranks_per_node=None)
    times = {0: 10.0, 1: 9.9, 2: 8.0, 4: 7.0, 8: 9.0, 16: 12.0, 3: 7.5, 6: 6.5}

    def score(resident, streamed=0, early=False):
        return NoRoom(0, 0, 1) if streamed == 8 else (times[streamed], streamed)

    monkeypatch.setattr(scorer, "score", score)
    found = Found((10.0, 0), 0, 0)
    scorer._floor_s = 9.96
    assert scorer.stream(found) == found
    scorer._floor_s = 1.0
    monkeypatch.setattr(scorer, "_without_cpu_steps", lambda _found: 9.96)
    assert scorer.stream(found) == found
    monkeypatch.setattr(scorer, "_without_cpu_steps", lambda _found: 1.0)
    assert scorer.stream(found) == Found((6.5, 6), 0, 6)
    assert scorer.placement(0, 16).steps == (-1,)


def test_within_backward_fewer_groups_stay_resident_where_states_need_their_room(monkeypatch):
    program = Program(trace=TINY, layout=lay_out(TINY, group_numel=1))
    scorer = Scorer(program, two(1, 1), A100, policy=Policy.BELADY, ranks_per_node=None, in_backward=True)
    tried = []

    def score(resident, streamed=0, early=False):
        tried.append((resident, streamed, early))
        if early and resident > 7:
            return NoRoom(0, 0, 1)
        return 10.0 - early * ((streamed == 5) + 2 * (streamed in (4, 5)) + (resident == 6)), streamed

    monkeypatch.setattr(scorer, "score", score)
    monkeypatch.setattr(scorer, "_without_cpu_steps", lambda _found: 1.0)
    scorer.limits = (6, 9)
    scorer._floor_s = 1.0
    assert scorer.stream(Found((10.0, 0), 9, 0)) == Found((6.0, 5), 6, 5, True)
    assert {resident for resident, _, early in tried if not early} == {9}
    assert {resident for resident, _, early in tried if early} == {9, 7, 6}
    assert len(tried) == 17
    tried.clear()
    scorer.limits = (9, 9)
    assert scorer.stream(Found((10.0, 0), 9, 0)) == Found((10.0, 0), 9, 0)
    assert [row for row in tried if row[2]] == [(9, streamed, True) for _ in "21" for streamed in (2, 4, 8, 16)]


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize(("name", "device"), [("gpt-24x2048", 10), ("gpt-32x2560", 16)])
def test_no_stream_of_states_is_faster_than_steps_that_take_no_time(name, device, step_in_backward):
    """So streams need not be tried where that would not help."""
    trace = analytic_trace(shape(name), Workload(batch=8))
    program = Program(trace=trace, layout=lay_out(trace, group_numel=80_000_000))
    at = machine("h200")
    scorer = Scorer(
        program, two(device, 90), at, policy=Policy.BELADY, ranks_per_node=None, in_backward=step_in_backward
    )
    found = scorer.glance()
    least = scorer._without_cpu_steps(found)
    streamed = [scorer.score(found.resident, parts) for parts in (2, 4, 8, 16)]
    assert least < found.score[0]
    assert least <= 1.001 * min(score[0] for score in streamed if not isinstance(score, NoRoom))


def test_a_streamed_group_steps_above_its_states():
    program = find("gpt-50m", two(8, 8), group_numel=3_000_000).program
    placement = Scorer(program, two(8, 8), A100, policy=Policy.BELADY, ranks_per_node=None).placement(2, 5)
    assert placement.states[:6] == (0, 0, 1, 1, 1, 1)
    below = placement.steps[2:]
    assert below[:6] == (0, 1, 0, 1, 1, 0)
    assert sum(step == 0 for step in below) == -(-len(below) * 5 // 16)
    assert placement.stepped_in_backward == ()


def test_a_narrow_range_between_too_few_and_too_many_is_found(monkeypatch):
    program = Program(trace=TINY, layout=lay_out(TINY, group_numel=1))
    scorer = Scorer(program, two(1, 1), A100, policy=Policy.BELADY, ranks_per_node=None)

    def score(resident, _streamed=0, _early=False):
        return NoRoom(1, 0, 1) if resident < 17 else NoRoom(0, 0, 1) if resident > 18 else (float(resident), 0)

    monkeypatch.setattr(scorer, "score", score)
    assert scorer._grid(0, 40, 2).resident in (17, 18)
    assert scorer._grid(0, 16, 3) is None
    assert scorer._grid(20, 40, 3) is None


def test_only_disk_is_left_for_states():
    tiers = (*two(6, 10), Tier("disk", 100 * GIB))
    planned = find("gpt-2b", tiers)
    assert set(planned.placement.states) <= {0, 1, 2}
    assert 2 in planned.placement.states
    moved = planned.prediction.moved_bytes
    assert moved["disk->host"] > 0 < moved["host->disk"]


def test_one_tier_alone():
    planned = find("gpt-50m", (Tier("host", 4 * GIB),))
    assert set(planned.placement.weights) == {0}
    planned = find("gpt-50m", (Tier("host", 3 * GIB), Tier("disk", 4 * GIB)))
    assert planned.prediction.step_time_s > 0


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_precisions_and_accumulation(precision, accumulate):
    planned = find("gpt-50m", two(2, 4), precision=precision, accumulate=accumulate, ranks=2)
    assert planned.program.precision is precision
    assert len(planned.program.iteration()) == accumulate + 1


def test_the_policy_can_be_exchanged_at_the_same_placement():
    tiers = two(10, 80)
    setup = Setup(group_numel=60_000_000)
    trace = analytic_trace(shape("gpt-4b"), Workload())
    planned = find_plan(trace, tiers, A100, setup=setup)
    other = with_policy(planned, Policy.LRU, A100, setup)
    assert other.placement == planned.placement
    assert other.plan.policy == "lru"
    assert sum(planned.prediction.moved_bytes.values()) <= sum(other.prediction.moved_bytes.values())


def test_memory_just_above_the_bound_gets_the_plan_for_tight_memory():
    trace = analytic_trace(shape("gpt-10m"), Workload(batch=1, seq=64))
    setup = Setup(group_numel=1)
    needed = None
    with pytest.raises(DoesNotFit) as caught:
        find_plan(trace, (Tier("device", 10 << 20), Tier("host", 0)), A100, setup=setup)
    needed = caught.value.needed_bytes
    planned = find_plan(trace, (Tier("device", needed + (64 << 20)), Tier("host", 24 << 20)), A100, setup=setup)
    assert planned.plan.notes or planned.placement


def test_what_cannot_fit_is_refused_with_the_least_that_is_missing():
    with pytest.raises(DoesNotFit) as caught:
        find("gpt-18b", two(8, 32))
    assert caught.value.proven
    assert caught.value.needed_bytes > caught.value.available_bytes


def test_a_tight_plan_has_no_policy_to_exchange():
    planned = find_plan(TINY, two(1, 1), A100, setup=Setup())
    tight = type(planned)(program=planned.program, plan=planned.plan, prediction=planned.prediction, placement=None)
    with pytest.raises(InvalidInput, match="no policy to exchange"):
        with_policy(tight, Policy.LRU, A100, Setup())


def test_group_sizes_are_fewer_in_a_hurry_and_as_given():
    trace = analytic_trace(shape("gpt-10b"), Workload())
    assert len(group_sizes(trace, Setup(quick=True))) < len(group_sizes(trace, Setup()))
    assert group_sizes(trace, Setup(group_numel=7)) == [7]


EARLY = {"step_in_backward": True}


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ({"precision": "bf16"}, "precision must be a Precision, found 'bf16'"),
        ({"policy": "lru"}, "policy must be a Policy, found 'lru'"),
        ({"ranks": 2.5}, "ranks must be a whole number of at least 1, found 2.5"),
        ({"copies": 0}, "copies must be a whole number of at least 1, found 0"),
        ({"states": "x"}, "states must be a whole number of at least 0, found 'x'"),
        ({"accumulate": None}, "accumulate must be a whole number of at least 1, found None"),
        ({"group_numel": 0}, "group_numel must be a whole number of at least 1, found 0"),
        (
            {"group_numel": 10**400},
            "group_numel must be a whole number of at most 46116.*, found a whole number of 1329",
        ),
        ({"ranks_per_node": "all"}, "ranks_per_node must be a whole number of at least 1, found 'all'"),
        ({"nonmodel_overhead": -1.0}, "nonmodel_overhead must be a finite number of at least 0 and at most 10"),
        ({"nonmodel_overhead": float("nan")}, "at most 10, found nan"),
        ({"quick": "yes"}, "quick must be True or False, found 'yes'"),
        ({"speculative": True}, "speculative is for steps within backward: give step_in_backward=True too"),
        ({**EARLY, "accumulate": 2}, "one micro-batch a step, .*; found 1 processes and accumulate=2"),
        ({**EARLY, "ranks": 2, "copies": 2}, "needs one process .*; found 4 processes and accumulate=1"),
        ({**EARLY, "precision": Precision.FP16}, "fp16, whose loss scale may skip a step, needs speculative=True"),
    ],
)
def test_setups_that_make_no_sense_are_refused(bad, found):
    with pytest.raises(InvalidInput, match=found):
        Setup(**bad)


@pytest.mark.slow
def test_a_disk_that_is_not_needed_is_not_used():
    tiers = two(6, 40)
    without = find("gpt-2b", tiers)
    planned = find("gpt-2b", (*tiers, Tier("disk", 1000 * GIB)))
    assert planned.prediction.moved_bytes["host->disk"] == 0
    assert planned.prediction.step_time_s <= 1.01 * without.prediction.step_time_s


@pytest.mark.parametrize(("ranks", "common", "part"), [(2, True, 0.4), (4, True, 0.4), (4, False, 0.6)])
def test_ranks_use_no_more_memory_than_helps(ranks, common, part, monkeypatch):
    """Whatever the budget: a gradient's memory is used again once it is summed."""
    trace = analytic_trace(shape("gpt-1b"), Workload(batch=2))
    setup, tiers = Setup(ranks=ranks, precision=Precision.FP32), (Tier("host", 64 * GIB),)
    layout = lay_out(trace, group_numel=30_000_000, ranks=ranks)
    layout = replace(layout, groups=tuple(replace(group, common=common) for group in layout.groups))

    def planned():
        made = find_plan(trace, tiers, A100, setup=setup, layout=layout)
        ends = [0]
        for instr in made.plan.segment(SegmentName.MICRO_LAST).instrs:
            if isinstance(instr.op, Reserve):
                ends.append(instr.op.offset + instr.op.bytes)
        full, gradients = (
            sum(made.program.bytes_of(Extent(kind, group.index)) for group in layout.groups)
            for kind in (Kind.FULL, Kind.GRAD)
        )
        used = max(ends) - max(held.offset + held.bytes for held in made.plan.home)
        return made.prediction.step_time_s, used - full, gradients

    fast, few, gradients = planned()
    monkeypatch.setattr("ps_core._planner.tier_division._LATE_SUMS", 1000)  # so many do not fit: then all is used
    fastest, many, _ = planned()
    assert fast <= 1.001 * fastest
    assert few < part * gradients < 1.2 * gradients < many

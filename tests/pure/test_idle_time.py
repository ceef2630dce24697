"""What an idle accelerator waited for, worked out by hand; and the pieces of work that plans are simulated as."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from _plans import ORIGINS, random_plan
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Copy, Queue, Release, Reserve, Run, Segment, Step
from ps_core._simulate.clock import simulate
from ps_core._simulate.host_worker_times import HostWorker
from ps_core._simulate.idle_time import Cause, step_times, step_window
from ps_core._simulate.machine import MACHINES
from ps_core._simulate.steps_in_backward import EarlySteps, early_steps
from ps_core._simulate.work_pieces import Piece, group_names, planned_pieces
from test_simulate import LEFT, offloaded_plan, resident_plan, segment, tiny

COMPUTE, H2D, D2H, CPU = Queue.COMPUTE, Queue.H2D, Queue.D2H, Queue.CPU
WEIGHT = Extent(Kind.P16, 0)


def piece(queue: Queue, begin: float, end: float, number: int = -1, of: Segment | None = None, run: int = -1) -> Piece:
    """The work of an instruction of a segment; without one, work that follows no plan."""
    instr = None if of is None else of.instrs[number]
    return Piece(queue=queue, name="x", begin_s=begin, end_s=end, instr=instr, run=run)


def idle(pieces: Sequence[Piece], segments: Sequence[Segment] = ()) -> dict[str, float]:
    """The causes that there were."""
    end = max(each.end_s for each in pieces)
    found = step_times(pieces, segments, 4, 0.0, end, 1)
    assert sum(found.idle_s.values()) == pytest.approx(found.seconds - found.busy_s)
    return {cause.value: seconds for cause, seconds in found.idle_s.items() if seconds}


def test_without_a_plan_work_comes_after_all_that_ended_before() -> None:
    pieces = [piece(COMPUTE, 0, 2), piece(H2D, 3, 5), piece(COMPUTE, 5, 6), piece(D2H, 6, 7), piece(COMPUTE, 8, 9)]
    assert idle(pieces) == {"launch": 2, "fetch": 2, "memory": 1}
    assert idle([*pieces, piece(CPU, 9, 13), piece(Queue.DISK_R, 13, 14)]) == {
        "launch": 2,
        "fetch": 2,
        "memory": 1,
        "host_step": 4,
        "disk": 1,
    }


def test_work_that_took_no_time_keeps_nobody() -> None:
    pieces = [piece(COMPUTE, 0, 2), piece(H2D, 2, 4), piece(D2H, 4, 4), piece(COMPUTE, 5, 6)]
    assert idle(pieces) == {"launch": 1, "fetch": 2}


def test_what_is_said_of_a_step() -> None:
    pieces = [piece(COMPUTE, 0, 2), piece(H2D, 2, 4), piece(COMPUTE, 4, 8)]
    told = step_times(pieces, (), 4, 0.0, 8.0, 2)
    assert told.idle_share == 0.25
    assert str(told).startswith(
        "2 steps in 8 s: the device worked for 6 s, and was idle 25.0% of the time, waiting for"
    )
    assert [line.split()[-2] for line in str(told).splitlines()[1:]].count("2") == 1
    assert step_times([], (), 4, 0.0, 0.0, 1).idle_share == 0.0


def test_a_plan_says_what_a_moment_waited_for() -> None:
    """A step of 4 seconds, then the fetch of what was stepped; the copy down beside them keeps nobody."""
    step = segment(SegmentName.STEP, (CPU, Step(0, (0, 1)), ()))
    rows = (
        (H2D, Copy(WEIGHT, 0, 0, 10, 64), ()),
        (D2H, Copy(Extent(Kind.ACT, 0), 0, 11, 12, 64), ()),
        (COMPUTE, Run(0, (10,), 0), (0,)),
    )
    forward = segment(SegmentName.MICRO_LAST, *rows)
    pieces = [
        piece(COMPUTE, -1, 0),
        piece(CPU, 0, 4, 0, step, 0),
        piece(H2D, 4, 5, 0, forward, 1),
        piece(D2H, 0, 4.9, 1, forward, 1),
        piece(COMPUTE, 5, 6, 2, forward, 1),
    ]
    assert idle(pieces, (step, forward)) == {"host_step": 4, "fetch": 1}
    late = [*pieces[:-1], piece(COMPUTE, 7, 8, 2, forward, 1)]
    assert idle(late, (step, forward)) == {"host_step": 4, "fetch": 1, "launch": 2}
    without = [pieces[0], pieces[4]]  # the profile began in between
    assert idle(without, (step, forward)) == {"launch": 5}


def test_memory_that_becomes_free_is_found_through_what_takes_no_time() -> None:
    rows = (
        (D2H, Copy(WEIGHT, 0, 10, 0, 64), ()),
        (D2H, Release(10), ()),
        (H2D, Reserve(11, 0, 0, 64), (1,)),
        (H2D, Copy(WEIGHT, 0, 1, 11, 64), ()),
        (COMPUTE, Run(0, (11,), 0), (3,)),
    )
    only = segment(SegmentName.MICRO_LAST, *rows)
    pieces = [
        piece(COMPUTE, 0, 1),
        piece(D2H, 0, 3, 0, only, 0),
        piece(CPU, 0, 3.5),  # of nobody here
        piece(H2D, 4, 5, 3, only, 0),
        piece(COMPUTE, 5, 6, 4, only, 0),
    ]
    assert idle(pieces, (only,)) == {"memory": 2, "launch": 1, "fetch": 1}


def test_gradients_on_their_way_to_a_step_belong_to_the_step() -> None:
    passes = segment(SegmentName.MICRO_LAST, (D2H, Copy(WEIGHT, 0, 10, 0, 64), ()))
    step = segment(SegmentName.STEP, (CPU, Step(0, (0,)), ()))
    pieces = [piece(COMPUTE, 0, 1), piece(D2H, 0, 3, 0, passes, 0), piece(CPU, 3, 5, 0, step, 1)]
    assert idle(pieces, (passes, step)) == {"host_step": 4}


def test_names_of_groups_are_modules_where_these_are_one_group_s() -> None:
    rows = [["a.0.w", "a.0.b"], ["a.1.w.x", "a.1.w.y"], ["a.2.w", "a.2.b"], ["a.2.c", "a.2.d"], ["t"], ["p", "q"]]
    assert group_names(rows) == ["a.0", "a.1.w", "a.2.w", "a.2.c", "t", "p"]


def test_when_pieces_of_a_worker_s_work_ran() -> None:
    worker = HostWorker()
    for ready, seconds in ((1.0, 2.0), (2.0, 1.0), (9.0, 1.0)):
        worker.launch(ready, seconds)
    assert [worker.span(number) for number in range(3)] == [(1.0, 3.0), (3.0, 4.0), (9.0, 10.0)]


@pytest.mark.parametrize("plan", [resident_plan, offloaded_plan])
def test_steps_of_a_small_plan_take_what_the_simulator_says(plan: object) -> None:
    assert callable(plan)
    made, program = plan(), tiny()
    found = planned_pieces(program, made, LEFT, program.iteration() * 3)
    begin, end = step_window(found.pieces, 1, 2)
    told = simulate(program, made, LEFT)
    times = step_times(found.pieces, found.segments, len(made.home), begin, end, 1)
    assert end - begin == pytest.approx(told.step_time_s)
    assert sum(times.idle_s.values()) == pytest.approx(told.stalled_s)
    assert times.idle_s.keys() == set(Cause)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS), st.sampled_from(sorted(MACHINES)), st.booleans())
@example(18, "planner", "t4", True)  # steps that begin within the last pass
def test_every_plan_has_its_pieces_in_order(seed: int, origin: str, machine: str, within: bool) -> None:
    program, plan = random_plan(random.Random(seed), origin)
    within = within and program.accumulate == 1
    names = program.iteration() * 2
    early: EarlySteps = {}
    if within and SegmentName.STEP in names:
        early = early_steps(len(plan.home), plan.segment(SegmentName.MICRO_LAST), plan.segment(SegmentName.STEP))
    found = planned_pieces(program, plan, MACHINES[machine], names, early=early)
    reached: dict[Queue, float] = defaultdict(float)
    for each in found.pieces:
        assert reached[each.queue] <= each.begin_s + 1e-9
        assert each.begin_s <= each.end_s
        reached[each.queue] = each.end_s
    begin, end = step_window(found.pieces, 0, 2)
    times = step_times(found.pieces, found.segments, len(plan.home), begin, end, 2)
    assert sum(times.idle_s.values()) == pytest.approx(times.seconds - times.busy_s, rel=1e-6, abs=1e-9)
    assert min(times.idle_s.values()) >= 0

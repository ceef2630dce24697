"""When the host thread, its worker and the queues do what a plan has them do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core._errors import PlanMismatch
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Accumulate, Copy, Op, Queue, Release, Reserve, Run, Segment, Step, Tier
from ps_core._simulate.clock import simulate
from ps_core._simulate.host_worker_times import HostWorker
from ps_core._simulate.timeline import Timeline
from test_simulate import LEFT, resident_plan, segment, tiny

WEIGHT, GRADIENT = Extent(Kind.P16, 0), Extent(Kind.GRAD, 0)
SLOW = 3
"""A moment that the host thread takes 3 s to launch; others take it no time."""
Row = tuple[Queue, Op, tuple[int, ...]]


def launching_s(op: Op) -> float:
    return 3.0 * (isinstance(op, Run) and op.visit == SLOW)


def timeline(*, worker: bool = True) -> Timeline:
    """Four home slots; a copy of 64 bytes a second takes half of the host's bandwidth."""
    return Timeline(4, worker=worker, bandwidth=128.0, launching_s=launching_s)


def forward(*rows: Row) -> Segment:
    return segment(SegmentName.MICRO_LAST, *rows)


def step(*rows: Row) -> Segment:
    return segment(SegmentName.STEP, *rows)


def test_steps_run_beside_the_next_pass_and_a_copy_waits_for_its_own() -> None:
    line = timeline()
    begin, _ = line.run(step((Queue.CPU, Step(0, (0,)), ()), (Queue.CPU, Step(1, (1,)), ())), [3.0, 5.0])
    assert (begin, line.now) == (0.0, 0.0)
    rows = (
        (Queue.H2D, Copy(WEIGHT, 0, 0, 10, 0), ()),
        (Queue.COMPUTE, Run(0, (10,), 0), (0,)),
        (Queue.H2D, Copy(WEIGHT, 0, 1, 11, 0), ()),
        (Queue.COMPUTE, Run(1, (11,), 0), (2,)),
        (Queue.COMPUTE, Run(2, (), 0), ()),
    )
    begin, ends = line.run(forward(*rows), [1.0, 2.0, 1.0, 2.0, 4.0])
    assert begin == 0.0
    assert ends == [4.0, 6.0, 9.0, 11.0, 15.0]  # the steps end at 3 and 8
    line.finish()
    assert line.now == 15.0


def test_a_moment_is_over_no_earlier_than_it_was_launched_whole() -> None:
    """The thread launches the second moment for 3 s, then the copy; it is ahead when it comes to the last moment."""
    line = timeline()
    rows = (
        (Queue.COMPUTE, Run(0, (), 0), ()),
        (Queue.COMPUTE, Run(SLOW, (), 0), ()),
        (Queue.H2D, Copy(WEIGHT, 0, 0, 10, 0), (1,)),
        (Queue.COMPUTE, Run(SLOW, (10,), 0), (2,)),
    )
    _, ends = line.run(forward(*rows), [2.0, 0.5, 0.25, 8.0])
    assert ends == [2.0, 3.0, 3.25, 11.25]
    assert line.now == 6.0


def test_where_a_step_begins_everything_is_over() -> None:
    line = timeline()
    line.run(step((Queue.CPU, Step(0, (0,)), ())), [20.0])
    line.run(forward((Queue.COMPUTE, Run(0, (), 0), ())), [4.0])
    assert line.run(step((Queue.COMPUTE, Step(1, (1,)), ())), [1.0]) == (20.0, [21.0])


def test_what_the_thread_would_wait_for_is_passed_over_until_a_moment_needs_it() -> None:
    line = timeline()
    line.run(step((Queue.CPU, Step(0, (0,)), ())), [6.0])
    rows = (
        (Queue.COMPUTE, Run(0, (), 0), ()),
        (Queue.H2D, Copy(WEIGHT, 0, 0, 10, 0), ()),
        (Queue.D2H, Copy(GRADIENT, 0, 12, 13, 0), ()),
        (Queue.COMPUTE, Run(1, (10,), 0), (1,)),
    )
    _, ends = line.run(forward(*rows), [1.0, 1.0, 1.0, 1.0])
    assert ends == [1.0, 7.0, 1.0, 8.0]  # neither the first moment nor the other link waits


def test_a_stream_that_comes_after_the_worker_waits_for_what_it_waited_for() -> None:
    rows = (
        (Queue.COMPUTE, Run(0, (), 0), ()),
        (Queue.D2H, Copy(GRADIENT, 0, 10, 12, 0), (0,)),
        (Queue.CPU, Accumulate(0, 12, 0, first=True), (1,)),
        (Queue.H2D, Copy(WEIGHT, 0, 1, 11, 0), (2,)),
    )
    _, ends = timeline().run(forward(*rows), [2.0, 3.0, 50.0, 1.0])
    assert ends == [2.0, 5.0, 55.0, 6.0]  # behind the copy down, and not behind the sum


def test_memory_of_the_host_is_not_given_again_before_the_work_on_it_is_over() -> None:
    rows = (
        (Queue.CPU, Accumulate(0, 10, 0, first=True), ()),
        (Queue.CPU, Release(10), (0,)),
        (Queue.D2H, Reserve(11, 1, 0, 128), (1,)),
        (Queue.D2H, Copy(GRADIENT, 0, 12, 11, 0), (2,)),
        (Queue.COMPUTE, Run(0, (), 0), ()),
        (Queue.COMPUTE, Run(1, (), 0), (3,)),
    )
    _, ends = timeline().run(forward(*rows), [7.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert ends[2:] == [7.0, 8.0, 1.0, 9.0]


def test_copies_take_their_part_of_the_hosts_memory() -> None:
    line = timeline()
    line.run(step((Queue.CPU, Step(0, (0,)), ())), [4.0])
    rows = (
        (Queue.H2D, Copy(WEIGHT, 0, 1, 11, 128), ()),
        (Queue.COMPUTE, Run(0, (11,), 0), (0,)),
        (Queue.H2D, Copy(WEIGHT, 0, 0, 10, 0), ()),
        (Queue.COMPUTE, Run(1, (10,), 0), (2,)),
    )
    _, ends = line.run(forward(*rows), [2.0, 1.0, 1.0, 1.0])
    assert ends[2] == 5.0 + 1.0  # the step ran at half speed for 2 s, and then for 3


def test_work_is_worked_out_as_far_as_it_is_known() -> None:
    worker = HostWorker()
    first, second = worker.launch(1.0, 4.0), worker.launch(0.0, 4.0)
    assert not worker.done(first, 0.5)
    assert not worker.done(second, 3.0)
    worker.copies(0, 3.0, 5.0, 0.5)
    worker.copies(1, 4.0, 5.0, 0.9)  # both together would leave nothing: a quarter is left in any case
    assert worker.done(first, 7.0)
    assert worker.ends == [5.0 + 1.25]  # 2 s whole, 1 s half, 1 s a quarter
    assert worker.expected_end(second) == worker.end(second) == 10.25
    assert worker.finish() == 10.25


def test_copies_slow_it_only_beyond_what_the_memory_has_to_spare() -> None:
    worker = HostWorker(spare=0.5)
    first, second = worker.launch(0.0, 2.0), worker.launch(0.0, 2.0)
    worker.copies(0, 0.0, 2.0, 0.5)
    worker.copies(0, 2.0, 9.0, 1.0)
    assert (worker.end(first), worker.end(second)) == (2.0, 6.0)


def test_without_a_worker_the_thread_launches_nothing_while_it_works() -> None:
    # It waits for the first moment, until 4, and the copy of 2 s, works for 3 s, and only then launches the second
    # moment, which depends on nothing.
    held = forward(
        (Queue.COMPUTE, Run(0, (0,), 0), ()),
        (Queue.D2H, Copy(GRADIENT, 0, 1, 2, 128), (0,)),
        (Queue.CPU, Accumulate(0, 1, 2, first=True), (1,)),
        (Queue.COMPUTE, Run(1, (0,), 0), ()),
    )
    assert timeline(worker=False).run(held, [4.0, 2.0, 3.0, 8.0]) == (0.0, [4.0, 6.0, 9.0, 17.0])


def test_what_never_comes_is_a_mismatch() -> None:
    late = forward((Queue.COMPUTE, Run(0, (), 0), (1,)), (Queue.CPU, Step(0, (0,)), (0,)))
    with pytest.raises(PlanMismatch, match="waits for one that never comes"):
        timeline().run(late, [1.0, 1.0])
    with pytest.raises(PlanMismatch, match="waits for one that comes later"):
        timeline().run(forward((Queue.CPU, Step(0, (0,)), (7,))), [1.0])


def test_damage_shows_where_the_processor_computes_too() -> None:
    plan = replace(resident_plan(), tiers=(Tier("host", 4096),))
    passing = plan.segments[0]
    late = replace(passing, instrs=(replace(passing.instrs[0], after=(7,)), *passing.instrs[1:]))
    with pytest.raises(PlanMismatch, match="an instruction waits for 7, which is not there"):
        simulate(tiny(), replace(plan, segments=(late, plan.segments[1])), LEFT)

"""The clock of an accelerator that the CPU plays, against schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core._errors import PlanMismatch
from ps_core._plan import Copy, Queue, Release, Reserve, Run, Segment, Shift, Tier
from ps_core._program import Extent, Kind, SegmentName
from ps_core._simulate.clock import simulate
from test_simulate import LEFT, offloaded_plan, resident_plan, segment, tiny, whole

PLAYED = replace(LEFT, played_copy_bandwidth=128.0)
"""128 bytes, a group of weights or of gradients, take the thread a second."""


def test_a_resident_model() -> None:
    # Run 4, run 8 and its gradient to its place 1; norm 1, step 14. Half a second for each of these two.
    found = whole(simulate(tiny(), resident_plan(), replace(PLAYED, instruction_overhead_s=0.5)))
    assert found["step_time_s"] == 4 + 9 + 1 + 14 + 2 * 0.5
    assert (found["forward_s"], found["backward_s"]) == (4, 9)


def test_each_tensor_of_a_moment_takes_a_while_and_a_shift_is_a_copy() -> None:
    # One read in forward; one read and one gradient in backward. A slot of 128 bytes is moved in a second, twice.
    base = resident_plan()
    aside = segment(SegmentName.STEP, (Queue.COMPUTE, Shift(0, 2048), ()), (Queue.COMPUTE, Shift(0, 0), ()))
    plan = replace(base, segments=(base.segments[0], aside))
    found = whole(simulate(tiny(), plan, replace(PLAYED, tensor_overhead_s=0.25)))
    assert (found["forward_s"], found["backward_s"]) == (4.25, 9.5)
    assert found["step_time_s"] == 4.25 + 9.5 + 1 + 2


def test_an_offloaded_model() -> None:
    # The link takes 4 s up and 2 down, the thread 1 for each copy. Up until 4, run until 8; up from 8 to 12, run until
    # 21; norm until 22, down from 22 to 24, meanwhile the thread copies until 23. The step joins at 24 and takes 7.
    found = whole(simulate(tiny(), offloaded_plan(), PLAYED))
    assert found["step_time_s"] == 31
    assert (found["forward_s"], found["backward_s"], found["update_s"]) == (8, 9, 14)
    assert found["elapsed_s"] == 3 * 31
    assert found["busy_s"]["compute"] == 4 + 9 + 1
    assert found["moved_bytes"] == {"host->device": 256, "device->host": 128, "wire": 0}


def test_steps_of_the_cpu_share_memory_with_nobody() -> None:
    """With an accelerator the same plan's copies would, and each other's speed."""
    slow = replace(LEFT, host_bandwidth=32.0)
    played = replace(slow, played_copy_bandwidth=128.0)
    down, step = 128 / 32, 28 * 64 / 32
    assert round(simulate(tiny(), offloaded_plan(), played).step_time_s, 6) == 22 + down + step
    assert round(simulate(tiny(), offloaded_plan(), slow).step_time_s, 6) == 4 + 4 + 6 + 8 + 6 + step + 4


def test_what_can_be_issued_early_is() -> None:
    """The second moment's copy is launched before the first moment runs, so that it is there by then."""
    weight = Extent(Kind.P16, 0)
    fetch = segment(
        SegmentName.MICRO_LAST,
        (Queue.COMPUTE, Run(0, (0,), 0), ()),
        (Queue.H2D, Reserve(4, 0, 2048, 128), ()),
        (Queue.H2D, Copy(weight, 0, 0, 4, 128), ()),
        (Queue.COMPUTE, Run(1, (4,), 0), (2,)),
        (Queue.COMPUTE, Release(4), ()),
    )
    base = replace(resident_plan(), tiers=(Tier("device", 4096), Tier("host", 4096)))
    plan = replace(base, segments=(fetch, segment(SegmentName.STEP)))
    # The thread copies for 1 s and runs until 5, the link is done at 4; the second runs until 14.
    assert round(simulate(tiny(), plan, PLAYED, iterations=1).step_time_s, 6) == 14


def test_damage_that_shows_is_a_mismatch() -> None:
    plan = resident_plan()
    step = plan.segment(SegmentName.STEP)
    for after in (7, 0):
        late = Segment(SegmentName.STEP, (replace(step.instrs[0], after=(after,)),))
        with pytest.raises(PlanMismatch):
            simulate(tiny(), replace(plan, segments=(plan.segments[0], late)), PLAYED)

"""The clock of an accelerator that the CPU plays, against schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core._errors import PlanMismatch
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Copy, Queue, Release, Reserve, Run, Segment, Shift, Tier
from ps_core._simulate.clock import simulate
from ps_core._simulate.instruction_times import Costs
from test_simulate import LEFT, offloaded_plan, resident_plan, segment, tiny, whole

PLAYED = replace(LEFT, played_copy_bandwidth=128.0)
"""128 bytes, a group of weights or of gradients, take the thread a second: a forward moment's reading of them, and a
backward moment's reading, making and copying of gradients, 3."""


def test_a_resident_model() -> None:
    # Run 4 and 1, run 8 and 3; norm 1, step 14. Half a second for each of these two.
    found = whole(simulate(tiny(), resident_plan(), replace(PLAYED, instruction_overhead_s=0.5)))
    assert found["step_time_s"] == 5 + 11 + 1 + 14 + 2 * 0.5
    assert (found["forward_s"], found["backward_s"]) == (5, 11)


def test_a_tensor_counts_when_a_pass_comes_to_it_first() -> None:
    """Not again in the next moment that reads it, nor its bytes any less."""
    program = tiny()
    forward, backward = program.trace.moments
    trace = replace(program.trace, moments=(forward, replace(backward, grads=()), backward))
    longer = replace(program, trace=trace)
    costs = Costs(longer, resident_plan().tiers, replace(PLAYED, tensor_overhead_s=0.25), 1)
    assert costs._around == [1 + 0.25, 1 + 0.25, 3 + 0.25]


def test_elements_and_moves_take_their_time() -> None:
    base = tiny()
    forward, backward = base.trace.moments
    program = replace(base, trace=replace(base.trace, moments=(replace(forward, elements=8.0), backward)))
    slow = replace(PLAYED, element_s=0.5, element_fp32_s=99.0)
    assert whole(simulate(program, resident_plan(), slow))["forward_s"] == 5 + 8 * 0.5
    assert whole(simulate(program, resident_plan(), replace(LEFT, element_s=0.5)))["forward_s"] == 4 + 8 * 0.5
    # Of 4 operations 3 are attention's, at 1.5 a second; two queries and one tangent of a second each.
    attending = replace(forward, attention_flops=3.0, queries=2.0, tanhs=1.0)
    program = replace(base, trace=replace(base.trace, moments=(attending, replace(backward, queries_backward=4.0))))
    told = {"attention_flops": 1.5, "query_s": 1.0, "tanh_s": 1.0, "query_backward_s": 0.25}
    found = whole(simulate(program, resident_plan(), replace(PLAYED, **told)))
    assert (found["forward_s"], found["backward_s"]) == (1 + 2 + 2 + 1 + 1, 11 + 1)
    # A slot, then the link until 4.25 while the thread needs a quarter for the copy; run until 9.25; two quarters for
    # the slots, the link until 13.75, run until 24.75; norm, and down until 27.75, which the rest hides; step 7.
    moved = whole(simulate(tiny(), offloaded_plan(), replace(PLAYED, move_overhead_s=0.25)))
    assert moved["step_time_s"] == 27.75 + 7


def test_each_tensor_of_a_moment_takes_a_while_and_a_shift_is_a_copy() -> None:
    # One read in forward; one read and one gradient in backward. A slot of 128 bytes is moved in a second, twice.
    base = resident_plan()
    aside = segment(SegmentName.STEP, (Queue.COMPUTE, Shift(0, 2048), ()), (Queue.COMPUTE, Shift(0, 0), ()))
    plan = replace(base, segments=(base.segments[0], aside))
    found = whole(simulate(tiny(), plan, replace(PLAYED, tensor_overhead_s=0.25)))
    assert (found["forward_s"], found["backward_s"]) == (5.25, 11.5)
    assert found["step_time_s"] == 5.25 + 11.5 + 1 + 2


def test_an_offloaded_model() -> None:
    # The link takes 4 s up and 2 down, the thread 1 for each copy. Up until 4, run until 9; up from 9 to 13, run until
    # 24; norm until 25, down from 25 to 27, meanwhile the thread copies until 26. The step joins at 27 and takes 7.
    found = whole(simulate(tiny(), offloaded_plan(), PLAYED))
    assert found["step_time_s"] == 34
    assert found["bound_step_time_s"] == 34
    assert (found["forward_s"], found["backward_s"], found["update_s"]) == (13, 11, 10)
    assert found["elapsed_s"] == 3 * 34
    assert found["busy_s"]["compute"] == 5 + 11 + 1
    assert found["moved_bytes"] == {"host->device": 256, "device->host": 128, "wire": 0}


def test_steps_of_the_cpu_share_memory_with_nobody() -> None:
    """With an accelerator the same plan's copies would, and each other's speed."""
    slow = replace(LEFT, host_bandwidth=32.0)
    played = replace(slow, played_copy_bandwidth=128.0)
    down, step = 128 / 32, 28 * 64 / 32
    assert round(simulate(tiny(), offloaded_plan(), played).step_time_s, 6) == 25 + down + step
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
    # The thread copies for 1 s and runs until 6, the link is done at 4; the second runs until 17.
    assert round(simulate(tiny(), plan, PLAYED, iterations=1).step_time_s, 6) == 17


def test_damage_that_shows_is_a_mismatch() -> None:
    plan = resident_plan()
    step = plan.segment(SegmentName.STEP)
    for after in (7, 0):
        late = Segment(SegmentName.STEP, (replace(step.instrs[0], after=(after,)),))
        with pytest.raises(PlanMismatch):
            simulate(tiny(), replace(plan, segments=(plan.segments[0], late)), PLAYED)

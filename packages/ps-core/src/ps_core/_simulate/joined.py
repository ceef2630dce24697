"""How long a training step takes as the engine carries it out: one segment after the other.

[Note: segments joined]
The engine's host thread waits for every queue before it begins a segment, and does the work of the processor's queue
itself: optimizer steps, and sums of gradients. So no segment runs beside the next one: a step takes the sum of its
segments, each timed alone from a standing start. And within a pass nothing is launched while the thread works, or waits
for what it works on. A plan would allow more; see [Note: the clock].
"""

from __future__ import annotations

from typing import NamedTuple

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Held, Queue, Release, Reserve, Run, Segment, Tier
from ps_core._program import Program
from ps_core._simulate.costs import Costs, Work
from ps_core._simulate.machine import Machine
from ps_core._simulate.played import LAUNCHED, LINKS, play


class Timed(NamedTuple):
    """A segment that runs alone, from a standing start."""

    seconds: float
    """Until the last queue is done."""
    ends: list[float]
    """Of each instruction."""
    work: Work
    busy_s: list[float]
    """By queue."""


class Joined:
    """Times segments one by one; see [Note: segments joined]."""

    def __init__(self, program: Program, tiers: tuple[Tier, ...], machine: Machine, ranks_per_node: int | None) -> None:
        """``ranks_per_node`` None: all processes share one node."""
        per_node = program.ranks if ranks_per_node is None else ranks_per_node
        if per_node < 1 or program.ranks % per_node:
            raise InvalidInput(f"{program.ranks} ranks cannot be spread over nodes of {per_node}")
        self._costs = Costs(program, tiers, machine, per_node)
        self._played = machine.played_copy_bandwidth > 0

    def time(self, home: tuple[Held, ...], segment: Segment) -> Timed:
        """Time one segment of a plan with this home."""
        work = self._costs.price(segment.instrs, slot_bytes(home, segment))
        if self._played:
            ends, seconds = play(segment, work.seconds, work.thread_s, LINKS)
        elif _works_between_moments(segment):
            queues = [instr.queue for instr in segment.instrs]
            own = [took * (queue is Queue.CPU) for queue, took in zip(queues, work.seconds, strict=True)]
            ends, seconds = play(segment, work.seconds, own, LAUNCHED)
        else:
            ends = _ends(segment, work.seconds)
            seconds = max(ends, default=0.0)
        busy = [0.0] * len(Queue)
        for instr, took in zip(segment.instrs, work.seconds, strict=True):
            busy[instr.queue] += took
        return Timed(seconds, ends, work, busy)


def _works_between_moments(segment: Segment) -> bool:
    """Return whether the host thread has work to do that keeps it from launching moments."""
    return any(isinstance(instr.op, Run) for instr in segment.instrs) and any(
        instr.queue is Queue.CPU and not isinstance(instr.op, Reserve | Release) for instr in segment.instrs
    )


def slot_bytes(home: tuple[Held, ...], segment: Segment) -> dict[int, int]:
    """The size of every slot that a segment names."""
    found = {slot: held.bytes for slot, held in enumerate(home)}
    for instr in segment.instrs:
        if isinstance(instr.op, Reserve):
            found[instr.op.slot] = instr.op.bytes
    return found


def _ends(segment: Segment, seconds: list[float]) -> list[float]:
    free = [0.0] * len(Queue)
    ends: list[float] = []
    try:
        for instr, took in zip(segment.instrs, seconds, strict=True):
            begin = free[instr.queue]
            for earlier in instr.after:
                if ends[earlier] > begin:  # noqa: PLR1730 - max() costs more than all else here
                    begin = ends[earlier]
            free[instr.queue] = end = begin + took
            ends.append(end)
    except IndexError as error:
        raise PlanMismatch("an instruction waits for one that comes later") from error
    return ends

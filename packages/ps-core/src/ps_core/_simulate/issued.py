"""How long a training step takes as the engine carries it out.

[Note: as the engine issues]
The host thread goes through a pass moment by moment, launches what the plan has before each, and is far ahead of the
accelerator. What it launches runs on its queue once the queue is free and all that it comes after is over. The
processor's queue is a worker's thread. No stream can wait for a thread, so the host thread does: it passes over a copy
whose slot the worker still works on, until a moment needs the copy.

Where a pass begins all streams wait for each other, but not for the worker: steps go on beside the next forward pass.
Where a step begins the host thread waits for everything, since it must know the norm. So a training step takes as long
as its step segment and its passes one after the other, from one step's beginning to the next.

Where there is a disk the host thread waits for it, too, where a pass begins. Two kinds of plan are carried out
otherwise. Of several processes, and where the processor computes, the host thread does the work of the processor's
queue itself. Where the processor plays the accelerator one thread does almost everything; see `played`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Held, Queue, Release, Reserve, Run, Segment, Tier, slots_of
from ps_core._program import Program, SegmentName
from ps_core._simulate.costs import Costs, Work
from ps_core._simulate.early_steps import early_steps
from ps_core._simulate.machine import Machine
from ps_core._simulate.played import play
from ps_core._simulate.timeline import Timeline

_ROUNDS = 3
"""Steps that are timed until one follows the other steadily."""


class Priced(NamedTuple):
    """A segment, and what its instructions take."""

    segment: Segment
    work: Work


class Timed(NamedTuple):
    """A segment of a step."""

    begin: float
    """When the streams are free for it."""
    seconds: float
    """Until the next segment begins, or everything is over."""
    ends: list[float]
    """Of each instruction."""
    work: Work
    busy_s: list[float]
    """By queue."""


class Issuing:
    """Times the segments of one program's plans; see [Note: as the engine issues]."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        machine: Machine,
        ranks_per_node: int | None,
        *,
        in_backward: bool = False,
    ) -> None:
        """``ranks_per_node`` None: all processes share one node. ``in_backward``: see [Note: steps within backward]."""
        per_node = program.ranks if ranks_per_node is None else ranks_per_node
        if per_node < 1 or program.ranks % per_node:
            raise InvalidInput(f"{program.ranks} ranks cannot be spread over nodes of {per_node}")
        self._played = machine.played_copy_bandwidth > 0
        self._worker = program.ranks == 1 and tiers[0].name == "device" and not self._played
        self._in_backward = in_backward and self._worker
        self._costs = Costs(program, tiers, machine, per_node, beside=self._worker)
        self._host_bandwidth = machine.host_bandwidth / per_node
        self._spare = machine.host_memory_bandwidth / machine.host_bandwidth - 1

    def price(self, home: tuple[Held, ...], segment: Segment) -> Priced:
        """Price one segment of a plan with this home."""
        return Priced(segment, self._costs.price(segment.instrs, slot_bytes(home, segment)))

    def time(self, home: tuple[Held, ...], step: Sequence[Priced]) -> list[Timed]:
        """Time the segments of one training step, in the order of the result; the step segment begins it."""
        if self._played:
            return [_alone(priced, *play(priced.segment, priced.work.seconds, priced.work.thread_s)) for priced in step]
        if not self._worker and not any(_works_between_moments(priced.segment) for priced in step):
            return [_alone(priced, *_ends(priced)) for priced in step]
        timeline = Timeline(len(home), worker=self._worker, bandwidth=self._host_bandwidth, spare=self._spare)
        if self._in_backward and step[-1].segment.name is SegmentName.STEP:
            return _with_early_steps(timeline, len(home), step)
        order = sorted(range(len(step)), key=lambda place: step[place].segment.name is not SegmentName.STEP)
        ran = [timeline.run(step[place].segment, step[place].work.seconds) for place in order]
        begins = [*(begin for begin, _ in ran), timeline.finish()]
        found = {
            place: _timed(step[place], begin, until - begin, ends)
            for place, (begin, ends), until in zip(order, ran, begins[1:], strict=True)
        }
        return [found[place] for place in range(len(step))]


def _with_early_steps(timeline: Timeline, homes: int, step: Sequence[Priced]) -> list[Timed]:
    """Time the third of three steps, most of whose steps begin within backward and may go on in the next forward."""
    *passes, last = step
    found = early_steps(homes, passes[-1].segment, last.segment)
    seconds = last.work.seconds
    early = {behind: [(slots_of(row.op), seconds[row.id]) for row in rows] for behind, rows in found.items()}
    begun = {row.id for rows in found.values() for row in rows}
    kept = [instr for instr in last.segment.instrs if instr.id not in begun]
    places = {instr.id: place for place, instr in enumerate(kept)}
    instrs = tuple([replace(row, id=places[row.id], after=tuple(places[i] for i in row.after)) for row in kept])
    rest, taken = replace(last.segment, instrs=instrs), [seconds[instr.id] for instr in kept]
    for _ in range(_ROUNDS):
        own, ends = timeline.run(rest, taken, early={})
        ran = [timeline.run(priced.segment, priced.work.seconds) for priced in passes[:-1]]
        ran.append(timeline.run(passes[-1].segment, passes[-1].work.seconds, early))
    begins = [*(begin for begin, _ in ran), timeline.run(rest, taken, early={})[0]]
    timed = [
        _timed(priced, begin, until - begin, each)
        for priced, (begin, each), until in zip(passes, ran, begins[1:], strict=True)
    ]
    every = [0.0] * len(seconds)  # of what began within backward nobody asks
    for instr, end in zip(kept, ends, strict=True):
        every[instr.id] = end
    return [*timed, _timed(last, own, begins[0] - own, every)]


def _alone(priced: Priced, ends: list[float], seconds: float) -> Timed:
    return _timed(priced, 0.0, seconds, ends)


def _timed(priced: Priced, begin: float, seconds: float, ends: list[float]) -> Timed:
    busy = [0.0] * len(Queue)
    for instr, took in zip(priced.segment.instrs, priced.work.seconds, strict=True):
        busy[instr.queue] += took
    return Timed(begin, seconds, ends, priced.work, busy)


def slot_bytes(home: tuple[Held, ...], segment: Segment) -> dict[int, int]:
    """The size of every slot that a segment names."""
    found = {slot: held.bytes for slot, held in enumerate(home)}
    for instr in segment.instrs:
        if isinstance(instr.op, Reserve):
            found[instr.op.slot] = instr.op.bytes
    return found


def _works_between_moments(segment: Segment) -> bool:
    """Return whether the host thread has work to do that keeps it from launching moments."""
    return any(isinstance(instr.op, Run) for instr in segment.instrs) and any(
        instr.queue is Queue.CPU and not isinstance(instr.op, Reserve | Release) for instr in segment.instrs
    )


def _ends(priced: Priced) -> tuple[list[float], float]:
    """When each instruction ends, and the last one, if nothing but ``after`` and the queues keeps them."""
    free = [0.0] * len(Queue)
    ends: list[float] = []
    try:
        for instr, took in zip(priced.segment.instrs, priced.work.seconds, strict=True):
            begin = free[instr.queue]
            for earlier in instr.after:
                if ends[earlier] > begin:  # noqa: PLR1730 - max() costs more than all else here
                    begin = ends[earlier]
            free[instr.queue] = end = begin + took
            ends.append(end)
    except IndexError as error:
        raise PlanMismatch("an instruction waits for one that comes later") from error
    return ends, max(ends, default=0.0)

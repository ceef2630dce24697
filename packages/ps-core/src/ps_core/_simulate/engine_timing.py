"""Compute how long a training step takes as the engine carries it out.

[Note: as the engine issues]
The host thread launches the plan's instructions before each moment of a pass. Launching a moment takes it a time for
each operator. So a moment is over no earlier than all of it was launched. An instruction runs on its queue once it was
launched, the queue is free, and all its predecessors are over. The processor's queue is a worker's thread. No stream
can wait for a thread, so the host thread does. It skips a copy whose slot the worker still works on, until a moment
needs the copy.

Where a pass begins all streams wait for each other. None waits for the worker: steps go on beside the next forward
pass. Where a step begins the host thread waits for everything, since it must know the norm. So a training step takes as
long as its step segment and its passes one after the other.

With a disk, the host thread also waits for the disk where a pass begins. Two kinds of plan are carried out differently.
Where the processor computes, the host thread does the work of the processor's queue itself. On an emulated accelerator
one thread does almost everything; see `emulated_timing`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ps_core._errors import InvalidInput
from ps_core._extents import SegmentName
from ps_core._plan import Held, Queue, Release, Reserve, Run, Segment, Step, Tier
from ps_core._program import Program
from ps_core._simulate.emulated_timing import LINKS, play
from ps_core._simulate.instruction_times import Costs, Work
from ps_core._simulate.machine import Machine
from ps_core._simulate.steps_in_backward import (
    SHARES,
    EarlySteps,
    early_steps,
    newest_first,
    overwritten_bytes,
    with_room,
)
from ps_core._simulate.timeline import EarlySeconds, Ran, Timeline
from ps_core._units import check_whole

_ROUNDS = 3
"""Steps that are timed until they follow each other steadily."""


class Priced(NamedTuple):
    """A segment, and the costs of its instructions."""

    segment: Segment
    work: Work


class Timed(NamedTuple):
    """A segment of a step, with its times."""

    begin: float
    """The time at which the streams are free for the segment."""
    seconds: float
    """Seconds until the next segment begins, or everything is over."""
    ends: list[float]
    """The end of each instruction."""
    work: Work
    busy_s: list[float]
    """Seconds by queue."""


class Issuing:
    """Time the segments of one program's plans; see [Note: as the engine issues]."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        machine: Machine,
        ranks_per_node: int | None,
        *,
        in_backward: bool = False,
        undoable: bool = False,
    ) -> None:
        """Begin; ``ranks_per_node`` None: all processes share one node. ``in_backward``: see [Note: steps within
        backward]; ``undoable``: also see [Note: steps that can be undone].
        """
        processes = program.ranks * program.copies
        if ranks_per_node is not None:
            check_whole("ranks_per_node", ranks_per_node, 1)
        per_node = processes if ranks_per_node is None else ranks_per_node
        if processes % per_node:
            raise InvalidInput(f"{processes} processes cannot be spread over nodes of {per_node}")
        if program.ranks % per_node and per_node % program.ranks:
            raise InvalidInput(f"a copy of {program.ranks} processes neither fills nor divides nodes of {per_node}")
        self._played = machine.played_copy_bandwidth > 0
        self._worker = tiers[0].name == "device" and not self._played
        self.within_backward = in_backward and self._worker
        """True if steps may begin within backward."""
        self._undoable, self._tiers = undoable, tiers
        self._overwritten = frozenset(filter(program.overwritten, program.stepped))
        self._costs = Costs(program, tiers, machine, per_node, accelerator=self._worker)
        self._host_bandwidth = machine.host_bandwidth / per_node
        self._spare = machine.host_memory_bandwidth / machine.host_bandwidth - 1

    def price(self, home: tuple[Held, ...], segment: Segment) -> Priced:
        """Compute the costs of one segment of a plan with these home slots."""
        return Priced(segment, self._costs.price(segment.instrs, slot_bytes(home, segment)))

    def time(self, home: tuple[Held, ...], step: Sequence[Priced]) -> list[Timed]:
        """Time the segments of one training step, in the order of the result; the step segment begins it."""
        if self._played:
            return [_alone(priced, *play(priced.segment, priced.work.seconds, priced.work.thread_s)) for priced in step]
        if not self._worker and not any(_works_between_moments(priced.segment) for priced in step):
            return [_alone(priced, *_ends(priced)) for priced in step]
        return self._time_choosing(home, step)[1] if self.within_backward else self._time_in_order(home, step)

    def _time_in_order(self, home: tuple[Held, ...], step: Sequence[Priced]) -> list[Timed]:
        timeline = self._timeline(home)
        order = sorted(range(len(step)), key=lambda place: step[place].segment.name is not SegmentName.STEP)
        ran = [timeline.run(step[place].segment, step[place].work.seconds) for place in order]
        begins = [*(begin for begin, _ in ran), timeline.finish()]
        found = {
            place: _timed(step[place], begin, until - begin, ends)
            for place, (begin, ends), until in zip(order, ran, begins[1:], strict=True)
        }
        return [found[place] for place in range(len(step))]

    def early_steps(self, home: tuple[Held, ...], step: Sequence[Priced]) -> EarlySteps:
        """Return the steps that begin within the last pass."""
        return self._time_choosing(home, step)[0] if self.within_backward else {}

    def ran(
        self, home: tuple[Held, ...], sequence: Sequence[Priced], steps: EarlySteps
    ) -> list[tuple[Segment, list[Ran]]]:
        """Return what each of these segments runs, and when, if they follow each other from the start.

        ``steps``: those that begin within the last pass.
        """
        if self._played or not (self._worker or any(_works_between_moments(priced.segment) for priced in sequence)):
            return list(self._ran_alone(sequence))
        timeline, log = self._timeline(home), list[Ran]()
        timeline.log = log
        counts: list[tuple[Segment, int]] = []
        last = next((each for each in sequence if each.segment.name is SegmentName.STEP), None)
        split = self._split(home, steps, last) if steps and last is not None else None
        before = None
        for priced in sequence:
            segment, name = priced.segment, priced.segment.name
            if split is not None and name is SegmentName.MICRO_LAST:
                timeline.run(segment, priced.work.seconds, split.early)
            elif split is not None and before is SegmentName.MICRO_LAST:
                segment = split.rest
                timeline.run(segment, split.seconds, split.behind)
            else:
                timeline.run(segment, priced.work.seconds)
            before = name
            counts.append((segment, len(log)))
        rows = timeline.ran()
        starts = [0, *(count for _, count in counts)]
        return [(segment, rows[start:end]) for (segment, end), start in zip(counts, starts, strict=False)]

    def _ran_alone(self, sequence: Sequence[Priced]) -> Iterator[tuple[Segment, list[Ran]]]:
        begin = 0.0
        for priced in sequence:
            segment, work = priced
            ends, seconds = play(segment, work.seconds, work.thread_s) if self._played else _ends(priced)
            rows = []
            for instr, end in zip(segment.instrs, ends, strict=True):
                of_thread = self._played and instr.queue not in LINKS
                took = (work.thread_s if of_thread else work.seconds)[instr.id]
                rows.append(Ran(instr, begin + end - took, begin + end))
            yield segment, rows
            begin += seconds

    def _time_choosing(self, home: tuple[Held, ...], step: Sequence[Priced]) -> tuple[EarlySteps, list[Timed]]:
        """Choose the steps that begin within the last pass: none, or some of [Note: the newest first]."""
        *passes, last = step
        none: EarlySteps = {}
        choices = [(none, self._time_in_order(home, step))]
        if last.segment.name is SegmentName.STEP:
            timeline, ends = self._timeline(home), [0.0]
            for priced in passes:
                _, ends = timeline.run(priced.segment, priced.work.seconds)
            every = early_steps(len(home), passes[-1].segment, last.segment)
            seconds, sizes, room = last.work.seconds, overwritten_bytes(home, last.segment), 0
            if self._undoable and len(self._tiers) > 1:
                seconds = [took + self._costs.copying_s(sizes.get(place, 0)) for place, took in enumerate(seconds)]
                room = self._tiers[1].capacity_bytes - _end_on_host(home, step)
            for steps in [newest_first(every, passes[-1].segment, ends, seconds, share) for share in SHARES]:
                chosen = with_room(steps, ends, sizes, room) if self._undoable else steps
                split = self._split(home, chosen, last)
                choices.append((chosen, _with_early_steps(self._timeline(home), split, step)))
        return min(choices, key=lambda choice: sum(timed.seconds for timed in choice[1]))

    def _split(self, home: tuple[Held, ...], steps: EarlySteps, last: Priced) -> _Split:
        if not self._undoable:
            return _Split(steps, last, measured=self._overwritten)
        sizes = overwritten_bytes(home, last.segment)
        copying = {row.id: self._costs.copying_s(sizes[row.id]) for rows in steps.values() for row in rows}
        return _Split(steps, last, copying)

    def _timeline(self, home: tuple[Held, ...]) -> Timeline:
        return Timeline(
            len(home),
            worker=self._worker,
            bandwidth=self._host_bandwidth,
            launching_s=self._costs.launching_s,
            spare=self._spare,
        )


def _end_on_host(home: tuple[Held, ...], step: Sequence[Priced]) -> int:
    """Return the end of the host memory that a plan uses in a step."""
    ends = [held.offset + held.bytes for held in home if held.tier == 1]
    for priced in step:
        rows = [instr.op for instr in priced.segment.instrs if isinstance(instr.op, Reserve)]
        ends += [op.offset + op.bytes for op in rows if op.tier == 1]
    return max(ends, default=0)


def _with_early_steps(timeline: Timeline, split: _Split, step: Sequence[Priced]) -> list[Timed]:
    """Time the third of three steps; optimizer steps may begin in backward and end in the next forward."""
    *passes, last = step
    for _ in range(_ROUNDS):
        own, ends = timeline.run(split.rest, split.seconds, split.behind)
        ran = [timeline.run(priced.segment, priced.work.seconds) for priced in passes[:-1]]
        ran.append(timeline.run(passes[-1].segment, passes[-1].work.seconds, split.early))
    begins = [*(begin for begin, _ in ran), timeline.run(split.rest, split.seconds, split.behind)[0]]
    timed = [
        _timed(priced, begin, until - begin, each)
        for priced, (begin, each), until in zip(passes, ran, begins[1:], strict=True)
    ]
    every = [0.0] * len(last.segment.instrs)  # zero for steps within backward, whose ends are not used
    for instr, end in zip(split.kept, ends, strict=True):
        every[instr.id] = end
    return [*timed, _timed(last, own, begins[0] - own, every)]


class _Split:
    """The step segment cut in two: steps that begin within the last pass, and the other instructions."""

    def __init__(
        self,
        steps: EarlySteps,
        step: Priced,
        copying: Mapping[int, float] | None = None,
        measured: Container[int] = (),
    ) -> None:
        """Cut the segment. ``copying``: seconds that copying what a step overwrites takes, by the step's number; None:
        no step can be undone. ``measured``: groups whose gradients the compute queue
        measured, so that the decision need not wait for the worker.
        """
        seconds, more = step.work.seconds, copying or {}
        self.early: EarlySeconds = {
            behind: [(row, seconds[row.id] + more.get(row.id, 0.0)) for row in rows] for behind, rows in steps.items()
        }
        begun = {row.id for rows in steps.values() for row in rows}
        self.kept = [instr for instr in step.segment.instrs if instr.id not in begun]
        """The instructions that wait for the step segment."""
        self.rest = replace(step.segment, instrs=tuple(self.kept)).numbered_by_place()
        self.seconds = [seconds[row.id] for row in self.kept]
        left = any(
            isinstance(row.op, Step) and row.queue is Queue.CPU and row.op.group not in measured for row in self.kept
        )
        self.behind: EarlySeconds | None = None if left or copying is not None else {}
        """Steps that begin early; None: the decision waits for the worker: for norms on the host, or to undo steps."""


def _alone(priced: Priced, ends: list[float], seconds: float) -> Timed:
    return _timed(priced, 0.0, seconds, ends)


def _timed(priced: Priced, begin: float, seconds: float, ends: list[float]) -> Timed:
    busy = [0.0] * len(Queue)
    for instr, took in zip(priced.segment.instrs, priced.work.seconds, strict=True):
        busy[instr.queue] += took
    return Timed(begin, seconds, ends, priced.work, busy)


def slot_bytes(home: tuple[Held, ...], segment: Segment) -> dict[int, int]:
    """Return the size of every slot of a segment."""
    found = {slot: held.bytes for slot, held in enumerate(home)}
    for instr in segment.instrs:
        if isinstance(instr.op, Reserve):
            found[instr.op.slot] = instr.op.bytes
    return found


def _works_between_moments(segment: Segment) -> bool:
    """Return True if the host thread has work that keeps it from launching moments."""
    return any(isinstance(instr.op, Run) for instr in segment.instrs) and any(
        instr.queue is Queue.CPU and not isinstance(instr.op, Reserve | Release) for instr in segment.instrs
    )


def _ends(priced: Priced) -> tuple[list[float], float]:
    """Return when each instruction ends, and the last one, if only ``after`` and the queues delay them."""
    free = [0.0] * len(Queue)
    ends: list[float] = []
    for instr, took in zip(priced.segment.instrs, priced.work.seconds, strict=True):
        begin = free[instr.queue]
        for earlier in instr.after:
            if ends[earlier] > begin:  # noqa: PLR1730 - max() costs more than all else here
                begin = ends[earlier]
        free[instr.queue] = end = begin + took
        ends.append(end)
    return ends, max(ends, default=0.0)

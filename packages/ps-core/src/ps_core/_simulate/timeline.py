"""Run the host thread, the worker's thread and the queues, segment after segment.

See [Note: as the engine issues].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ps_core._errors import PlanMismatch
from ps_core._extents import SegmentName
from ps_core._plan import Copy, Instr, Op, Queue, Release, Reserve, Run, Segment, Step, slots_of
from ps_core._simulate.host_worker_times import HostWorker

_STREAMS = tuple([queue for queue in Queue if queue is not Queue.CPU])
_DIRECTIONS = {Queue.H2D: 0, Queue.D2H: 1}
_DISKS = (Queue.DISK_R, Queue.DISK_W)
NO_WORK = -1
"""No piece of the worker's work. Pieces are numbered in the order in which the worker does them."""


EarlySeconds: TypeAlias = Mapping[int, Sequence[tuple[Instr, float]]]
"""For each instruction, the steps that begin behind it within backward, and their seconds."""


class Ran(NamedTuple):
    """An instruction, and when it ran."""

    instr: Instr
    begin: float
    end: float
    work: int = NO_WORK
    """The number of the worker's piece of work, which says when it ran."""


class Timeline:
    """The threads and queues of one process."""

    def __init__(
        self,
        homes: int,
        *,
        worker: bool,
        bandwidth: float,
        launching_s: Callable[[Op], float],
        spare: float = 0.0,
    ) -> None:
        """Begin; ``homes``: number of slots that every segment finds. ``worker``: a thread does the processor's queue.

        ``bandwidth``: the worker's of host memory. ``launching_s``: what the host thread takes to launch an instruction
        of the compute queue. ``spare``: see `HostWorker`.
        """
        self._homes, self._bandwidth = homes, bandwidth
        self.launching_s = launching_s
        self.worker = HostWorker(spare) if worker else None
        self.now = 0.0
        """The time that the host thread has reached."""
        self.free = [0.0] * len(Queue)
        """The time at which each queue is free; the processor's: the end of the worker's waits for others."""
        self.touching: dict[int, int] = {}
        """The worker's last piece of work on each home slot."""
        self.leaving = NO_WORK
        """The last piece of work on a slot that was released before the work was over."""
        self.log: list[Ran] | None = None
        """What ran, in order of launch; None: not recorded."""

    def run(
        self, segment: Segment, seconds: list[float], early: EarlySeconds | None = None
    ) -> tuple[float, list[float]]:
        """Run a segment; return when the streams are free for it, and when each of its instructions ends.

        ``early``: steps that begin behind instructions of this segment; None: every step waits for the decision.
        """
        waits = self.worker is None or segment.name is SegmentName.STEP
        if waits and early is None:
            self.finish()
        self.now = max(self.now, *(self.free[queue] for queue in (_STREAMS if waits else _DISKS)))
        begin = max(self.now if waits else 0.0, *(self.free[queue] for queue in _STREAMS))
        self.free = [max(begin, free) for free in self.free]
        walk = _Walk(self, segment, seconds, early or {})
        walk.run()
        self.touching = {slot: work for slot, work in walk.touching.items() if slot < self._homes}
        return begin, walk.final_ends()

    def finish(self) -> float:
        """Wait for everything; return when it is over."""
        self.now = max(self.now, *self.free, 0.0 if self.worker is None else self.worker.finish())
        return self.now

    def ran(self) -> list[Ran]:
        """Finish; return what was recorded, with the times of the worker's work too."""
        self.finish()
        return [
            row if row.work == NO_WORK or self.worker is None else Ran(row.instr, *self.worker.span(row.work))
            for row in self.log or ()
        ]

    def note_copy(self, queue: Queue, begin: float, end: float, count: int) -> None:
        """Record a copy, which slows the worker."""
        if self.worker is not None and queue in _DIRECTIONS and end > begin:
            self.worker.copies(_DIRECTIONS[queue], begin, end, count / (end - begin) / self._bandwidth)


class _Walk:
    """Walk through one segment."""

    def __init__(self, timeline: Timeline, segment: Segment, seconds: list[float], early: EarlySeconds) -> None:
        self._line, self._name, self._instrs = timeline, segment.name.value, segment.instrs
        self._seconds, self._early = seconds, early
        self._worker = timeline.worker
        self.touching = dict(timeline.touching)
        queues: dict[Queue, list[int]] = {queue: [] for queue in Queue}
        for place, instr in enumerate(segment.instrs):
            queues[instr.queue].append(place)
        self._queues = {queue: line for queue, line in queues.items() if line}
        self._at = dict.fromkeys(self._queues, 0)
        self._ends: list[float | None] = [None] * len(segment.instrs)
        self._waited = 0.0
        """The end of all that the worker waits for."""
        self._works: dict[int, int] = {}
        """The worker's piece of work for each instruction's place."""

    def run(self) -> None:
        """Issue everything, as `_execution.segment_queues.IssueOrder` does."""
        moments = [place for place in self._queues.get(Queue.COMPUTE, ()) if isinstance(self._instrs[place].op, Run)]
        for moment in (*moments, None):
            while True:
                moved = self._issue_ready(patient=False)
                if not moved and (moment is None or not self._is_next(moment)):
                    moved = self._issue_ready(patient=True)
                if not moved:
                    break
            if moment is not None:
                if not self._is_next(moment):
                    break
                self._issue(moment)
                self._at[Queue.COMPUTE] += 1
        if None in self._ends:
            raise PlanMismatch(f"segment {self._name!r}: an instruction waits for one that never comes")

    def final_ends(self) -> list[float]:
        """Return when each instruction ends, also those of the worker that the host thread did not wait for."""
        for place, work in self._works.items():
            self._ends[place] = None if self._worker is None else self._worker.expected_end(work)
        return [end for end in self._ends if end is not None]

    def _issue_ready(self, *, patient: bool) -> bool:
        moved = False
        for queue, line in self._queues.items():
            while self._at[queue] < len(line):
                place = line[self._at[queue]]
                instr = self._instrs[place]
                if isinstance(instr.op, Run) or not self._ready(instr) or (not patient and self._would_block(instr)):
                    break
                self._issue(place)
                self._at[queue] += 1
                moved = True
                if patient:
                    return True
                if queue is Queue.CPU or isinstance(instr.op, Step):
                    break
        return moved

    def _ready(self, instr: Instr) -> bool:
        ends = self._ends
        try:
            for earlier in instr.after:  # all() of a generator takes three times as long
                if ends[earlier] is None:
                    return False
        except IndexError as error:
            raise PlanMismatch("an instruction waits for one that comes later") from error
        return True

    def _is_next(self, moment: int) -> bool:
        line, at = self._queues[Queue.COMPUTE], self._at[Queue.COMPUTE]
        return at < len(line) and line[at] == moment and self._ready(self._instrs[moment])

    def _wait(self, instr: Instr) -> int:
        """Return the last piece of the worker's work that the host thread waits for before it issues an instruction."""
        if self._worker is None or instr.queue is Queue.CPU:
            return NO_WORK
        op = instr.op
        if isinstance(op, Copy) and instr.queue not in _DISKS:
            return max(self.touching.get(op.source, NO_WORK), self.touching.get(op.target, NO_WORK))
        return self._line.leaving if isinstance(op, Reserve) and op.tier else NO_WORK

    def _would_block(self, instr: Instr) -> bool:
        work = self._wait(instr)
        return work != NO_WORK and self._worker is not None and not self._worker.done(work, self._line.now)

    def _issue(self, place: int) -> None:
        line, instr, took = self._line, self._instrs[place], self._seconds[place]
        worker = self._worker
        if worker is not None:
            work = self._wait(instr)
            if work != NO_WORK:
                line.now = max(line.now, worker.end(work))
            if instr.queue is Queue.CPU:
                self._to_worker(worker, place, instr)
                return
        after = max([end for earlier in instr.after if (end := self._ends[earlier]) is not None], default=0.0)
        begin = max(line.free[instr.queue], after, line.now)
        end = begin + took
        if instr.queue is Queue.CPU:  # the host thread does it itself
            line.now = end
        elif isinstance(instr.op, Copy):
            line.note_copy(instr.queue, begin, end, instr.op.bytes)
        elif isinstance(instr.op, Release):
            self._release(instr.op)
        elif instr.queue is Queue.COMPUTE:
            if isinstance(instr.op, Step) and self._name != SegmentName.STEP:  # the host looks at the gradient first
                line.now = max(line.now, begin)
            line.now += line.launching_s(instr.op)
            end = max(end, line.now)
        line.free[instr.queue] = self._ends[place] = end
        if line.log is not None:
            line.log.append(Ran(instr, begin, end))
        self._begin_early(place, end)

    def _begin_early(self, place: int, end: float) -> None:
        """Launch the steps that may begin once an instruction is over."""
        for step, seconds in self._early.get(place, ()):
            if self._worker is not None:
                self._launch(self._worker, step, end, seconds)

    def _launch(self, worker: HostWorker, instr: Instr, after: float, seconds: float) -> int:
        """Launch a piece of the worker's work, behind what the worker waits for."""
        work = worker.launch(max(self._line.free[Queue.CPU], self._waited, after), seconds)
        self.touching.update(dict.fromkeys(slots_of(instr.op), work))
        if self._line.log is not None:
            self._line.log.append(Ran(instr, 0.0, 0.0, work))
        return work

    def _to_worker(self, worker: HostWorker, place: int, instr: Instr) -> None:
        """Launch work of the worker; later streams wait for its slot, and for what the worker waits for."""
        line = self._line
        after = [end for earlier in instr.after if (end := self._ends[earlier]) is not None]
        self._waited = self._ends[place] = max(line.now, self._waited, *after)
        if isinstance(instr.op, Release):
            self._release(instr.op)
        elif not isinstance(instr.op, Reserve):
            self._works[place] = self._launch(worker, instr, self._waited, self._seconds[place])
        self._begin_early(place, self._waited)

    def _release(self, op: Release) -> None:
        self._line.leaving = max(self._line.leaving, self.touching.pop(op.slot, NO_WORK))

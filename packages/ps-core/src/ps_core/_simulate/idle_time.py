"""Find why the accelerator is idle: attribute its idle time to the work that it waited for.

[Note: causes of idle time]
The time between two pieces of the compute queue's work is examined backwards. The later piece waited for the last to
end of its predecessors. After that end only the launching thread can have delayed it. While the predecessor ran, the
accelerator waited for its queue. Before the predecessor began, it waited for others in its turn, and so on. So all
causes together are the idle time.

The plan says what a piece comes after. These are the instructions in ``after``, the one before it on its queue, and the
processor's work on its slots. So are the streams of earlier segments (of a step also the processor's work). Without a
plan everything waits for everything, so a piece comes after all that had ended when it began.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ps_core._extents import SegmentName
from ps_core._plan import Copy, Queue, Segment, slots_of
from ps_core._simulate.work_pieces import NOTES, Piece


class Cause(StrEnum):
    """A reason why the accelerator is idle: the work that it waits for."""

    FETCH = "fetch"
    """A copy to the accelerator."""
    HOST_STEP = "host_step"
    """The processor's work (steps, sums, norms), or the copies of gradients for it."""
    DISK = "disk"
    MEMORY = "memory"
    """A copy from the accelerator that frees memory."""
    COLLECTIVE = "collective"
    LAUNCH = "launch"
    """The thread that launches work."""


_CAUSES = {
    Queue.H2D: Cause.FETCH,
    Queue.D2H: Cause.MEMORY,
    Queue.DISK_R: Cause.DISK,
    Queue.DISK_W: Cause.DISK,
    Queue.COLL: Cause.COLLECTIVE,
    Queue.CPU: Cause.HOST_STEP,
}
_LABELS = {
    Cause.FETCH: "a fetch",
    Cause.HOST_STEP: "a step on the host",
    Cause.DISK: "the disk",
    Cause.MEMORY: "memory to become free",
    Cause.COLLECTIVE: "a collective",
    Cause.LAUNCH: "the launching thread",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The seconds that the device worked, and was idle by cause, in one or several training steps."""

    steps: int
    seconds: float
    """Seconds from the first moment of the first step to the first moment after the last one."""
    busy_s: float
    idle_s: dict[Cause, float]
    """Seconds by cause; with ``busy_s`` they add up to all seconds."""

    @property
    def idle_share(self) -> float:
        """Return the fraction of the time that the device was idle."""
        return sum(self.idle_s.values()) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.steps} step{'s' * (self.steps != 1)} in {self.seconds:.4g} s: the device worked for "
            f"{self.busy_s:.4g} s, and was idle {self.idle_share:.1%} of the time, waiting for"
        ]
        lines += [f"  {_LABELS[cause]:<22} {seconds:.4g} s" for cause, seconds in self.idle_s.items()]
        return "\n".join(lines)


def step_window(pieces: Sequence[Piece], first: int, end: int) -> tuple[float, float]:
    """Return when step ``first``'s first moment begins, and when step ``end``'s does, or when everything is over."""
    begins: dict[int, float] = {}
    for piece in pieces:
        if piece.queue is Queue.COMPUTE:
            begins.setdefault(piece.step, piece.begin_s)
    over = max((piece.end_s for piece in pieces), default=0.0)
    return begins.get(first, over), begins.get(end, over)


def step_times(
    pieces: Sequence[Piece], segments: Sequence[Segment | None], homes: int, begin_s: float, end_s: float, steps: int
) -> StepTimes:
    """Return what the compute queue did from ``begin_s`` to ``end_s``; see [Note: causes of idle time].

    ``segments``: of the plan, by `Piece.run`. ``homes``: the number of the plan's home slots.
    """
    before = _Before(pieces, segments, homes)
    idle = dict.fromkeys(Cause, 0.0)
    busy, reached = 0.0, begin_s
    for piece in (*(each for each in pieces if each.queue is Queue.COMPUTE), None):
        until = end_s if piece is None else min(piece.begin_s, end_s)
        for cause, seconds in _causes(before, piece, reached, until):
            idle[cause] += seconds
        if piece is not None:
            busy += max(0.0, min(piece.end_s, end_s) - max(piece.begin_s, begin_s))
            reached = max(reached, min(piece.end_s, end_s))
    return StepTimes(steps=steps, seconds=end_s - begin_s, busy_s=busy, idle_s=idle)


def _causes(before: _Before, piece: Piece | None, reached: float, until: float) -> Iterator[tuple[Cause, float]]:
    """Yield what delays a piece (None: the end of all) from the time reached until it begins."""
    of_host = False
    while until > reached:
        last = before.last(piece, until)
        end = reached if last is None else max(reached, min(last.end_s, until))
        yield Cause.LAUNCH, until - end
        if last is None or end <= reached:
            return
        begin = max(reached, last.begin_s)
        of_host = of_host or last.queue is Queue.CPU
        yield Cause.HOST_STEP if of_host and last.queue is Queue.D2H else _CAUSES[last.queue], end - begin
        piece, until = last, begin


class _Before:
    """Find the pieces of work that each piece has to wait for."""

    def __init__(self, pieces: Sequence[Piece], segments: Sequence[Segment | None], homes: int) -> None:
        self._segments = segments
        self._tables: dict[int, list[dict[Queue, int]]] = {}
        others = sorted((each for each in pieces if each.queue is not Queue.COMPUTE), key=lambda each: each.end_s)
        self._by_end = others, [each.end_s for each in others]
        self._of = {(piece.run, id(piece.instr)): piece for piece in pieces if piece.instr is not None}
        self._works: dict[int, list[Piece]] = {}
        """For each copy, the processor's last earlier work on each of its slots."""
        self._joined: dict[int, dict[Queue, Piece]] = {}
        """For each run, the last earlier piece of each queue."""
        touched: dict[tuple[int, int], Piece] = {}
        latest: dict[Queue, Piece] = {}
        for piece in pieces:
            if piece.run not in self._joined:
                self._joined[piece.run] = dict(latest)
            latest[piece.queue] = piece
            if piece.instr is not None:
                slots = [(-1 if slot < homes else piece.run, slot) for slot in slots_of(piece.instr.op)]
                if piece.queue is Queue.CPU:
                    touched.update(dict.fromkeys(slots, piece))
                elif isinstance(piece.instr.op, Copy):
                    self._works[id(piece)] = [touched[slot] for slot in slots if slot in touched]

    def last(self, piece: Piece | None, until: float) -> Piece | None:
        """Return the predecessor of a piece that ends last, if not on COMPUTE; the piece begins at ``until`` or
        later.
        """
        segment = None if piece is None or piece.run < 0 else self._segments[piece.run]
        if piece is None or segment is None or not self._is_in(segment, piece):
            pieces, ends = self._by_end
            place = bisect_right(ends, until) - 1
            while place >= 0 and pieces[place].begin_s >= until:
                place -= 1
            return pieces[place] if place >= 0 else None
        found = [
            each
            for each in self._planned(piece, segment)
            if each.queue is not Queue.COMPUTE and (each.begin_s < until or each.end_s <= until)
        ]
        return max(found, key=lambda each: (each.end_s, each.begin_s), default=None)

    def _planned(self, piece: Piece, segment: Segment) -> Iterator[Piece]:
        assert piece.instr is not None, "it follows a plan"
        yield from self._works.get(id(piece), ())
        for number in self._table(segment)[piece.instr.id].values():
            other = self._of.get((piece.run, id(segment.instrs[number])))
            if other is not None:
                yield other
        for queue, other in self._joined[piece.run].items():
            if queue is not Queue.CPU or segment.name is SegmentName.STEP:
                yield other

    def _is_in(self, segment: Segment, piece: Piece) -> bool:
        """Return False for a step within backward, whose instruction is the step segment's."""
        instr = piece.instr
        return instr is not None and instr.id < len(segment.instrs) and segment.instrs[instr.id] is instr

    def _table(self, segment: Segment) -> list[dict[Queue, int]]:
        """Return, for each instruction, the last one of each queue that takes time and must be over before."""
        known = self._tables.get(id(segment))
        if known is not None:
            return known
        table: list[dict[Queue, int]] = []
        latest: dict[Queue, int] = {}
        for instr in segment.instrs:
            own: dict[Queue, int] = {}
            for earlier in (*instr.after, *([latest[instr.queue]] if instr.queue in latest else [])):
                other = segment.instrs[earlier]
                takes_time = not isinstance(other.op, NOTES)
                for queue, number in ({other.queue: earlier} if takes_time else table[earlier]).items():
                    own[queue] = max(number, own.get(queue, -1))
            table.append(own)
            latest[instr.queue] = instr.id
        self._tables[id(segment)] = table
        return table

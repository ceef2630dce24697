"""Time a segment on an emulated accelerator: one thread does everything, moment by moment.

[Note: one thread]
The thread goes from moment to moment as the engine does. Before each it issues whatever it may: an instruction whose
predecessors all were issued, in order on its queue. What it launches on a queue runs there by itself, once the queue is
free and all predecessors are over. What it does itself it begins once all predecessors are over, and launches nothing
else meanwhile. Where a segment begins, all that was launched before is over.

The thread does everything but the transfer over links. A copy takes it as long as the bytes take in memory.
"""

from __future__ import annotations

from ps_core._errors import PlanMismatch
from ps_core._plan import Instr, Queue, Run, Segment, Step

LINKS = frozenset({Queue.H2D, Queue.D2H, Queue.DISK_R, Queue.DISK_W})
"""Queues on which the thread of an emulated accelerator launches."""


def play(segment: Segment, seconds: list[float], thread_s: list[float]) -> tuple[list[float], float]:
    """Run a segment; return when each of its instructions ends, and when the thread and every queue are done.

    ``seconds``: of a copy over its link; ``thread_s``: what the thread takes to launch it, or to do it; see [Note: one
    thread].
    """
    walk = _Walk(segment, seconds, thread_s)
    while walk.sweep() or walk.next_moment():
        pass
    return walk.finished()


class _Walk:
    """Walk through one segment."""

    def __init__(self, segment: Segment, seconds: list[float], thread_s: list[float]) -> None:
        self._now = 0.0
        self._name, self._instrs = segment.name.value, segment.instrs
        self._seconds, self._thread_s, self._free = seconds, thread_s, [0.0] * len(Queue)
        self._lines: dict[Queue, list[int]] = {queue: [] for queue in Queue}
        for place, instr in enumerate(segment.instrs):
            self._lines[instr.queue].append(place)
        self._at = dict.fromkeys(Queue, 0)
        self._ends: list[float | None] = [None] * len(segment.instrs)

    def sweep(self) -> bool:
        """Go once through all queues; return True if anything was issued."""
        moved = False
        for queue, line in self._lines.items():
            while self._at[queue] < len(line):
                place = line[self._at[queue]]
                instr = self._instrs[place]
                if isinstance(instr.op, Run) or not self._ready(instr):
                    break
                self._issue(place, instr)
                moved = True
                if queue is Queue.CPU or isinstance(instr.op, Step):
                    break  # this took time: first issue copies that wait for it
        return moved

    def next_moment(self) -> bool:
        """Run the next moment; return True if one could run."""
        line, at = self._lines[Queue.COMPUTE], self._at[Queue.COMPUTE]
        if at == len(line) or not self._ready(self._instrs[line[at]]):
            return False
        self._issue(line[at], self._instrs[line[at]])
        return True

    def finished(self) -> tuple[list[float], float]:
        """Return the ends, and when everything is done; every instruction must have one."""
        ends = [end for end in self._ends if end is not None]
        if len(ends) < len(self._ends):
            raise PlanMismatch(f"segment {self._name!r}: an instruction waits for one that never comes")
        return ends, max(self._now, *self._free)

    def _ready(self, instr: Instr) -> bool:
        return all(self._ends[earlier] is not None for earlier in instr.after)

    def _issue(self, place: int, instr: Instr) -> None:
        queue = instr.queue
        after = max((end for earlier in instr.after if (end := self._ends[earlier]) is not None), default=0.0)
        if queue in LINKS:
            end = max(self._free[queue], after, self._now) + self._seconds[place]
            self._now += self._thread_s[place]
        else:
            end = self._now = max(self._now, after) + self._thread_s[place]
        self._free[queue] = max(self._free[queue], end)
        self._ends[place] = end
        self._at[queue] += 1

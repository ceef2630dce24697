"""Record when each queue works, by the timer's marks before and behind each piece of work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ps_core._extents import Extent, SegmentName
from ps_core._plan import Instr, Queue, Step
from ps_core._simulate.work_pieces import NOTES, Piece, Work, WorkNames, name_of_copy
from ps_core.engine._devices.device import Mark
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._memory.tier_store import TierStore

T = TypeVar("T")


class Run(NamedTuple):
    """A segment of a plan that was carried out."""

    plan: EnginePlan
    name: SegmentName
    step: int
    """Number of optimizer steps that had ended before."""
    follows: bool
    """True if it directly followed the run before, by the same plan."""


@dataclass(slots=True, eq=False)
class _Row:
    """A piece of work and its marks."""

    queue: Queue
    what: Instr | Extent | str
    bytes: int
    step: int
    run: int
    begin: Mark
    end: Mark | None = None
    """The mark behind the work; None: the work is not over, or an exception prevented its launch."""


class Recorder:
    """Implement `WorkRecorder` for one model. Collectives are recorded on their thread, all else on the training
    thread.
    """

    def __init__(self, store: TierStore) -> None:
        self._timer = store.device.timer()
        self._worker = None if store.synchronous else store.device.worker
        self._rows: list[_Row] = []
        self._open: set[Queue] = set()
        """Queues on which a piece of work is being launched."""
        self._moment: _Row | None = None
        self._moments: Iterator[Instr] = iter(())
        """Moments of the plan's segment that are still to come."""
        self._run = -1
        self._interrupted = True
        """True if a moment followed no plan since the last segment."""
        self._early: set[int] = set()
        """Groups that were stepped within backward, by the plan's numbers."""
        self.runs: list[Run] = []
        """The segments of plans that were carried out."""
        self.steps = 0
        """Number of optimizer steps that have ended."""

    # What the engine calls; see `WorkRecorder`.

    def record(self, queue: Queue, what: Instr | Extent | str, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Call ``work`` and record it, unless it is within other work of the queue or takes no time."""
        if queue in self._open or (isinstance(what, Instr) and self._is_nothing(what)):
            return work()
        on_worker = queue is Queue.CPU and self._worker is not None and isinstance(what, Instr)
        begin = self._timer.mark_worker() if on_worker else self._timer.mark(queue)
        row = _Row(queue, what, size_bytes, self.steps, self._run if isinstance(what, Instr) else -1, begin)
        self._rows.append(row)
        self._open.add(queue)
        try:
            result = work()
        finally:
            self._open.remove(queue)
        row.end = self._timer.mark_worker() if on_worker else self._timer.mark(queue)
        return result

    def _is_nothing(self, instr: Instr) -> bool:
        """Return True if the instruction takes no time, was stepped within backward, or its plan is not known.

        For a pass that began before the block, the plan is not known.
        """
        op = instr.op
        if self._run < 0:
            return True
        if isinstance(op, Step):
            if self.runs[self._run].name is SegmentName.STEP:
                return op.group in self._early
            self._early.add(op.group)
        return isinstance(op, NOTES)

    def begin_moment(self, name: str) -> None:
        """Record that the compute queue begins a moment: the plan's next one if a plan is followed."""
        if self._moment is not None:
            return
        self._interrupted = self._interrupted or self._run < 0
        instr = next(self._moments) if self._run >= 0 else None
        self._moment = _Row(Queue.COMPUTE, instr or name, 0, self.steps, self._run, self._timer.mark(Queue.COMPUTE))
        self._rows.append(self._moment)
        self._open.add(Queue.COMPUTE)

    def end_moment(self) -> None:
        """Record that the moment ends, if one is open."""
        moment, self._moment = self._moment, None
        if moment is not None:
            self._open.discard(Queue.COMPUTE)
            moment.end = self._timer.mark(Queue.COMPUTE)

    def follow(self, plan: EnginePlan, segment: SegmentName) -> None:
        """Note that a segment of a plan begins."""
        follows = not self._interrupted and self.runs[-1].plan is plan
        self.runs.append(Run(plan, segment, self.steps, follows))
        self._run, self._interrupted = len(self.runs) - 1, False
        self._moments = iter([moment.instr for moment in plan.segments[segment].moments])

    def leave_plan(self) -> None:
        """Note that the segment is over."""
        self._run = -1

    def stepped(self) -> None:
        """Note that an optimizer step ended."""
        self.steps += 1
        self._early.clear()

    # Afterwards.

    def pieces(self, groups: Sequence[str]) -> list[Piece]:
        """Return what was recorded, in order of launch; the device is idle. The first piece begins at 0.

        ``groups``: the names of groups, by the engine's numbers.
        """
        self._timer.finish()
        words: dict[int, WorkNames] = {}
        reached: defaultdict[Queue, float] = defaultdict(lambda: -math.inf)
        found = []
        for row in self._rows:
            begin, end = row.begin(), math.nan if row.end is None else row.end()
            if math.isnan(begin) or math.isnan(end):
                continue
            # Clocks are read one after the other, so times are only as exact as that.
            begin = max(begin, reached[row.queue])
            end = reached[row.queue] = max(begin, end)
            found.append((row, begin, end))
        origin = min((begin for _, begin, _ in found), default=0.0)
        return [
            Piece(
                queue=row.queue,
                **self._work(row, groups, words)._asdict(),
                begin_s=begin - origin,
                end_s=end - origin,
                step=row.step,
                run=row.run,
                instr=row.what if isinstance(row.what, Instr) else None,
            )
            for row, begin, end in found
        ]

    def _work(self, row: _Row, groups: Sequence[str], words: dict[int, WorkNames]) -> Work:
        """Return the kind of work and the names that a row is about."""
        what = row.what
        if isinstance(what, Instr):
            plan, segment = self.runs[row.run].plan, self.runs[row.run].name
            known = words.get(id(plan))
            if known is None:
                known = words[id(plan)] = WorkNames(plan.program, plan.plan)
            return known.of(what, segment)
        if isinstance(what, Extent):
            group = groups[what.index]
            return Work(name_of_copy(row.queue, group, what.kind), group, row.bytes)
        return Work(what, "", row.bytes)

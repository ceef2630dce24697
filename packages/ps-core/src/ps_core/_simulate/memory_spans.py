"""Find which ranges of memory a segment touches, and its most bytes on each tier; see [Note: the clock]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ps_core._errors import PlanMismatch
from ps_core._plan import Instr, Plan, Queue, Release, Reserve, Run, Segment, Shift, slots_of


class Span(NamedTuple):
    """A range of one tier's addresses."""

    tier: int
    start: int
    end: int


class Scan:
    """What a segment touches: ranges to wait for at entry, ranges to leave, and the most bytes in use."""

    def __init__(self, plan: Plan, segment: Segment) -> None:
        self.joins: dict[int, list[Span]] = {}
        self.leaves: dict[Span, dict[Queue, int]] = {}
        ops = [instr.op for instr in segment.instrs]
        self._passing = {op.slot for op in ops if isinstance(op, Reserve)}
        self._passing &= {op.slot for op in ops if isinstance(op, Release)}
        self._where = {
            slot: Span(held.tier, held.offset, held.offset + held.bytes) for slot, held in enumerate(plan.home)
        }
        self._used = [0] * len(plan.tiers)
        for held in plan.home:
            self._used[held.tier] += held.bytes
        self.peaks = list(self._used)
        self._capacity = plan.tiers[0].capacity_bytes
        self._runs = [(place, instr.op) for place, instr in enumerate(segment.instrs) if isinstance(instr.op, Run)]
        try:
            self._walk(segment.instrs)
        except (KeyError, IndexError) as error:
            raise PlanMismatch(f"segment {segment.name.value!r} names a slot or tier that is not there") from error
        self._leave_nonmodel()

    def _walk(self, instrs: tuple[Instr, ...]) -> None:
        passing, where = self._passing, self._where
        ahead = [run.nonmodel_bytes for _, run in self._runs]
        highest, nonmodel, ran = 0, 0, 0
        for place, instr in enumerate(instrs):
            op = instr.op
            if isinstance(op, Reserve):
                self._reserve(place, instr.queue, op, nonmodel)
            elif isinstance(op, Release):
                self._release(place, instr.queue, op)
            elif isinstance(op, Shift):
                self._shift(place, instr.queue, op)
            else:
                for slot in slots_of(op):
                    if slot not in passing:
                        self._touch(where[slot], place, instr.queue)
                if isinstance(op, Run):
                    if op.nonmodel_bytes > highest:
                        highest = op.nonmodel_bytes
                        self.joins.setdefault(place, []).append(self._nonmodel_range(highest))
                    self.peaks[0] = max(self.peaks[0], self._used[0] + op.nonmodel_bytes)
                    ran += 1
                    nonmodel = min(op.nonmodel_bytes, ahead[ran]) if ran < len(ahead) else 0

    def _nonmodel_range(self, count: int) -> Span:
        return Span(0, self._capacity - count, self._capacity)

    def _touch(self, span: Span, place: int, queue: Queue) -> None:
        last = self.leaves.setdefault(span, {})
        if queue not in last:
            self.joins.setdefault(place, []).append(span)
        last[queue] = place

    def _reserve(self, place: int, queue: Queue, op: Reserve, nonmodel: int) -> None:
        span = self._where[op.slot] = Span(op.tier, op.offset, op.offset + op.bytes)
        last = self.leaves.setdefault(span, {})
        if not last:
            self.joins[place] = [span]
        last[queue] = place
        used = self._used[op.tier] = self._used[op.tier] + op.bytes
        self.peaks[op.tier] = max(self.peaks[op.tier], used + (0 if op.tier else nonmodel))

    def _release(self, place: int, queue: Queue, op: Release) -> None:
        span = self._where[op.slot]
        if op.slot not in self._passing:
            self._touch(span, place, queue)
        self.leaves[span][queue] = place
        self._used[span.tier] -= span.end - span.start

    def _shift(self, place: int, queue: Queue, op: Shift) -> None:
        old = self._where[op.slot]
        new = self._where[op.slot] = Span(old.tier, op.offset, op.offset + old.end - old.start)
        self._touch(old, place, queue)
        self._touch(new, place, queue)

    def _leave_nonmodel(self) -> None:
        covered = 0
        for place, run in reversed(self._runs):
            if run.nonmodel_bytes > covered:
                covered = run.nonmodel_bytes
                self.leaves.setdefault(self._nonmodel_range(covered), {})[Queue.COMPUTE] = place


class Cells:
    """The addresses of every tier, cut wherever any range begins or ends."""

    def __init__(self, plan: Plan, scans: Iterable[Scan]) -> None:
        cuts: list[set[int]] = [set() for _ in plan.tiers]
        for scan in scans:
            for span in scan.leaves:
                cuts[span.tier].update((span.start, span.end))
            for spans in scan.joins.values():
                for span in spans:
                    cuts[span.tier].update((span.start, span.end))
        self._index = [{offset: number for number, offset in enumerate(sorted(row))} for row in cuts]
        self.counts = [len(row) for row in cuts]

    def of(self, span: Span) -> tuple[int, int, int]:
        """Return the tier, the first cell and the end cell of a range."""
        index = self._index[span.tier]
        return span.tier, index[span.start], index[span.end]

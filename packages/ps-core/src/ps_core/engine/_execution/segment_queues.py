"""Store one segment of a plan by queue, and choose the order in which its instructions are issued.

[Note: issuing]
An instruction is issued as soon as all it waits for was issued. It is put on its queue's stream, behind the events on
other queues that it waits for. So moves are issued as early as the plan allows, for any moment. A moment is different:
it is issued when the model begins it, and is over when the next one begins. Work of the CPU's queue is done by a thread
of its own, where there is one. Otherwise the host thread does it in order.

So the plan alone says what is issued before which moment. This is worked out once, unless there are other threads (for
the disk, or for the CPU's queue). Then it depends on what these have done by then. A stream cannot wait for a thread,
so the host thread would have to wait. It skips such an instruction until a moment needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ps_core._errors import PlanMismatch
from ps_core._extents import SegmentName
from ps_core._plan import Instr, Queue, Run, Step
from ps_core.engine._parameters.param_state import ParamGroup


class SlotUse(NamedTuple):
    """A planned moment's use of one slot of the compute tier."""

    group: ParamGroup
    slot: int
    """The slot's number in the plan."""
    holds_weight: bool
    """True if the slot holds the weight; False: it is for gradients only."""
    read: bool
    """True: the slot must hold the newest contents. False: what the slot holds is written over."""
    gains: bool
    """True: gradients are written to the slot in this moment, or before it."""


@dataclass(frozen=True, slots=True)
class PlannedMoment:
    """One moment of a segment, with all that can be known before it begins."""

    instr: Instr
    visit: int
    """The moment's number in the recorded pass."""
    name: str
    reads: frozenset[int]
    """Groups that the moment may read, by the engine's numbers."""
    gains: frozenset[int]
    """Groups that may get gradients, by the engine's numbers."""
    uses: tuple[SlotUse, ...]
    activations: tuple[tuple[str, int], ...]
    """Offloaded activations that are made or taken back here: their names, and the plan's numbers of their slots."""
    nonmodel_bytes: int


@dataclass(frozen=True)
class SegmentQueues:
    """One segment, ready to be issued."""

    name: SegmentName
    by_queue: dict[Queue, tuple[Instr, ...]]
    moments: tuple[PlannedMoment, ...]
    waits: dict[int, tuple[int, ...]]
    """Instructions on other queues that each instruction's queue has to wait for, if there are any."""
    recorded: frozenset[int]
    """Instructions that another queue waits for, so that an event is recorded behind each."""
    count: int
    lends_homes: bool
    """True if home slots are released within the segment; see `_execution.lent_home_slots`."""
    early: Mapping[int, tuple[Instr, ...]]
    """Steps that are made behind each instruction, while backward goes on."""
    prefetch: int | None
    """The most moments that groups are fetched ahead."""

    @cached_property
    def batches(self) -> tuple[tuple[Instr, ...], ...]:
        """Return the instructions to issue before each moment and at the end, if no wait delays any of them."""
        order = IssueOrder(self, lambda instr: False)
        return tuple([tuple(order.before(moment)) for moment in (*self.moments, None)])


class IssueOrder:
    """Issue each instruction as soon as all it waits for was issued; see [Note: issuing]."""

    def __init__(self, segment: SegmentQueues, blocks: Callable[[Instr], bool]) -> None:
        """Start; ``blocks``: True if the host thread would have to wait for a thread before issuing an instruction."""
        self._segment, self._blocks = segment, blocks
        self._at = dict.fromkeys(Queue, 0)
        self._done: set[int] = set()
        self._running: PlannedMoment | None = None
        self._visit = -1

    def before(self, moment: PlannedMoment | None) -> Iterator[Instr]:
        """Yield the instructions to issue before a moment begins, or until the segment ends (None)."""
        if self._running is not None:
            self._done.add(self._running.instr.id)
        self._running = moment
        self._visit = self._visit if moment is None else moment.visit
        while True:
            moved = False
            for instr in self._take_ready(patient=False):
                moved = True
                yield instr
            if not moved and (moment is None or not self._is_next(moment)):
                for instr in self._take_ready(patient=True):
                    moved = True
                    yield instr
            if not moved:
                break
        if moment is not None:
            if not self._is_next(moment):
                raise self._stuck(f"moment {moment.visit} waits for something that does not come")
            self._at[Queue.COMPUTE] += 1
        elif len(self._done) < self._segment.count:
            raise self._stuck(f"{self._segment.count - len(self._done)} instructions never come")

    def _take_ready(self, *, patient: bool) -> Iterator[Instr]:
        """Go once through all queues. If ``patient``, yield one instruction, even if it must wait for a thread."""
        for queue, line in self._segment.by_queue.items():
            while self._at[queue] < len(line) and self._may_issue(line[self._at[queue]], patient=patient):
                instr = line[self._at[queue]]
                yield instr
                self._at[queue] += 1
                self._done.add(instr.id)
                if patient:
                    return
                if queue is Queue.CPU or (queue is Queue.COMPUTE and isinstance(instr.op, Step)):
                    break  # this took time: first issue copies that wait for it

    def _may_issue(self, instr: Instr, *, patient: bool) -> bool:
        if isinstance(instr.op, Run) or not self._done.issuperset(instr.after):
            return False
        if not patient and self._blocks(instr):
            return False
        prefetch = self._segment.prefetch
        if prefetch is None or instr.queue not in (Queue.H2D, Queue.DISK_R) or not self._segment.moments:
            return True
        return instr.visit <= self._visit + prefetch

    def _is_next(self, moment: PlannedMoment) -> bool:
        line, at = self._segment.by_queue[Queue.COMPUTE], self._at[Queue.COMPUTE]
        return at < len(line) and line[at] is moment.instr and self._done.issuperset(moment.instr.after)

    def _stuck(self, why: str) -> PlanMismatch:
        return PlanMismatch(f"{self._segment.name.value}: {why}")

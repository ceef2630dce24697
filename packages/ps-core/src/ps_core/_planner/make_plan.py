"""Walk through each segment and decide which extents are copied where, in which order.

[Note: steps within backward, by the plan]
Where a step depends on its group's own gradient alone, the group may be stepped within backward. Steps of the processor
stay in the step segment, and the engine begins them earlier (`_simulate.steps_in_backward`). Steps on the compute tier
are planned here, in the pass. Once a group's gradient is complete, its optimizer states are fetched. It is stepped
after one more moment, which hides these copies. If there is no room for other extents, it is stepped sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from ps_core._extents import Extent, Kind, SegmentName, Use
from ps_core._plan import (
    Accumulate,
    Decide,
    Gather,
    Norm,
    Plan,
    Queue,
    ReduceScatter,
    Run,
    Segment,
    link,
    worker,
)
from ps_core._planner.placement import work_tier
from ps_core._planner.segment_walker import Walker, assemble
from ps_core._planner.tier_division import Frame, NoRoom
from ps_core._planner.updates import Updates
from ps_core._program import Program, Visit

_MOMENTS_LATER = 2
"""A group whose gradient is complete after moment n is stepped before moment n + 2: n + 1 hides its copies."""


def make_plan(frame: Frame, only: Iterable[SegmentName] | None = None) -> Plan:
    """Plan every segment of the frame's program, or some; raise `NoRoom` if the placement leaves too little."""
    wanted = frame.program.segments if only is None else tuple(only)
    return assemble(frame, [make_segment(frame, name) for name in wanted])


def make_segment(frame: Frame, name: SegmentName) -> Segment:
    """Plan one segment."""
    if name.is_micro or name is SegmentName.EVAL:
        return _Moments(frame, name).walk()
    return Updates(frame, name).walk()


def _next_uses(program: Program, name: SegmentName) -> dict[Extent, Sequence[int]]:
    """Map extents to the moments that need each on the compute tier; a shard is needed with its gathered group."""
    uses: dict[Extent, list[int]] = {}
    for visit in program.segment_visits(name):
        for use in program.uses(name, visit):
            uses.setdefault(use.extent, []).append(visit.index)
            if use.extent.kind is Kind.FULL:
                weight = Extent(program.weight_of(use.extent.index), use.extent.index)
                uses.setdefault(weight, []).append(visit.index)
    return dict(uses)


class _Moments(Walker):
    """Plan a micro-batch, or an evaluation."""

    def __init__(self, frame: Frame, name: SegmentName) -> None:
        super().__init__(frame, name, _next_uses(frame.program, name))
        self._seq = 0
        self._norms: list[tuple[int, int]] = []
        self._steps_to_make: deque[tuple[int, int]] = deque()
        """Moments before which groups are stepped, each with the group; their states are fetched already."""

    def walk(self) -> Segment:
        visits = self.program.segment_visits(self.segment)
        ahead: list[tuple[Extent, int]] = []
        for place, visit in enumerate(visits):
            while self._steps_to_make and self._steps_to_make[0][0] <= visit.index:
                self._step_next()
            self._begin(visit)
            pins = self._run(visit)
            for pin in ahead:
                self.unpin(pin)
            self._measure()
            ahead = self._gather_ahead(visits[place + 1]) if self.frame.deep and place + 1 < len(visits) else []
            if self.segment.is_micro:
                self._leave(visit)
            for pin in pins:
                self.unpin(pin)
        while self._steps_to_make:
            self._step_next()
        if self.segment is SegmentName.MICRO_LAST:
            self._measure()
            self.emit(Queue.COLL, Decide(self._seq), also=self._norm_ids)
        return self.finish()

    # One moment.

    def _begin(self, visit: Visit) -> None:
        """Advance to the moment: what it uses will next be needed later."""
        self.now = visit.index
        for use in self.program.uses(self.segment, visit):
            for extent in self._meant(use.extent):
                self.stir(extent)

    def _meant(self, extent: Extent) -> tuple[Extent, ...]:
        """Return the extents used with this one: a gathered group's shard counts too."""
        if extent.kind is not Kind.FULL:
            return (extent,)
        return extent, Extent(self.program.weight_of(extent.index), extent.index)

    def _run(self, visit: Visit) -> list[tuple[Extent, int]]:
        uses = self.program.uses(self.segment, visit)
        pins = [(use.extent, 0) for use in uses if self.holding(use.extent)[:1] == [0]]
        for pin in pins:
            self.pin(pin)
        in_pieces = False
        try:
            self._make_ready(uses, pins)
        except NoRoom as refusal:
            in_pieces = not (refusal.tier or self.program.sharded or len(self.frame.tiers) == 1)
            if not in_pieces:
                raise
        if in_pieces:  # here, so that no error refers to another; see [Note: what an exception holds]
            self._pack(uses, pins)
        slots = [self.slot(use.extent, 0) for use in uses]
        written = [use for use in uses if use.before != use.after]
        changed = [self.slot(use.extent, 0) for use in written]
        steady = [slot for slot in slots if slot not in changed]
        self.emit(Queue.COMPUTE, Run(visit.index, tuple(slots), visit.nonmodel_bytes), reads=steady, writes=changed)
        for use in written:
            self.wrote(use.extent, 0, use.after)
        return pins

    def _make_ready(self, uses: Iterable[Use], pins: list[tuple[Extent, int]]) -> None:
        """Bring the extents that a moment uses to the compute tier, and pin them."""
        for use in uses:
            if use.before is None:
                self.room(use.extent, 0, Queue.COMPUTE)
            else:
                self._ready(use.extent)
            self.pin((use.extent, 0))
            pins.append((use.extent, 0))
            for extent in self._meant(use.extent):
                self.ranker.used(extent)
                self.stir(extent)

    def _pack(self, uses: Sequence[Use], pins: list[tuple[Extent, int]]) -> None:
        """Put the extents that a moment uses next to each other, for there was no room left in one piece.

        Copies that are there already are evicted and fetched again, except those that may not move.
        """
        while pins:
            self.unpin(pins.pop())
        tiers = self.frame.tiers
        for use in uses:
            row = self.residents.get(use.extent, {}).get(0)
            if row is None or row.piece is None:
                continue
            if use.held:
                self.pin((use.extent, 0))
                pins.append((use.extent, 0))
            else:
                self.evict(use.extent, 0, link(tiers[1].name, tiers[0].name))
        with self.packed():
            self._make_ready(sorted(uses, key=lambda use: -self.program.bytes_of(use.extent)), pins)

    def _ready(self, extent: Extent) -> int:
        """Return the slot of the extent on the compute tier; gather it if it is a gathered group."""
        if extent.kind is not Kind.FULL or 0 in self.holding(extent):
            return self.at(extent, 0)
        weight = Extent(self.program.weight_of(extent.index), extent.index)
        shard = self.at(weight, 0)
        with self.pinned([(weight, 0)]):
            full = self.room(extent, 0, Queue.COLL)
        self.emit(Queue.COLL, Gather(extent.index, shard, full, self._next()), reads=(shard,), writes=(full,))
        self.wrote(extent, 0, 0)
        return full

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _gather_ahead(self, visit: Visit) -> list[tuple[Extent, int]]:
        """Gather for the next moment now: later it would wait behind this one's reduce-scatter."""
        pins = []
        for use in self.program.uses(self.segment, visit):
            if use.extent.kind is Kind.FULL and use.before is not None:
                try:
                    self._ready(use.extent)
                except NoRoom:
                    break
                pins.append((use.extent, 0))
                self.pin((use.extent, 0))
        return pins

    # Extents that a moment is the last to need.

    def _leave(self, visit: Visit) -> None:
        for group in self.program.completions[visit.index]:
            self._complete(group)
        for activation in visit.takes:
            if self.program.last_takes[activation] == visit.index:
                self.discard(Extent(Kind.ACT, activation))

    def _complete(self, group: int) -> None:
        program = self.program
        if program.overwritten(group):
            weight = Extent(program.weight_of(group), group)
            if program.sharded:
                self._reduce(group, Extent(program.gradient_of(group), group), weight)
            self._norms.append((group, self.slot(weight, 0)))
            if not program.sharded:
                self._measure()
            if group in self._stepped_here:
                self._prepare_step(group)
                return
            self.bring_home(weight)
            for tier in self.residents[weight]:
                self.abandon(weight, tier)
            return
        gradient = Extent(program.local_gradient, group)
        if program.sharded:
            self._reduce(group, Extent(Kind.GRAD, group), gradient)
        self._accumulate(group, gradient)

    def _reduce(self, group: int, source: Extent, target: Extent) -> None:
        origin = self.slot(source, 0)
        with self.pinned([(source, 0)]):
            shard = self.room(target, 0, Queue.COLL)
            with self.pinned([(target, 0)]):
                scratch = Extent(Kind.WIRE, group)
                wire = self.room(scratch, 0, Queue.COLL)
        op = ReduceScatter(group, origin, wire, shard, self._next())
        self.emit(Queue.COLL, op, reads=(origin,), writes=(wire, shard))
        self.wrote(target, 0, len(self.program.gradient_visits[group]))
        self.discard(source)
        self.discard(scratch)

    def _accumulate(self, group: int, gradient: Extent) -> None:
        total = Extent(Kind.ACC, group)
        tiers = self.frame.tiers
        early = group in self._stepped_here
        tier = 0 if early else work_tier(tiers, self.home_tier(total))
        first = self.program.accumulates_first(self.segment)
        source = self.at(gradient, tier)
        with self.pinned([(gradient, tier)]):
            queue = worker(tiers, tier)
            target = self.room(total, tier, queue) if first else self.at(total, tier)
        self.emit(queue, Accumulate(group, source, target, first), reads=(source,), writes=(target,))
        self.wrote(total, tier, 1 if first else 2)
        self.discard(gradient)
        if self.segment is SegmentName.MICRO_LAST:
            self.emit_norm(group, target, queue)
        if early:
            self._prepare_step(group)
        elif tier != self.home_tier(total):
            self.bring_home(total)

    # Steps within backward; see [Note: steps within backward, by the plan].

    @property
    def _stepped_here(self) -> frozenset[int]:
        """Return the groups that are stepped within this segment."""
        return self.early if self.segment is SegmentName.MICRO_LAST else frozenset()

    def _prepare_step(self, group: int) -> None:
        """Bring what a group's step needs to the compute tier; it is stepped after one more moment."""
        extents = [Extent(kind, group) for kind in self.program.home_kinds(group)]
        for extent in sorted(extents, key=lambda extent: 0 not in self.holding(extent)):  # or others would evict it
            self.at(extent, 0)
            self.pin((extent, 0))
        self._steps_to_make.append((self.now + _MOMENTS_LATER, group))

    def _step_next(self) -> None:
        """Step the group that waits longest; what is left of it on the compute tier may be evicted."""
        _, group = self._steps_to_make.popleft()
        self.step(group)
        for kind in self.program.home_kinds(group):
            extent = Extent(kind, group)
            self.unpin((extent, 0))
            if kind is not Kind.ACC and self.home_tier(extent):
                self.abandon(extent, 0)

    def free_room(self, tier: int) -> bool:
        if tier or not self._steps_to_make:
            return False
        self._step_next()
        return True

    # Norms. A reduced shard's is taken a moment later, so that the next moment need not wait for the reduction.

    def evict(self, extent: Extent, tier: int, queue: Queue) -> None:
        if any(slot == self.slot(extent, tier) for _, slot in self._norms):
            self._measure()
        super().evict(extent, tier, queue)

    @property
    def _norm_ids(self) -> list[int]:
        return [instr.id for instr in self.out.instrs if isinstance(instr.op, Norm)]

    def emit_norm(self, group: int, slot: int, queue: Queue) -> None:
        """Compute a group's sum of squares on the tier of its gradient."""
        self.emit(queue, Norm(group, slot), reads=(slot,))

    def _measure(self) -> None:
        for group, slot in self._norms:
            self.emit_norm(group, slot, Queue.COMPUTE)
        self._norms.clear()

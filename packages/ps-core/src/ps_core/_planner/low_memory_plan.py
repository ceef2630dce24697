"""Make a plan when memory is almost too small: slow, but found whenever memory exceeds the bound plus slack.

[Note: why the tight planner always finds a plan]
Every extent has one copy. Only one move runs at a time. So an arrangement is a place for each extent. Room on a tier is
made by moving extents to an adjacent tier with free bytes. Suppose that free bytes amount to one largest extent per
tier in total. Then some tier has a largest extent free: if each had less, together they would have less. Addresses
never prevent a move: a tier can be compacted, around what is still referenced (see [Note: ground] in `held_slots`).
Every move of an extent with a home can be undone. At a segment's end the homeless extents are gone. Then undoing all
moves, the last first, restores the home placement exactly. All instructions form one chain, so no order can go wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from ps_core._errors import DoesNotFit
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import (
    Accumulate,
    Cast,
    Decide,
    Gather,
    Held,
    Norm,
    Plan,
    Queue,
    ReduceScatter,
    Run,
    Segment,
    Step,
    Tier,
    worker,
)
from ps_core._planner.arrangement import Arrangement, Victims, failure
from ps_core._planner.bounds import in_order_of_sums
from ps_core._program import Program, Visit


def tight_plan(program: Program, tiers: tuple[Tier, ...], check: Callable[[Plan], None] | None = None) -> Plan:
    """Make a plan within little more than the lower bound; raise `DoesNotFit` (not proven) if even this fails.

    ``check`` is called with a plan that has at least a training step's segments. It raises if the others are not
    needed.
    """
    home = _pack(program, tiers)
    segments: list[Segment] = []
    for name in program.segments:
        segments.append(_segment(program, tiers, home, name))
        if check is not None and name is program.iteration()[-1]:
            check(Plan(tiers=tiers, home=home, segments=tuple(segments)))
    steps = [-1] * len(program.layout.groups)
    for instr in next((s.instrs for s in segments if s.name is SegmentName.STEP), ()):
        if isinstance(instr.op, Step):
            steps[instr.op.group] = 0 if instr.queue is Queue.COMPUTE else 1
    note = "memory is so short that extents move one at a time, without overlap"
    return Plan(tiers=tiers, home=home, segments=tuple(segments), step_tiers=tuple(steps), notes=(note,))


def _segment(program: Program, tiers: tuple[Tier, ...], home: tuple[Held, ...], name: SegmentName) -> Segment:
    """Return one segment, by the first order of eviction that succeeds."""
    refusals = []
    for victims in Victims:
        try:
            return _Chain(program, tiers, home, name, victims).walk()
        except DoesNotFit as error:
            refusals.append(error)
    try:
        raise refusals[0]
    finally:
        refusals.clear()  # see [Note: what an exception holds]


def _pack(program: Program, tiers: tuple[Tier, ...]) -> tuple[Held, ...]:
    """Place every extent with a home on the first tier that has room, the compute tier last."""
    ends = [0] * len(tiers)
    home = []
    for group in range(len(program.layout.groups)):
        for kind in program.home_kinds(group):
            extent = Extent(kind, group)
            size = program.bytes_of(extent)
            order = [*range(1, len(tiers)), 0]
            tier = next((tier for tier in order if ends[tier] + size <= tiers[tier].capacity_bytes), None)
            if tier is None:
                raise failure("all tiers together", "between segments", size, 0)
            home.append(Held(tier, ends[tier], size, extent))
            ends[tier] += size
    return tuple(home)


class _Chain(Arrangement):
    """Plan one segment, moment after moment."""

    def walk(self) -> Segment:
        """Plan the segment."""
        self._seq = 0
        for visit in self.program.segment_visits(self.segment):
            self.now, self.place = visit.index, visit.name
            self._moment(visit)
        self.now, self.place = -1, self.segment.value
        if self.segment is SegmentName.MICRO_LAST:
            self.emit(Queue.COLL, Decide(self._next()))
        if self.segment is SegmentName.STEP:
            self.nonmodel_bytes = 0
            for group in self.program.stepped:
                self._step(group)
        for group in self.program.casts(self.segment):
            self._cast(group)
        self.return_home()
        return Segment(self.segment, tuple(self.instrs))

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _moment(self, visit: Visit) -> None:
        uses = self.program.uses(self.segment, visit)
        self.pins = {use.extent for use in uses if self._here(use.extent)} | self._half_way()
        self.nonmodel_bytes = visit.nonmodel_bytes
        self.clear(0, 0)
        before = {use.extent: use.before for use in uses}
        for extent in self.holds.starting(visit.index):
            self._ready(extent, before.pop(extent))
            self.anchor(extent)
        for extent, version in before.items():
            self._ready(extent, version)
        self.clear(0, 0)
        if any(seat.offset + seat.bytes > self.limit(0) for _, seat in self.sitting(0)):
            self.compact(0)
        slots = tuple(self.seats[use.extent].slot for use in uses)
        self.emit(Queue.COMPUTE, Run(visit.index, slots, visit.nonmodel_bytes))
        for use in uses:
            self.versions[use.extent] = use.after
        self.fixed = self.holds.into(visit.index + 1)
        self._drop(visit, [use.extent for use in uses])
        if self.segment.is_micro:
            self.nonmodel_bytes = self.program.nonmodel_between(visit.index)
            self.pins = self._half_way() | self.fixed
            for group in in_order_of_sums(self.program, self.program.completions[visit.index]):
                self._complete(group)

    def _here(self, extent: Extent) -> bool:
        return extent in self.seats and self.seats[extent].tier == 0

    def _half_way(self) -> set[Extent]:
        """Return the gathered groups and gradients that have no other place."""
        return {extent for extent in self.seats if extent.kind in (Kind.FULL, Kind.GRAD)}

    def _ready(self, extent: Extent, before: int | None) -> None:
        if extent in self.homed:
            self.fetch(extent, 0)
        elif extent.kind is Kind.FULL and extent not in self.seats and before is not None:
            weight = Extent(self.program.weight_of(extent.index), extent.index)
            self.fetch(weight, 0)
            full = self.bear(extent, Queue.COLL)
            shard = self.seats[weight].slot
            self.emit(Queue.COLL, Gather(extent.index, shard, full, self._next()))
            self.versions[extent] = 0
            self.pins.discard(weight)
        elif extent in self.seats:
            self.fetch(extent, 0)
        else:
            self.bear(extent, Queue.COMPUTE)

    def _drop(self, visit: Visit, used: list[Extent]) -> None:
        for extent in used:
            if extent.kind is Kind.FULL and self.versions.get(extent) == 0 and extent not in self.fixed:
                self.bury(extent)
        for index in visit.takes if self.segment.is_micro else ():
            if self.program.last_takes[index] == visit.index:
                self.bury(Extent(Kind.ACT, index))

    def _complete(self, group: int) -> None:
        program = self.program
        count = len(program.gradient_visits[group])
        overwritten = program.overwritten(group)
        target = Extent(program.weight_of(group) if overwritten else program.local_gradient, group)
        if program.sharded:
            source, wire = Extent(program.gradient_of(group), group), Extent(Kind.WIRE, group)
            self.pins |= {source}
            if overwritten:
                self.fetch(target, 0)
            else:
                self.bear(target, Queue.COLL)
            self.bear(wire, Queue.COLL)
            origin, scratch, shard = (self.seats[extent].slot for extent in (source, wire, target))
            self.emit(Queue.COLL, ReduceScatter(group, origin, scratch, shard, self._next()))
            self.versions[target] = count
            self.bury(source)
            self.bury(wire)
        if overwritten:
            self.emit(worker(self.tiers, 0), Norm(group, self.fetch(target, 0)))
            self.pins.discard(target)
        else:
            self._accumulate(group, target)

    def _accumulate(self, group: int, gradient: Extent) -> None:
        total = Extent(Kind.ACC, group)
        tier = self._roomy((total, gradient))
        self.pins = self._half_way() | self.fixed
        for extent in (gradient, total):
            self.fetch(extent, tier)
        added, sums = (self.seats[extent].slot for extent in (gradient, total))
        queue = worker(self.tiers, tier)
        first = self.program.accumulates_first(self.segment)
        self.emit(queue, Accumulate(group, added, sums, first))
        self.versions[total] = 1 if first else 2
        if self.segment is SegmentName.MICRO_LAST:
            self.emit(queue, Norm(group, sums))
        self.bury(gradient)
        self.pins = self._half_way() | self.fixed

    def _roomy(self, extents: tuple[Extent, ...]) -> int:
        """Return the tier with a processor that holds the most of these extents, of those that can hold all."""
        need = sum(map(self.program.bytes_of, extents))
        work = [tier for tier, row in enumerate(self.tiers) if row.name != "disk"]
        loose = self._half_way() - self.fixed - set(extents)
        ground = max((self.seats[extent].offset + self.seats[extent].bytes for extent in self.fixed), default=0)
        stuck = ground + sum(self.seats[extent].bytes for extent in loose)

        def merit(tier: int) -> tuple[bool, bool, int]:
            room = self.limit(tier) - need - (stuck if tier == 0 else 0)
            there = sum(self.seats[extent].bytes for extent in extents if self.seats[extent].tier == tier)
            return room >= self.slack, room >= 0, there

        return max(work, key=merit)

    def _together(self, extents: tuple[Extent, ...]) -> tuple[int, tuple[int, ...]]:
        tier = self._roomy(extents)
        self.pins = set()
        for extent in extents:
            self.fetch(extent, tier)
        return tier, tuple(self.seats[extent].slot for extent in extents)

    def _step(self, group: int) -> None:
        extents = tuple(Extent(kind, group) for kind in self.program.home_kinds(group))
        tier, slots = self._together(extents)
        self.emit(worker(self.tiers, tier), Step(group, slots))
        for extent in extents:
            if extent.kind is Kind.ACC:
                self.versions.pop(extent)
            else:
                self.versions[extent] = self.program.rebuilt(group) if extent.kind is Kind.P16 else 1

    def _cast(self, group: int) -> None:
        master, weight = Extent(Kind.P32, group), Extent(Kind.P16, group)
        tier, slots = self._together((master, weight))
        self.emit(worker(self.tiers, tier), Cast(group, *slots))
        self.versions[weight] = self.program.rebuilt(group)

"""A plan for when memory is almost too small for one: slow, but found whenever the bound plus slack allows.

[Note: why the tight planner always finds a plan]
Every extent has one copy, and moves are exclusive, so an arrangement is just who sits where. Room on a tier is made by
moving victims to a neighbour that has some; with one largest extent free per tier in total, some tier always has
(were each short of a largest extent, together they would be short of what is free). Addresses never stand in the way:
a tier can be pushed together. Every move of an extent with a home can be undone, and once the homeless ones are dead
(at a segment's end) undoing all moves, last first, leads back to home exactly. All instructions form one chain, so
no order has to be thought about.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ps_core._errors import DoesNotFit
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Held,
    Instr,
    Norm,
    Op,
    Plan,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Segment,
    Shift,
    Step,
    Tier,
    link,
    worker,
)
from ps_core._planner.bounds import largest_extent_bytes
from ps_core._program import Extent, Kind, Program, SegmentName, Visit


def tight_plan(program: Program, tiers: tuple[Tier, ...]) -> Plan:
    """A plan that lives within little more than the lower bound; `DoesNotFit` (not proven) if even this fails."""
    home = _pack(program, tiers)
    segments = tuple(_Chain(program, tiers, home, name).walk() for name in program.segments)
    steps = [-1] * len(program.layout.groups)
    for instr in next((s.instrs for s in segments if s.name is SegmentName.STEP), ()):
        if isinstance(instr.op, Step):
            steps[instr.op.group] = 0 if instr.queue is Queue.COMPUTE else 1
    note = "memory is so short that extents move one at a time, without overlap"
    return Plan(tiers=tiers, home=home, segments=segments, step_tiers=tuple(steps), notes=(note,))


def _pack(program: Program, tiers: tuple[Tier, ...]) -> tuple[Held, ...]:
    """Every extent with a home on the first tier that has room, the compute tier last."""
    ends = [0] * len(tiers)
    home = []
    for group in range(len(program.layout.groups)):
        for kind in program.home_kinds(group):
            extent = Extent(kind, group)
            size = program.bytes_of(extent)
            order = [*range(1, len(tiers)), 0]
            tier = next((tier for tier in order if ends[tier] + size <= tiers[tier].capacity_bytes), None)
            if tier is None:
                raise _failure("all tiers together", "between segments", size, 0)
            home.append(Held(tier, ends[tier], size, extent))
            ends[tier] += size
    return tuple(home)


def _failure(tier: str, moment: str, needed: int, available: int) -> DoesNotFit:
    return DoesNotFit(tier=tier, moment=moment, needed_bytes=needed, available_bytes=available, proven=False)


@dataclass(slots=True)
class _Seat:
    """Where an extent sits."""

    slot: int
    tier: int
    offset: int
    bytes: int


class _Arrangement:
    """Who sits where, and the chain of instructions that changes it."""

    def __init__(self, program: Program, tiers: tuple[Tier, ...], home: tuple[Held, ...], name: SegmentName) -> None:
        self.program = program
        self.tiers = tiers
        self.segment = name
        self.instrs: list[Instr] = []
        self.versions = dict(program.entry(name))
        self.seats = {held.extent: _Seat(slot, held.tier, held.offset, held.bytes) for slot, held in enumerate(home)}
        self.homed = frozenset(self.seats)
        self.pins: set[Extent] = set()
        self.tide_bytes = 0
        self.now = -1
        self.place = "between segments"
        self._slack = largest_extent_bytes(program)
        self._slots = len(home)
        self._kept = (0, 0)
        self._log: list[tuple[Extent, int, int]] = []
        self._later = self._wanted()

    def _wanted(self) -> dict[Extent, list[int]]:
        later: dict[Extent, list[int]] = {}
        for visit in self.program.segment_visits(self.segment):
            for use in self.program.uses(self.segment, visit):
                later.setdefault(use.extent, []).append(visit.index)
        return later

    def emit(self, queue: Queue, op: Op) -> None:
        """Append to the chain."""
        number = len(self.instrs)
        linked = number > 0 and self.instrs[-1].queue is not queue
        self.instrs.append(Instr(number, queue, op, (number - 1,) if linked else (), self.now))

    def limit(self, tier: int) -> int:
        """Where a tier's addresses end for extents."""
        return (self.tiers[tier].capacity_bytes - (self.tide_bytes if tier == 0 else 0)) & -128

    def sitting(self, tier: int) -> list[tuple[Extent, _Seat]]:
        """Who sits on a tier, by address."""
        rows = [(extent, seat) for extent, seat in self.seats.items() if seat.tier == tier]
        return sorted(rows, key=lambda row: row[1].offset)

    def free(self, tier: int) -> int:
        """Bytes below the limit that nobody has; negative while the tide stands over someone."""
        return self.limit(tier) - sum(seat.bytes for seat in self.seats.values() if seat.tier == tier)

    # Room.

    def clear(self, tier: int, size: int, barred: frozenset[int] = frozenset()) -> None:
        """Move others away until ``size`` bytes of a tier are free."""
        while self.free(tier) < size:
            victims = [extent for extent, _ in self.sitting(tier) if extent not in self.pins]
            victims.sort(key=self._next_use, reverse=True)
            if not any(self._send(extent, tier, barred) for extent in victims):
                raise _failure(self.tiers[tier].name, self.place, size, max(0, self.free(tier)))

    def _next_use(self, extent: Extent) -> int:
        later = self._later.get(extent, ())
        return next((moment for moment in later if moment > self.now), 1 << 60)

    def _send(self, victim: Extent, tier: int, barred: frozenset[int]) -> bool:
        size = self.seats[victim].bytes
        near = [other for other in (tier + 1, tier - 1) if 0 <= other < len(self.tiers) and other not in barred]
        for other in near:
            kept, bytes_kept = self._kept
            if self.free(other) >= size + (bytes_kept if kept == other else 0):
                self.move(victim, other)
                return True
        if len(near) == 1 and 0 < near[0] < len(self.tiers) - 1:
            self.clear(near[0], size, barred | {tier})
            self.move(victim, near[0])
            return True
        return False

    def spot(self, tier: int, size: int) -> int:
        """An offset with ``size`` free bytes behind it; pushes the tier together if need be."""
        offset = self._hole(tier, size)
        if offset is None:
            self.compact(tier)
            offset = self._hole(tier, size)
        assert offset is not None, "whoever asks has made sure that the bytes are free"
        return offset

    def _hole(self, tier: int, size: int) -> int | None:
        end = 0
        for _, seat in self.sitting(tier):
            if seat.offset - end >= size:
                break
            end = seat.offset + seat.bytes
        return end if end + size <= self.limit(tier) else None

    def compact(self, tier: int) -> None:
        """Push a tier's extents together at the bottom."""
        end = 0
        for extent, seat in self.sitting(tier):
            if seat.offset != end:
                self._shift(extent, end)
            end += seat.bytes

    # Moves.

    def _shift(self, extent: Extent, offset: int) -> None:
        seat = self.seats[extent]
        if extent in self.homed:
            self._log.append((extent, seat.tier, seat.offset))
        self.emit(worker(self.tiers, seat.tier), Shift(seat.slot, offset))
        seat.offset = offset

    def move(self, extent: Extent, tier: int) -> None:
        """To a neighbouring tier, which has the bytes free."""
        self._move_to(extent, tier, self.spot(tier, self.seats[extent].bytes))

    def _move_to(self, extent: Extent, tier: int, offset: int) -> None:
        old = self.seats[extent]
        if extent in self.homed:
            self._log.append((extent, old.tier, old.offset))
        queue = link(self.tiers[old.tier].name, self.tiers[tier].name)
        slot = self._fresh(queue, tier, offset, old.bytes)
        version = self.versions.get(extent)
        if version is not None:
            self.emit(queue, Copy(extent, version, old.slot, slot, old.bytes))
        self.emit(queue, Release(old.slot))
        self.seats[extent] = _Seat(slot, tier, offset, old.bytes)

    def _fresh(self, queue: Queue, tier: int, offset: int, size: int) -> int:
        slot = self._slots
        self._slots += 1
        self.emit(queue, Reserve(slot, tier, offset, size))
        return slot

    def fetch(self, extent: Extent, tier: int) -> int:
        """Bring an extent to a tier and pin it there; its slot."""
        self.pins.add(extent)
        size = self.seats[extent].bytes
        if abs(self.seats[extent].tier - tier) > 1:
            with suppress(DoesNotFit):  # first, while the extent does not yet stand in its victims' way
                self.clear(tier, size)
        while self.seats[extent].tier != tier:
            here = self.seats[extent].tier
            step = here + (1 if tier > here else -1)
            self._kept = (tier, size) if step != tier else (tier, 0)
            with suppress(DoesNotFit):
                self.clear(step, size)
            self._kept = (tier, 0)
            self.clear(step, size)
            self.move(extent, step)
        return self.seats[extent].slot

    def bear(self, extent: Extent, queue: Queue) -> int:
        """A fresh slot on the compute tier for an extent without a home."""
        size = self.program.bytes_of(extent)
        self.clear(0, size)
        offset = self.spot(0, size)
        slot = self._fresh(queue, 0, offset, size)
        self.seats[extent] = _Seat(slot, 0, offset, size)
        self.pins.add(extent)
        return slot

    def bury(self, extent: Extent) -> None:
        """An extent without a home is needed no more."""
        seat = self.seats.pop(extent)
        self.versions.pop(extent, None)
        self.pins.discard(extent)
        self.emit(worker(self.tiers, seat.tier), Release(seat.slot))

    def return_home(self) -> None:
        """Undo every move, last first."""
        self.tide_bytes = 0
        log, self._log = self._log, []
        for extent, tier, offset in reversed(log):
            if self.seats[extent].tier == tier:
                self._shift(extent, offset)
            else:
                self._move_to(extent, tier, offset)


class _Chain(_Arrangement):
    """One segment, moment after moment."""

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
            self.tide_bytes = 0
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
        self.tide_bytes = visit.nonmodel_bytes
        self.clear(0, 0)
        for use in uses:
            self._ready(use.extent, use.before)
        self.clear(0, 0)
        if any(seat.offset + seat.bytes > self.limit(0) for _, seat in self.sitting(0)):
            self.compact(0)
        slots = tuple(self.seats[use.extent].slot for use in uses)
        self.emit(Queue.COMPUTE, Run(visit.index, slots, visit.nonmodel_bytes))
        for use in uses:
            self.versions[use.extent] = use.after
        if self.segment.is_micro:
            for group in self.program.completions[visit.index]:
                self._complete(group)
        self._drop(visit, [use.extent for use in uses])

    def _here(self, extent: Extent) -> bool:
        return extent in self.seats and self.seats[extent].tier == 0

    def _half_way(self) -> set[Extent]:
        """Gathered groups and gradients that have no other place to go."""
        return {extent for extent in self.seats if extent.kind in (Kind.FULL, Kind.GRAD)}

    def _ready(self, extent: Extent, before: int | None) -> None:
        if extent in self.homed:
            self.fetch(extent, 0)
        elif extent.kind is Kind.FULL and extent not in self.seats and before is not None:
            weight = Extent(self.program.weight, extent.index)
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
            if extent.kind is Kind.FULL and self.versions.get(extent) == 0:
                self.bury(extent)
        for index in visit.takes if self.segment.is_micro else ():
            if self.program.last_takes[index] == visit.index:
                self.bury(Extent(Kind.ACT, index))

    def _complete(self, group: int) -> None:
        program = self.program
        count = len(program.gradient_visits[group])
        target = Extent(program.weight if program.overwrites else program.local_gradient, group)
        if program.ranks > 1:
            source, wire = Extent(Kind.FULL if program.overwrites else Kind.GRAD, group), Extent(Kind.WIRE, group)
            self.pins |= {source}
            if program.overwrites:
                self.fetch(target, 0)
            else:
                self.bear(target, Queue.COLL)
            self.bear(wire, Queue.COLL)
            origin, scratch, shard = (self.seats[extent].slot for extent in (source, wire, target))
            self.emit(Queue.COLL, ReduceScatter(group, origin, scratch, shard, self._next()))
            self.versions[target] = count
            self.bury(source)
            self.bury(wire)
        if program.overwrites:
            self.emit(worker(self.tiers, 0), Norm(group, self.fetch(target, 0)))
            self.pins.discard(target)
        else:
            self._accumulate(group, target)

    def _accumulate(self, group: int, gradient: Extent) -> None:
        total = Extent(Kind.ACC, group)
        tier = self._roomy((total, gradient))
        self.pins = self._half_way()
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
        self.pins = self._half_way()

    def _roomy(self, extents: tuple[Extent, ...]) -> int:
        """The tier with a processor that holds the most of these already, of those that can hold all."""
        need = sum(map(self.program.bytes_of, extents))
        work = [tier for tier, row in enumerate(self.tiers) if row.name != "disk"]
        stuck = sum(self.seats[extent].bytes for extent in self._half_way() - set(extents))

        def merit(tier: int) -> tuple[bool, bool, int]:
            room = self.limit(tier) - need - (stuck if tier == 0 else 0)
            there = sum(self.seats[extent].bytes for extent in extents if self.seats[extent].tier == tier)
            return room >= self._slack, room >= 0, there

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

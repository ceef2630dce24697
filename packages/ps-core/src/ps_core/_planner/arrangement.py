"""Choose which resident copy to evict for room, when every extent has one copy, and emit the moves.

This is used for tight memory. The notes of `low_memory_plan` and `held_slots` prove that room can always be made.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from ps_core._address_ranges import Span, lowest
from ps_core._errors import DoesNotFit
from ps_core._extents import Extent, SegmentName
from ps_core._plan import Copy, Held, Instr, Op, Queue, Release, Reserve, Shift, Tier, link, worker
from ps_core._planner.bounds import largest_extent_bytes
from ps_core._planner.held_slots import Holds
from ps_core._program import Program


class Victims(StrEnum):
    """Name the order in which extents are evicted. Any works, unless tiers have room for one more and no other."""

    LATEST = "wanted again last"
    SMALLEST = "smallest"
    LARGEST = "largest"


def failure(tier: str, moment: str, needed: int, available: int) -> DoesNotFit:
    """Return the error that no plan was found, which is no proof that there is none."""
    return DoesNotFit(tier=tier, moment=moment, needed_bytes=needed, available_bytes=available, proven=False)


@dataclass(slots=True)
class Seat:
    """The tier, slot and address of an extent."""

    slot: int
    tier: int
    offset: int
    bytes: int


class Arrangement:
    """Track where every extent is, and the chain of instructions that moves them."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        home: tuple[Held, ...],
        name: SegmentName,
        victims: Victims = Victims.LATEST,
    ) -> None:
        self.program = program
        self._victims = victims
        self.tiers = tiers
        self.segment = name
        self.instrs: list[Instr] = []
        self.versions = dict(program.entry(name))
        self.seats = {held.extent: Seat(slot, held.tier, held.offset, held.bytes) for slot, held in enumerate(home)}
        self.homed = frozenset(self.seats)
        self.pins: set[Extent] = set()
        self.holds = Holds(program, name)
        self.fixed: frozenset[Extent] = frozenset()
        """Pinned extents that must not be moved within their tier either: their memory is still referenced."""
        self.nonmodel_bytes = 0
        self.now = -1
        self.place = "between segments"
        self.slack = largest_extent_bytes(program)
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
        """Append an instruction to the chain."""
        number = len(self.instrs)
        linked = number > 0 and self.instrs[-1].queue is not queue
        self.instrs.append(Instr(number, queue, op, (number - 1,) if linked else (), self.now))

    def limit(self, tier: int) -> int:
        """Return the address where a tier's range for extents ends."""
        return (self.tiers[tier].capacity_bytes - (self.nonmodel_bytes if tier == 0 else 0)) & -128

    def sitting(self, tier: int) -> list[tuple[Extent, Seat]]:
        """Return the extents on a tier, by address."""
        rows = [(extent, seat) for extent, seat in self.seats.items() if seat.tier == tier]
        return sorted(rows, key=lambda row: row[1].offset)

    def free(self, tier: int) -> int:
        """Return the free bytes below the limit; negative while non-model bytes overlap a slot."""
        return self.limit(tier) - sum(seat.bytes for seat in self.seats.values() if seat.tier == tier)

    def room(self, tier: int) -> int:
        """Return the most contiguous bytes of a tier, after compaction; negative as `free`."""
        if tier or not self.fixed:
            return self.free(tier)
        packed = self._packed(tier)
        end = packed[-1][1][1]
        if end > self.limit(tier):
            return self.limit(tier) - end
        spans = [(seat.offset, seat.offset + seat.bytes) for _, seat in self.sitting(tier)]
        return max(self._widest(tier, spans), self._widest(tier, [span for _, span in packed]))

    def _widest(self, tier: int, spans: list[Span]) -> int:
        ends = [0, *(end for _, end in spans)]
        starts = [*(start for start, _ in spans), self.limit(tier)]
        return max(min(start, self.limit(tier)) - end for start, end in zip(starts, ends, strict=True))

    # Room.

    def clear(self, tier: int, size: int, barred: frozenset[int] = frozenset()) -> None:
        """Move extents away until a tier can have ``size`` contiguous bytes."""
        while self.room(tier) < size:
            self._evict(tier, size, barred)

    def _evict(self, tier: int, size: int, barred: frozenset[int] = frozenset()) -> None:
        """Move one extent away, or raise."""
        victims = [extent for extent, _ in self.sitting(tier) if extent not in self.pins]
        victims.sort(key=self._merit, reverse=True)
        if not any(self._send(extent, tier, barred) for extent in victims):
            raise failure(self.tiers[tier].name, self.place, size, max(0, self.room(tier)))

    def _merit(self, extent: Extent) -> int:
        size = self.seats[extent].bytes
        return {Victims.LATEST: self._next_use(extent), Victims.SMALLEST: -size, Victims.LARGEST: size}[self._victims]

    def _next_use(self, extent: Extent) -> int:
        later = self._later.get(extent, ())
        return next((moment for moment in later if moment > self.now), 1 << 60)

    def _send(self, victim: Extent, tier: int, barred: frozenset[int]) -> bool:
        size = self.seats[victim].bytes
        near = [other for other in (tier + 1, tier - 1) if 0 <= other < len(self.tiers) and other not in barred]
        for other in near:
            kept, bytes_kept = self._kept
            if self.room(other) >= size + (bytes_kept if kept == other else 0):
                self.move(victim, other)
                return True
        if len(near) == 1 and 0 < near[0] < len(self.tiers) - 1:
            self.clear(near[0], size, barred | {tier})
            self.move(victim, near[0])
            return True
        return False

    def spot(self, tier: int, size: int) -> int:
        """Return an offset with ``size`` free bytes behind it; compact the tier if necessary."""
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
        """Move a tier's extents to the bottom, around those that must not move."""
        for extent, (start, _) in self._packed(tier):
            if self.seats[extent].offset != start:
                self._shift(extent, start)

    def _packed(self, tier: int) -> list[tuple[Extent, Span]]:
        """Return where a tier's extents would be after that, by address."""
        rows = self.sitting(tier)
        still = [(seat.offset, seat.offset + seat.bytes) for extent, seat in rows if extent in self.fixed]
        found, end = [], 0
        for extent, seat in rows:
            start = seat.offset if extent in self.fixed else lowest(still, seat.bytes, end)
            found.append((extent, (start, start + seat.bytes)))
            if extent not in self.fixed:
                end = start + seat.bytes
        return sorted(found, key=lambda row: row[1])

    def anchor(self, extent: Extent) -> None:
        """Move an extent to the lowest address of the compute tier for held ones; see [Note: ground] in
        `held_slots`.
        """
        seat = self.seats[extent]
        still = sorted((other.offset, other.offset + other.bytes) for other in map(self.seats.__getitem__, self.fixed))
        start = lowest(still, seat.bytes)
        while (other := self._in_the_way(extent, start)) is not None:
            self.compact(0)
            self._to_the_top(other)
        if seat.offset != start:
            self._shift(extent, start)
        self.fixed |= {extent}

    def _in_the_way(self, extent: Extent, start: int) -> Extent | None:
        """Return the first other extent on addresses that an extent is to have."""
        end = start + self.seats[extent].bytes
        for other, seat in self.sitting(0):
            if other != extent and seat.offset < end and start < seat.offset + seat.bytes:
                return other
        return None

    def _to_the_top(self, extent: Extent) -> None:
        """Move an extent above all others; or move another one away, if there is no room for that."""
        size = self.seats[extent].bytes
        end = max(seat.offset + seat.bytes for _, seat in self.sitting(0))
        if end + size <= self.limit(0):
            self._shift(extent, end)
        else:
            self._evict(0, size)

    # Moves.

    def _shift(self, extent: Extent, offset: int) -> None:
        seat = self.seats[extent]
        if extent in self.homed:
            self._log.append((extent, seat.tier, seat.offset))
        self.emit(worker(self.tiers, seat.tier), Shift(seat.slot, offset))
        seat.offset = offset

    def move(self, extent: Extent, tier: int) -> None:
        """Move an extent to an adjacent tier, which has enough free bytes."""
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
        self.seats[extent] = Seat(slot, tier, offset, old.bytes)

    def _fresh(self, queue: Queue, tier: int, offset: int, size: int) -> int:
        slot = self._slots
        self._slots += 1
        self.emit(queue, Reserve(slot, tier, offset, size))
        return slot

    def fetch(self, extent: Extent, tier: int) -> int:
        """Move an extent to a tier and pin it there; return its slot."""
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
        """Reserve a slot on the compute tier for an extent without a home."""
        size = self.program.bytes_of(extent)
        self.clear(0, size)
        offset = self.spot(0, size)
        slot = self._fresh(queue, 0, offset, size)
        self.seats[extent] = Seat(slot, 0, offset, size)
        self.pins.add(extent)
        return slot

    def bury(self, extent: Extent) -> None:
        """Release the slot of an extent without a home."""
        seat = self.seats.pop(extent)
        self.versions.pop(extent, None)
        self.pins.discard(extent)
        self.emit(worker(self.tiers, seat.tier), Release(seat.slot))

    def return_home(self) -> None:
        """Undo every move, last first."""
        self.nonmodel_bytes = 0
        log, self._log = self._log, []
        for extent, tier, offset in reversed(log):
            if self.seats[extent].tier == tier:
                self._shift(extent, offset)
            else:
                self._move_to(extent, tier, offset)

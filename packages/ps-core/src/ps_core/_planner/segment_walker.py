"""Make a plan from a program, tiers and a placement: where extents are when, and the instructions for it.

[Note: how moves come to overlap]
The planner walks through a segment. Before each moment it fetches what is missing, and evicts by policy. That gives the
*order* of each queue. The *time* of a move follows from the waits. A fetch waits only until its target bytes are free,
and those were chosen among the longest idle. A victim's bytes are released on the queue that needs them, not where the
victim was last used. So no queue waits for another one's releases. The result is prefetch as early and as deep as
memory allows, without a clock.

Home slots never move, and their bytes are never lent. So every segment can end where it began, and a victim always has
a place. All else of a tier is arena (the compute tier's, below the highest non-model bytes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Copy, Op, Plan, Queue, Release, Reserve, Segment, Step, link, worker
from ps_core._planner.arena import STALE, Arena, Piece, Window
from ps_core._planner.emit import Emitter
from ps_core._planner.eviction_policy import NEVER, Ranker
from ps_core._planner.tier_division import Frame, NoRoom


@dataclass(slots=True)
class Resident:
    """One copy of an extent on one tier; ``piece`` and ``arena`` are None for a home slot."""

    slot: int
    version: int | None
    piece: Piece | None = None
    arena: Arena | None = None

    @property
    def dead(self) -> bool:
        """Return True if this copy is not needed any more."""
        return self.piece is not None and self.piece.idle


class Walker:
    """Plan one segment: track where extents are, and the instructions so far."""

    def __init__(self, frame: Frame, segment: SegmentName, uses: dict[Extent, Sequence[int]]) -> None:
        self.frame = frame
        self.program = frame.program
        self.segment = segment
        self.out = Emitter()
        self.now = -1
        self.early = frozenset(frame.placement.stepped_in_backward)
        self.versions = dict(self.program.entry(segment, self.early))
        self.ranker: Ranker[Extent] = Ranker(
            frame.policy, uses, frozenset(Extent(self.program.weight_of(group), group) for group in frame.kept)
        )
        self._slots = len(frame.home)
        self._home: dict[Extent, int] = {}
        self.residents: dict[Extent, dict[int, Resident]] = {}
        for slot, held in enumerate(frame.home):
            self._home[held.extent] = held.tier
            self.residents[held.extent] = {held.tier: Resident(slot, self.versions.get(held.extent))}
        self._pins: dict[tuple[Extent, int], int] = {}
        self._arenas = frame.arenas(segment)
        self._owners: dict[int, Extent] = {}
        """The owner of each slot outside home slots."""
        self._stirred: set[Extent] = set()
        """Extents whose copies' worth may differ from what their arenas know."""
        self._packs = False
        """True within `packed`."""

    # What is where.

    def home_tier(self, extent: Extent) -> int:
        """Return the tier of the extent's home slot."""
        return self._home[extent]

    def holding(self, extent: Extent) -> list[int]:
        """Return the tiers that hold the extent's newest version, fastest first."""
        version = self.versions.get(extent)
        if version is None:
            return []
        return sorted([tier for tier, row in self.residents[extent].items() if row.version == version])

    def slot(self, extent: Extent, tier: int) -> int:
        """Return the slot of an existing copy."""
        return self.residents[extent][tier].slot

    @contextmanager
    def pinned(self, extents: Iterable[tuple[Extent, int]]) -> Iterator[None]:
        """Pin these copies within the block."""
        pins = list(extents)
        for pin in pins:
            self.pin(pin)
        try:
            yield
        finally:
            for pin in pins:
                self.unpin(pin)

    def pin(self, pin: tuple[Extent, int]) -> None:
        """Pin a copy until `unpin` was called as often."""
        self._pins[pin] = self._pins.get(pin, 0) + 1

    def unpin(self, pin: tuple[Extent, int]) -> None:
        """Undo one `pin`."""
        self._pins[pin] -= 1

    # Making it so.

    def at(self, extent: Extent, tier: int) -> int:
        """Copy the newest version of an extent to a tier, if it is not there; return its slot."""
        holding = self.holding(extent)
        if tier in holding:
            return self.slot(extent, tier)
        source = min(holding, key=lambda other: abs(other - tier))
        step = tier + (1 if source > tier else -1)
        origin = self.at(extent, step)
        tiers = self.frame.tiers
        queue = link(tiers[step].name, tiers[tier].name)
        with self.pinned([(extent, step)]):
            target = self.room(extent, tier, queue)
        version = self.versions[extent]
        op = Copy(extent, version, origin, target, self.program.bytes_of(extent))
        self.emit(queue, op, reads=(origin,), writes=(target,))
        self.residents[extent][tier].version = version
        return target

    def room(self, extent: Extent, tier: int, queue: Queue) -> int:
        """Return a slot for the extent on a tier, with any contents; ``queue`` reserves it if there is none."""
        rows = self.residents.setdefault(extent, {})
        if tier in rows:
            piece = rows[tier].piece
            if piece is not None:
                piece.idle = False
                self.stir(extent)
            return rows[tier].slot
        arena = self._arenas[tier, self.frame.zone(extent, tier)]
        packs = self._packs and tier == 0
        size = self.program.bytes_of(extent) if packs else self.frame.slot_bytes(extent, tier)
        window = self._window(arena, tier, size, lowest=packs)
        while window is None and self.free_room(tier):
            window = self._window(arena, tier, size, lowest=packs)
        if window is None:
            raise NoRoom(tier, self.now, size)
        for victim in window.victims:
            self.evict(victim, tier, queue)
        taken, freed = arena.allocate(window, size, extent)
        slot = self._slots
        self._slots += 1
        self._owners[slot] = extent
        self.emit(queue, Reserve(slot, tier, taken.offset, size), writes=(slot,), also=freed)
        rows[tier] = Resident(slot, None, taken, arena)
        self.ranker.loaded(extent)
        return slot

    def _window(self, arena: Arena, tier: int, size: int, *, lowest: bool) -> Window | None:
        def stays(owner: Extent) -> bool:
            return bool(self._pins.get((owner, tier)))

        self._rate()
        return arena.lowest(size, stays) if lowest else arena.find(size, stays)

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Give new slots of the compute tier its lowest addresses, and no byte too many, within the block."""
        self._packs = True
        try:
            yield
        finally:
            self._packs = False

    def stir(self, extent: Extent) -> None:
        """Note that the worth of the extent's copies may have changed: it was used, made, or next needed now."""
        self._stirred.add(extent)

    def _rate(self) -> None:
        for extent in self._stirred:
            for row in self.residents.get(extent, {}).values():
                if row.piece is not None and row.arena is not None and not row.piece.idle:
                    row.arena.rate(row.piece, self._worth(extent, row), self.out.last_access(row.slot))
        self._stirred.clear()

    def _worth(self, extent: Extent, row: Resident) -> float | None:
        version = self.versions.get(extent)
        if row.version != version:
            return STALE
        if version and extent.kind in (Kind.FULL, Kind.GRAD):
            return None
        if version and self.segment.is_micro and extent.kind is Kind.P16:
            return NEVER
        return self.ranker.worth(extent, self.now)

    def evict(self, extent: Extent, tier: int, queue: Queue) -> None:
        """Release a copy's bytes to ``queue``; first copy it to a lower tier if it is the only one."""
        row = self.residents[extent][tier]
        if not row.dead and extent.kind is not Kind.FULL and self.holding(extent) == [tier]:
            if tier + 1 == len(self.frame.tiers):
                raise NoRoom(tier, self.now, self.program.bytes_of(extent))
            self.at(extent, tier + 1)
        assert row.piece is not None, "home slots are no victims"
        assert row.arena is not None
        freed = self.emit(queue, Release(row.slot), writes=(row.slot,))
        row.arena.free(row.piece, freed)
        del self.residents[extent][tier]

    def discard(self, extent: Extent) -> None:
        """Note that the extent is not needed any more: its bytes may be reused."""
        self.versions.pop(extent, None)
        for tier in self.residents.get(extent, {}):
            self.abandon(extent, tier)

    def abandon(self, extent: Extent, tier: int) -> None:
        """Note that the copy on this tier is not needed any more; a home slot stays all the same."""
        row = self.residents[extent][tier]
        if row.piece is not None and row.arena is not None:
            row.arena.abandon(row.piece, self.out.last_access(row.slot))

    def wrote(self, extent: Extent, tier: int, version: int) -> None:
        """Note that the copy on this tier is now the extent's newest version."""
        self.versions[extent] = version
        self.residents[extent][tier].version = version
        self.stir(extent)

    def emit(
        self,
        queue: Queue,
        op: Op,
        *,
        reads: Collection[int] = (),
        writes: Collection[int] = (),
        also: Iterable[int] = (),
    ) -> int:
        """Append an instruction, with the waits that its slots need."""
        number = self.out.emit(queue, op, reads=reads, writes=writes, also=also, visit=self.now)
        for slot in (*reads, *writes):
            if slot in self._owners:
                self._stirred.add(self._owners[slot])
        return number

    def free_room(self, tier: int) -> bool:
        """Do something that ends the use of slots on a tier; return False if there is nothing to do."""
        return False

    def step(self, group: int) -> None:
        """Step a group on the tier of its placement, and bring what was written home."""
        program, tiers = self.program, self.frame.tiers
        tier = self.frame.placement.steps[group]
        queue = worker(tiers, tier)
        extents = [Extent(kind, group) for kind in program.home_kinds(group)]
        slots = []
        for extent in extents:
            born = extent.kind is Kind.P16 and not program.overwritten(group)
            slots.append(self.room(extent, tier, queue) if born else self.at(extent, tier))
            self.pin((extent, tier))
        read = [slot for extent, slot in zip(extents, slots, strict=True) if extent.kind is Kind.ACC]
        self.emit(queue, Step(group, tuple(slots)), reads=read, writes=[slot for slot in slots if slot not in read])
        for extent in extents:
            self.unpin((extent, tier))
            if extent.kind is Kind.ACC:
                self.discard(extent)
                continue
            self.wrote(extent, tier, program.rebuilt(group) if extent.kind is Kind.P16 else 1)
            self.bring_home(extent)

    def bring_home(self, extent: Extent) -> None:
        """Copy the newest version to the home slot."""
        self.at(extent, self.home_tier(extent))

    def finish(self) -> Segment:
        """Copy everything to its home slot, and release all other slots."""
        for extent in self.program.exit(self.segment, self.early):
            self.bring_home(extent)
        for (tier, _), arena in self._arenas.items():
            for piece in arena.owned():
                owner = piece.owner
                assert owner is not None
                slot = self.slot(owner, tier)
                queues = self.out.last_queues(slot)
                away = Queue.D2H if self.frame.tiers[tier].name == "device" else Queue.DISK_W
                self.emit(queues.pop() if len(queues) == 1 else away, Release(slot), writes=(slot,))
        return Segment(self.segment, tuple(self.out.instrs))


def assemble(frame: Frame, segments: Iterable[Segment], notes: tuple[str, ...] = ()) -> Plan:
    """Make the plan of these segments."""
    return Plan(
        tiers=frame.tiers,
        home=frame.home,
        segments=tuple(segments),
        policy=frame.policy.value,
        step_tiers=frame.placement.steps,
        notes=notes,
    )

"""From a program, tiers and a placement to a plan: who is where when, and the instructions that bring it about.

[Note: how moves come to overlap]
The planner walks through a segment on demand: before each moment it brings in what is missing, choosing victims by
policy. That gives the *order* of each queue. The *time* of a move is left to the waits: a fetch waits only until the
bytes it goes to are free, and those were chosen among the longest idle. A victim's bytes are given back by the queue
that wants them, not where the victim was last used, so no queue stands still for another's bookkeeping. What results
is as-early-as-possible prefetch, as deep as memory allows, without a clock.

Home slots never move, and home's bytes are never lent out, so every segment can end where it began, and a victim
always has somewhere to go. All else of a tier is arena (the compute tier's, below the highest non-model bytes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ps_core._plan import Copy, Op, Plan, Queue, Release, Reserve, Segment, link
from ps_core._planner.arena import STALE, Arena, Piece, Window
from ps_core._planner.emit import Emitter
from ps_core._planner.eviction_policy import NEVER, Ranker
from ps_core._planner.tier_division import Frame, NoRoom
from ps_core._program import Extent, Kind, SegmentName


@dataclass(slots=True)
class Resident:
    """One copy of an extent on one tier; ``piece`` and ``arena`` are None for a home slot."""

    slot: int
    version: int | None
    piece: Piece | None = None
    arena: Arena | None = None

    @property
    def dead(self) -> bool:
        """Nobody needs this copy any more."""
        return self.piece is not None and self.piece.idle


class Walker:
    """One segment being planned: what is where, and the instructions so far."""

    def __init__(self, frame: Frame, segment: SegmentName, uses: dict[Extent, Sequence[int]]) -> None:
        self.frame = frame
        self.program = frame.program
        self.segment = segment
        self.out = Emitter()
        self.now = -1
        self.versions = dict(self.program.entry(segment))
        self.ranker: Ranker[Extent] = Ranker(
            frame.policy, uses, frozenset(Extent(self.program.weight, group) for group in frame.kept)
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
        """By slot, outside home."""
        self._stirred: set[Extent] = set()
        """Those whose copies may be worth something else than their arenas know."""

    # What is where.

    def home_tier(self, extent: Extent) -> int:
        """The tier of the extent's home."""
        return self._home[extent]

    def holding(self, extent: Extent) -> list[int]:
        """Tiers that hold the extent as it now is, fastest first."""
        version = self.versions.get(extent)
        if version is None:
            return []
        return sorted([tier for tier, row in self.residents[extent].items() if row.version == version])

    def slot(self, extent: Extent, tier: int) -> int:
        """The slot of a copy that is there."""
        return self.residents[extent][tier].slot

    @contextmanager
    def pinned(self, extents: Iterable[tuple[Extent, int]]) -> Iterator[None]:
        """Keep these copies where they are meanwhile."""
        pins = list(extents)
        for pin in pins:
            self.pin(pin)
        try:
            yield
        finally:
            for pin in pins:
                self.unpin(pin)

    def pin(self, pin: tuple[Extent, int]) -> None:
        """Keep a copy until as many `unpin`."""
        self._pins[pin] = self._pins.get(pin, 0) + 1

    def unpin(self, pin: tuple[Extent, int]) -> None:
        """Undo one `pin`."""
        self._pins[pin] -= 1

    # Making it so.

    def at(self, extent: Extent, tier: int) -> int:
        """Have the extent, as it now is, on a tier; its slot there."""
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
        """A slot for the extent on a tier, whatever it holds; reserved by ``queue`` if there is none."""
        rows = self.residents.setdefault(extent, {})
        if tier in rows:
            piece = rows[tier].piece
            if piece is not None:
                piece.idle = False
                self.stir(extent)
            return rows[tier].slot
        arena = self._arenas[tier, self.frame.zone(extent, tier)]
        size = self.frame.slot_bytes(extent, tier)
        window = self._window(arena, tier, size)
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

    def _window(self, arena: Arena, tier: int, size: int) -> Window | None:
        def stays(owner: Extent) -> bool:
            return bool(self._pins.get((owner, tier)))

        self._rate()
        return arena.find(size, stays)

    def stir(self, extent: Extent) -> None:
        """Note that the extent's copies may be worth something else: used or made, or its time has come."""
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
        if version and self.segment.is_micro and extent.kind is self.program.weight:
            return NEVER
        return self.ranker.worth(extent, self.now)

    def evict(self, extent: Extent, tier: int, queue: Queue) -> None:
        """Give a copy's bytes back to ``queue``, saving it below if it is the only one."""
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
        """Nobody needs the extent any more: its bytes may be taken."""
        self.versions.pop(extent, None)
        for tier in self.residents.get(extent, {}):
            self.abandon(extent, tier)

    def abandon(self, extent: Extent, tier: int) -> None:
        """Nobody needs the copy on this tier any more (a home slot stays all the same)."""
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
        """Write an instruction down, with the waits its slots call for."""
        number = self.out.emit(queue, op, reads=reads, writes=writes, also=also, visit=self.now)
        for slot in (*reads, *writes):
            if slot in self._owners:
                self._stirred.add(self._owners[slot])
        return number

    def bring_home(self, extent: Extent) -> None:
        """Have the newest version at home."""
        self.at(extent, self.home_tier(extent))

    def finish(self) -> Segment:
        """Bring everything home, give everything else back."""
        for extent in self.program.exit(self.segment):
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
    """The plan of these segments."""
    return Plan(
        tiers=frame.tiers,
        home=frame.home,
        segments=tuple(segments),
        policy=frame.policy.value,
        step_tiers=frame.placement.steps,
        notes=notes,
    )

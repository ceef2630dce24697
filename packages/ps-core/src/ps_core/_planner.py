"""From a program, tiers and a placement to a plan: who is where when, and the instructions that bring it about.

[Note: how moves come to overlap]
The planner walks through a segment on demand: before each moment it brings in what is missing, choosing victims by
policy. That gives the *order* of each queue. The *time* of a move is left to the waits: a fetch waits only until the
bytes it goes to are free, and those were chosen among the longest idle. A victim's bytes are given back by the queue
that wants them, not where the victim was last used, so no queue stands still for another's bookkeeping. What results
is as-early-as-possible prefetch, as deep as memory allows, without a clock.

Home slots never move, and home's bytes are never lent out, so every segment can end where it began, and a victim
always has somewhere to go. All else of a tier is an arena (the compute tier's below high tide). With several
processes the gathered groups have an arena of their own, lest small shards cut it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ps_core._emit import Emitter
from ps_core._memory import FREE, Arena, Piece, Window
from ps_core._placement import Placement, lay_home
from ps_core._plan import Copy, Held, Op, Plan, Queue, Release, Reserve, Segment, Tier, link
from ps_core._policy import NEVER, Policy, Ranker
from ps_core._program import Extent, Kind, Program, SegmentName

_BUFFERS = (Kind.FULL, Kind.WIRE, Kind.GRAD)


class NoRoom(Exception):
    """A placement leaves too little room on a tier; the search tries another."""

    def __init__(self, tier: int, visit: int, needed_bytes: int) -> None:
        super().__init__(f"tier {tier}, moment {visit}: no room for {needed_bytes} bytes")
        self.tier = tier
        self.visit = visit
        self.needed_bytes = needed_bytes


@dataclass(slots=True)
class Resident:
    """One copy of an extent on one tier; ``piece`` is None for a home slot."""

    slot: int
    version: int | None
    piece: Piece | None = None

    @property
    def dead(self) -> bool:
        """Nobody needs this copy any more."""
        return self.piece is not None and self.piece.idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stays the same while a plan's segments are made."""

    program: Program
    tiers: tuple[Tier, ...]
    placement: Placement
    policy: Policy
    home: tuple[Held, ...]
    home_ends: tuple[int, ...]
    line_bytes: int
    """End of the compute tier's arena while moments run: capacity less the highest tide."""
    buffer_bytes: int
    """The part of that arena kept for gathered groups."""
    deep: bool
    """Whether there is room to gather for the next moment while this one runs."""
    kept: frozenset[int]
    """Groups the static policy never gives up."""


def make_frame(
    program: Program, tiers: tuple[Tier, ...], placement: Placement, policy: Policy = Policy.BELADY
) -> Frame:
    """Fix home and the arenas; `NoRoom` if home alone is too large for a tier."""
    home, ends = lay_home(program, placement, tiers)
    peak = max((visit.nonmodel_bytes for visit in program.visits), default=0)
    line = (tiers[0].capacity_bytes - peak) & -128
    for tier, end in enumerate(ends):
        if end > (tiers[tier].capacity_bytes if tier else line):
            raise NoRoom(tier, -1, end)
    arena = line - ends[0]
    buffers, deep = _split(program, placement, arena)
    kept: set[int] = set()
    if policy is Policy.STATIC:
        kept = _static_set(program, placement, arena - buffers)
    return Frame(
        program=program,
        tiers=tiers,
        placement=placement,
        policy=policy,
        home=home,
        home_ends=tuple(ends),
        line_bytes=line,
        buffer_bytes=buffers,
        deep=deep,
        kept=frozenset(kept),
    )


def _split(program: Program, placement: Placement, arena: int) -> tuple[int, bool]:
    """How much of the compute tier's arena is for gathered groups, and whether that allows gathering ahead.

    Shards are small and dear (they cross the link), gathered groups large and cheap: all shards that live below stay
    where there is room for them, and what is over keeps groups gathered from forward to backward.
    """
    if program.ranks == 1:
        return 0, False
    least, deep = _buffer_need(program)
    groups = range(len(placement.weights))
    shards = [program.bytes_of(Extent(program.weight, group)) for group in groups]
    below = [size for group, size in enumerate(shards) if placement.home_tier(program.weight, group)]
    largest = max(shards, default=0)
    passing = 3 * max(below, default=0 if program.overwrites else largest)
    spare = program.ranks * largest
    for kept, buffers in ((sum(below) + passing, deep + spare), (passing, deep + spare), (passing, deep)):
        if kept + buffers <= arena:
            return arena - kept if kept > passing or not below else buffers, True
    return max(min(least + spare, arena - passing), 0), False


def _buffer_need(program: Program) -> tuple[int, int]:
    """Bytes of gathered groups at once: at the least, and with the next moment's gathered ahead."""
    if program.ranks == 1:
        return 0, 0
    least = deep = 0
    before: dict[Extent, int] = {}
    partial: dict[Extent, int] = {}
    for visit in program.visits:
        uses = program.uses(SegmentName.MICRO_LAST, visit)
        held = {use.extent: program.bytes_of(use.extent) for use in uses if use.extent.kind in _BUFFERS}
        gradient = Kind.FULL if program.overwrites else Kind.GRAD
        partial |= {Extent(gradient, group): program.bytes_of(Extent(gradient, group)) for group in visit.grads}
        least = max(least, sum((held | partial).values()))
        deep = max(deep, sum((before | held | partial).values()))
        for group in program.completions[visit.index]:
            wire = program.bytes_of(Extent(gradient, group))
            least = max(least, sum((held | partial).values()) + wire)
            deep = max(deep, sum((before | held | partial).values()) + wire)
            del partial[Extent(gradient, group)]
        before = held
    return least, deep


def _static_set(program: Program, placement: Placement, room: int) -> set[int]:
    kept = set()
    sizes = [program.bytes_of(Extent(program.weight, group)) for group in range(len(placement.weights))]
    room -= 3 * max(sizes, default=0)
    for group, size in enumerate(sizes):
        if placement.home_tier(program.weight, group) and size <= room:
            kept.add(group)
            room -= size
    return kept


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
        self._arenas = self._make_arenas()

    def _make_arenas(self) -> dict[tuple[int, bool], Arena]:
        """By tier, and whether for gathered groups."""
        frame = self.frame
        tops = [frame.line_bytes, *(tier.capacity_bytes & -128 for tier in frame.tiers[1:])]
        if self.segment not in (SegmentName.EVAL,) and not self.segment.is_micro:
            tops[0] = frame.tiers[0].capacity_bytes & -128
            return {(tier, False): Arena(frame.home_ends[tier], top) for tier, top in enumerate(tops)}
        arenas = {(tier, False): Arena(frame.home_ends[tier], top) for tier, top in enumerate(tops)}
        if frame.buffer_bytes:
            fence = tops[0] - frame.buffer_bytes
            arenas[0, False] = Arena(frame.home_ends[0], fence)
            arenas[0, True] = Arena(max(fence, frame.home_ends[0]), tops[0])
        return arenas

    # What is where.

    def home_tier(self, extent: Extent) -> int:
        """The tier of the extent's home."""
        return self._home[extent]

    def holding(self, extent: Extent) -> list[int]:
        """Tiers that hold the extent as it now is, fastest first."""
        version = self.versions.get(extent)
        rows = self.residents.get(extent, {})
        return sorted(tier for tier, row in rows.items() if row.version == version and version is not None)

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
            return rows[tier].slot
        arena = self._arenas.get((tier, tier == 0 and extent.kind in _BUFFERS)) or self._arenas[tier, False]
        size = self.program.bytes_of(extent)
        window = self._window(arena, tier, size)
        if window is None:
            raise NoRoom(tier, self.now, size)
        for victim in window.victims:
            self.evict(victim, tier, queue)
        taken, freed = arena.take(window, size, extent)
        slot = self._slots
        self._slots += 1
        self.emit(queue, Reserve(slot, tier, taken.offset, size), writes=(slot,), also=freed)
        rows[tier] = Resident(slot, None, taken)
        self.ranker.loaded(extent)
        return slot

    def _window(self, arena: Arena, tier: int, size: int) -> Window | None:
        def idle_since(owner: Extent) -> int:
            return self.out.last_access(self.slot(owner, tier))

        def worth(owner: Extent) -> float | None:
            return self._worth(owner, tier)

        return arena.find(size, worth, idle_since)

    def _worth(self, extent: Extent, tier: int) -> float | None:
        if self._pins.get((extent, tier)):
            return None
        row = self.residents[extent][tier]
        version = self.versions.get(extent)
        if row.version != version:
            return FREE
        if version and extent.kind in _BUFFERS:
            return None
        worth = self.ranker.worth(extent, self.now)
        if version and self.segment.is_micro and extent.kind is self.program.weight:
            return NEVER
        return worth

    def evict(self, extent: Extent, tier: int, queue: Queue) -> None:
        """Give a copy's bytes back to ``queue``, saving it below if it is the only one."""
        row = self.residents[extent][tier]
        if not row.dead and extent.kind is not Kind.FULL and self.holding(extent) == [tier]:
            if tier + 1 == len(self.frame.tiers):
                raise NoRoom(tier, self.now, self.program.bytes_of(extent))
            self.at(extent, tier + 1)
        assert row.piece is not None, "home slots are no victims"
        freed = self.emit(queue, Release(row.slot), writes=(row.slot,))
        self._arena_of(extent, tier).free(row.piece, freed)
        del self.residents[extent][tier]

    def _arena_of(self, extent: Extent, tier: int) -> Arena:
        return self._arenas.get((tier, tier == 0 and extent.kind in _BUFFERS)) or self._arenas[tier, False]

    def discard(self, extent: Extent) -> None:
        """Nobody needs the extent any more: its bytes may be taken."""
        self.versions.pop(extent, None)
        for tier in self.residents.get(extent, {}):
            self.abandon(extent, tier)

    def abandon(self, extent: Extent, tier: int) -> None:
        """Nobody needs the copy on this tier any more (a home slot stays all the same)."""
        row = self.residents[extent][tier]
        if row.piece is not None:
            row.piece.idle = True
            row.piece.freed = self.out.last_access(row.slot)

    def wrote(self, extent: Extent, tier: int, version: int) -> None:
        """Note that the copy on this tier is now the extent's newest version."""
        self.versions[extent] = version
        self.residents[extent][tier].version = version

    def emit(
        self,
        queue: Queue,
        op: Op,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        also: Iterable[int] = (),
    ) -> int:
        """Write an instruction down, with the waits its slots call for."""
        return self.out.emit(queue, op, reads=reads, writes=writes, also=also, visit=self.now)

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

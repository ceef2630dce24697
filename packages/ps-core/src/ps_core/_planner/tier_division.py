"""Hold what is fixed while a plan's segments are made: home slots, and the division of each tier's rest.

With several processes the compute tier's arena has three zones: shards, gathered groups, and the scratch memory of
reduce-scatters. Their sizes differ too much to share addresses. Slots there are slightly larger than necessary. So
groups of nearly the same size (layers with and without a bias, an embedding) can replace each other exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from ps_core._extents import STATES, Extent, Kind, SegmentName
from ps_core._plan import Held, Tier
from ps_core._planner.arena import Arena
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.placement import Placement, lay_home
from ps_core._program import Program
from ps_core._units import align_up

_SIZE_CLASSES = 32
_LATE_SUMS = 1
"""Gradients that wait for their sums over ranks, besides those of two moments, without delaying backward."""


class NoRoom(Exception):
    """Say that a placement leaves too little room on a tier; the search tries another."""

    def __init__(self, tier: int, visit: int, needed_bytes: int) -> None:
        super().__init__(f"tier {tier}, moment {visit}: no room for {needed_bytes} bytes")
        self.tier = tier
        self.visit = visit
        self.needed_bytes = needed_bytes


class Zone(StrEnum):
    """Name the parts of a tier outside home slots."""

    MAIN = "main"
    GATHERED = "gathered"
    SCRATCH = "scratch"


_ZONES = {Kind.FULL: Zone.GATHERED, Kind.GRAD: Zone.GATHERED, Kind.WIRE: Zone.SCRATCH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A program on tiers, with everything decided but the moves."""

    program: Program
    tiers: tuple[Tier, ...]
    placement: Placement
    policy: Policy
    home: tuple[Held, ...]
    home_ends: tuple[int, ...]
    line_bytes: int
    """Where the compute tier's arena ends while moments run: capacity less the most non-model bytes."""
    gathered_bytes: int
    """Bytes of that arena for gathered groups."""
    scratch_bytes: int
    """Bytes of that arena for reduce-scatters."""
    deep: bool
    """True if there is memory to gather for the next moment while this one runs."""
    kept: frozenset[int]
    """Groups that the static policy never evicts."""
    classes: tuple[int, int]
    """Slots on the compute tier are multiples of these: for shards, for gathered groups."""

    def arenas(self, segment: SegmentName) -> dict[tuple[int, Zone], Arena]:
        """Make new arenas for one segment; if it runs moments, the compute tier leaves non-model bytes free."""
        bottoms = self.home_ends
        arenas = {
            (tier, Zone.MAIN): Arena(bottoms[tier], row.capacity_bytes & -128) for tier, row in enumerate(self.tiers)
        }
        if segment.is_micro or segment is SegmentName.EVAL:
            scratch = self.line_bytes - self.scratch_bytes
            gathered = scratch - self.gathered_bytes
            arenas[0, Zone.MAIN] = Arena(bottoms[0], gathered)
            arenas[0, Zone.GATHERED] = Arena(gathered, scratch)
            arenas[0, Zone.SCRATCH] = Arena(scratch, self.line_bytes)
        return arenas

    def zone(self, extent: Extent, tier: int) -> Zone:
        """Return the zone of a tier that an extent's slots come from."""
        alone = tier > 0 or not self.program.sharded
        return Zone.MAIN if alone else _ZONES.get(extent.kind, Zone.MAIN)

    def slot_bytes(self, extent: Extent, tier: int) -> int:
        """Return the bytes of a slot for the extent outside home."""
        size = self.program.bytes_of(extent)
        if tier or extent.kind in (Kind.ACT, Kind.WIRE, Kind.P32, *STATES, Kind.ACC):
            return size
        if self.zone(extent, tier) is Zone.GATHERED:
            return _gathered_bytes(self.program, extent, self.classes[1])
        return align_up(size, self.classes[0])


def make_frame(
    program: Program, tiers: tuple[Tier, ...], placement: Placement, policy: Policy = Policy.BELADY
) -> Frame:
    """Fix home slots and arenas; raise `NoRoom` if home slots alone exceed a tier."""
    home, ends = lay_home(program, placement, tiers)
    visits = program.segment_visits(_longest(program))
    peak = max((visit.nonmodel_bytes for visit in visits), default=0)
    line = (tiers[0].capacity_bytes - peak) & -128
    for tier, end in enumerate(ends):
        if end > (tiers[tier].capacity_bytes if tier else line):
            raise NoRoom(tier, -1, end)
    arena = line - ends[0]
    groups = program.stepped if program.sharded else ()
    scratch = max((program.bytes_of(Extent(Kind.WIRE, group)) for group in groups), default=0)
    classes = _classes(program)
    room, gathered, deep = _divide(program, placement, arena - scratch, classes)
    line, arena = line - arena + scratch + room, scratch + room
    return Frame(
        program=program,
        tiers=tiers,
        placement=placement,
        policy=policy,
        home=home,
        home_ends=tuple(ends),
        line_bytes=line,
        gathered_bytes=min(gathered, max(arena - scratch, 0)),
        scratch_bytes=min(scratch, arena),
        deep=deep,
        kept=_static_set(program, placement, arena - scratch - gathered) if policy is Policy.STATIC else frozenset(),
        classes=classes,
    )


def _longest(program: Program) -> SegmentName:
    """Return the segment whose needs include those of all others."""
    return SegmentName.MICRO_LAST if program.training else SegmentName.EVAL


def _classes(program: Program) -> tuple[int, int]:
    groups = range(len(program.layout.groups))
    shard = max((program.bytes_of(Extent(program.weight_of(group), group)) for group in groups), default=0)
    return align_up(shard // _SIZE_CLASSES + 1), align_up(shard * program.ranks // _SIZE_CLASSES + 1)


def _divide(program: Program, placement: Placement, arena: int, classes: tuple[int, int]) -> tuple[int, int, bool]:
    """Return the bytes of the compute tier's arena that are used, those of them for gathered groups, and whether these
    allow gathering ahead.

    Shards are small, and expensive because they cross the link. Gathered groups are large and cheap. So all shards from
    below stay if there is room for them. The remaining bytes keep groups gathered from forward to backward, and then
    activations. More than all groups, all activations and a few gradients is never needed, since nothing reads a
    gradient after its sum. Where ranks compute from common weights, gathered groups need no bytes.
    """
    if not program.sharded:
        return arena, 0, False
    least, deep = _gathered_needs(program, classes[1])
    groups = range(len(placement.weights))
    shards = [align_up(program.bytes_of(Extent(program.weight_of(group), group)), classes[0]) for group in groups]
    below = [size for group, size in enumerate(shards) if placement.home_tier(program.weight_of(group), group)]
    summed = [size for group, size in enumerate(shards) if not program.overwritten(group)]
    passing = max((*below, *summed), default=0)
    made = range(len(program.trace.activations) if program.training else 0)
    stored = sum(program.bytes_of(Extent(Kind.ACT, index)) for index in made)  # all of them where forward ends
    weights = sum(_gathered_bytes(program, Extent(Kind.FULL, group), classes[1]) for group in groups)
    gradients = [_gathered_bytes(program, Extent(Kind.GRAD, group), classes[1]) for group in program.stepped]
    gathered = weights + deep + _LATE_SUMS * max(gradients, default=0)
    enough = sum(below) + 2 * passing + gathered
    if enough <= arena:
        return min(arena, enough + stored), gathered, True
    passing *= 3
    if sum(below) + passing + deep <= arena:
        return arena, arena - sum(below) - passing, True
    if passing + deep <= arena:
        return arena, deep, True
    return arena, max(min(least, arena - passing), 0), False


def _gathered_bytes(program: Program, extent: Extent, size_class: int) -> int:
    """Return the bytes of a gathered group's slot, or of its gradient's; a group of common weights needs hardly any."""
    size = program.bytes_of(extent)
    common = extent.kind is Kind.FULL and program.layout.groups[extent.index].common
    return size if common else align_up(size, size_class)


def _gathered_needs(program: Program, size_class: int) -> tuple[int, int]:
    """Return the most bytes of gathered groups at once: the least possible, and with the next moment's gathered
    ahead.
    """
    segment = _longest(program)
    least = deep = 0
    before: set[Extent] = set()
    partial: set[Extent] = set()

    @cache
    def size(extent: Extent) -> int:
        return _gathered_bytes(program, extent, size_class)

    def room(extents: set[Extent]) -> int:
        return sum(map(size, extents))

    for visit in program.segment_visits(segment):
        held = {use.extent for use in program.uses(segment, visit) if use.extent.kind in (Kind.FULL, Kind.GRAD)}
        partial |= {Extent(program.gradient_of(group), group) for group in visit.grads}
        least = max(least, room(held | partial))
        deep = max(deep, room(before | held | partial))
        partial -= {Extent(program.gradient_of(group), group) for group in program.completions[visit.index]}
        before = held
    return least, deep


def _static_set(program: Program, placement: Placement, room: int) -> frozenset[int]:
    kept = set()
    sizes = [program.bytes_of(Extent(program.weight_of(group), group)) for group in range(len(placement.weights))]
    room -= 3 * max(sizes, default=0)
    for group, size in enumerate(sizes):
        if placement.home_tier(program.weight_of(group), group) and size <= room:
            kept.add(group)
            room -= size
    return frozenset(kept)

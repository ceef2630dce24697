"""A planner that could not be simpler: one thing after another, everything brought in and taken out again.

It shares nothing with the real planner. It leaves home, shifts slots, keeps two homes for an extent and puts homes
anywhere, so checkers and executors see what the real planner never does. It needs no budgets: they are made just as
large as the plan.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from ps_core._extents import Extent, Kind, SegmentName
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
from ps_core._program import Program, Visit

Span = tuple[int, int, int]
"""Tier, start, end."""
Content = tuple[Extent, int] | None


class Waits(StrEnum):
    """Which waits a serial plan writes down."""

    CHAIN = "each instruction waits for the one before"
    ALL = "each waits for all it conflicts with"
    NEEDED = "as ALL, less what others imply"


@dataclass(slots=True)
class Place:
    """A live slot."""

    tier: int
    offset: int
    size: int
    content: Content = None
    home: bool = False

    @property
    def span(self) -> Span:
        return self.tier, self.offset, self.offset + self.size


@dataclass(slots=True)
class Row:
    """An operation with the bytes it reads and writes, in serial order."""

    queue: Queue
    op: Op
    reads: list[Span]
    writes: list[Span]
    top: int = 0
    """End of the highest live slot of the compute tier when it is done."""


def serial_plan(
    program: Program,
    rng: random.Random,
    stack: tuple[str, ...] = ("device", "host"),
    *,
    waits: Waits = Waits.NEEDED,
    restless: float = 0.2,
) -> Plan:
    """A sound plan. ``restless``: how often it does something nobody asked for."""
    names = tuple(Tier(name, 0) for name in stack)
    home = _lay_home(program, rng, len(stack), restless)
    serials = [Serial(program, names, home, name, rng, restless) for name in program.segments]
    rows = [serial.walk() for serial in serials]
    ends = [
        max((held.offset + held.bytes for held in home if held.tier == tier), default=0) for tier in range(len(stack))
    ]
    for serial in serials:
        ends = [max(pair) for pair in zip(ends, serial.ends, strict=True)]
    ends[0] = max(ends[0], *(_with_nonmodel(program, row) for row in rows))
    segments = tuple(
        Segment(name, _write_down(program, row, ends[0], waits))
        for name, row in zip(program.segments, rows, strict=True)
    )
    return Plan(
        tiers=tuple(Tier(name, end) for name, end in zip(stack, ends, strict=True)), home=home, segments=segments
    )


def _lay_home(program: Program, rng: random.Random, tiers: int, restless: float) -> tuple[Held, ...]:
    wanted = [Extent(kind, group.index) for group in program.layout.groups for kind in program.home_kinds(group.index)]
    wanted += [extent for extent in wanted if rng.random() < restless / 2 and tiers > 1]
    rng.shuffle(wanted)
    ends, home = [0] * tiers, []
    for extent in wanted:
        tier = rng.randrange(tiers)
        start = ends[tier] + rng.choice((0, 0, 0, 128))
        home.append(Held(tier, start, program.bytes_of(extent), extent))
        ends[tier] = start + program.bytes_of(extent)
    return tuple(home)


class Serial:
    """One segment, one thing at a time."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        home: tuple[Held, ...],
        segment: SegmentName,
        rng: random.Random,
        restless: float,
    ) -> None:
        self.program = program
        self.tiers = tiers
        self.home = home
        self.segment = segment
        self.rng = rng
        self.restless = restless
        self.rows: list[Row] = []
        self.ends = [0] * len(tiers)
        self.latest = dict(program.entry(segment))
        self.places: dict[int, Place] = {}
        self.number = len(home)
        self.seq = 0
        self.held: dict[Extent, int] = {}
        """What the next moment must find in the same place."""
        for slot, held in enumerate(home):
            version = self.latest.get(held.extent)
            content = None if version is None else (held.extent, version)
            self.places[slot] = Place(held.tier, held.offset, held.bytes, content, home=True)

    # Writing down.

    def add(self, queue: Queue, op: Op, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        spans = [self.places[slot].span for slot in reads], [self.places[slot].span for slot in writes]
        top = max((place.span[2] for place in self.places.values() if place.tier == 0), default=0)
        self.rows.append(Row(queue, op, *spans, top))

    def fits(self, tier: int, start: int, size: int, but: int = -1) -> bool:
        others = (place.span for slot, place in self.places.items() if slot != but)
        return all(span[0] != tier or span[2] <= start or start + size <= span[1] for span in others)

    def spot(self, tier: int, size: int, but: int = -1) -> int:
        """A free address, the lowest one mostly."""
        starts = [0, *(place.span[2] for place in self.places.values() if place.tier == tier)]
        if self.rng.random() < self.restless:
            starts = [start + 128 for start in starts]
        return min(start for start in starts if self.fits(tier, start, size, but))

    def reserve(self, tier: int, size: int, at: int | None = None) -> int:
        start = self.spot(tier, size) if at is None else at
        slot, self.number = self.number, self.number + 1
        self.places[slot] = Place(tier, start, size)
        self.ends[tier] = max(self.ends[tier], start + size)
        self.add(self.rng.choice(tuple(Queue)), Reserve(slot, tier, start, size), writes=(slot,))
        return slot

    def release(self, slot: int) -> None:
        self.add(self.rng.choice(tuple(Queue)), Release(slot), writes=(slot,))
        del self.places[slot]

    def shift(self, slot: int, to: int) -> None:
        place = self.places[slot]
        self.ends[place.tier] = max(self.ends[place.tier], to + place.size)
        self.add(worker(self.tiers, place.tier), Shift(slot, to), writes=(slot,))
        place.offset = to
        self.rows[-1].writes.append(place.span)
        self.rows[-1].top = max(self.rows[-1].top, to + place.size if place.tier == 0 else 0)

    def put(self, slot: int, content: Content) -> int:
        self.places[slot].content = content
        if content is not None:
            self.latest[content[0]] = content[1]
        return slot

    # Moving.

    def find(self, extent: Extent, tier: int | None = None) -> int | None:
        """A slot that holds the newest version."""
        wanted = (extent, self.latest[extent])
        found = [slot for slot, place in self.places.items() if place.content == wanted and tier in (None, place.tier)]
        return self.rng.choice(found) if found else None

    def bring(self, extent: Extent, tier: int) -> int:
        slot = self.find(extent, tier)
        if slot is not None:
            return slot
        anywhere = self.find(extent)
        assert anywhere is not None, f"{extent} is lost"
        source = self.places[anywhere].tier
        beside = self.bring(extent, tier + (1 if source > tier else -1))
        return self.copy(beside, self.reserve(tier, self.program.bytes_of(extent)))

    def copy(self, source: int, target: int) -> int:
        content = self.places[source].content
        assert content is not None
        names = self.tiers[self.places[source].tier].name, self.tiers[self.places[target].tier].name
        op = Copy(*content, source, target, self.program.bytes_of(content[0]))
        self.add(link(*names), op, reads=(source,), writes=(target,))
        self.places[target].content = content
        return target

    def precious(self, slot: int) -> bool:
        """Whether it holds the only copy of something still needed."""
        content = self.places[slot].content
        if content is None or self.latest.get(content[0]) != content[1]:
            return False
        others = sum(place.content == content for place in self.places.values()) > 1
        return not others and content != (Extent(Kind.FULL, content[0].index), 0)

    def tidy(self) -> None:
        """Drop most of what nobody needs, move some of the rest, leave home here and there."""
        for slot in list(self.places):
            place = self.places[slot]
            if slot in self.held.values():
                continue
            if not self.precious(slot):
                if self.rng.random() < (self.restless if place.home else 0.8):
                    self.release(slot)
            elif not place.home:
                if place.tier + 1 < len(self.tiers) and self.rng.random() < 0.5:
                    self.copy(slot, self.reserve(place.tier + 1, place.size))
                    self.release(slot)
                elif self.rng.random() < self.restless:
                    self.shift(slot, self.spot(place.tier, place.size, but=slot))

    # Segments.

    def walk(self) -> list[Row]:
        self.tidy()
        visits = self.program.segment_visits(self.segment)
        for place, visit in enumerate(visits):
            self.visit(visit, *visits[place + 1 : place + 2])
            self.tidy()
        if self.segment is SegmentName.MICRO_LAST:
            for group in self.program.stepped:
                self.norm(group)
            self.add(Queue.COLL, Decide(self.next()))
        if self.segment is SegmentName.STEP:
            for group in self.program.stepped:
                self.step(group)
                self.tidy()
        for group in self.program.casts(self.segment):
            self.cast(group)
            self.tidy()
        self.go_home()
        return self.rows

    def next(self) -> int:
        self.seq += 1
        return self.seq - 1

    def able(self) -> int:
        """A tier that computes."""
        return self.rng.choice([tier for tier, row in enumerate(self.tiers) if tier == 0 or row.name == "host"])

    def visit(self, visit: Visit, after: Visit | None = None) -> None:
        uses = self.program.uses(self.segment, visit)
        following = self.program.uses(self.segment, after) if after is not None else ()
        slots = []
        for use in uses:
            if use.held:
                slots.append(self.held[use.extent])
            elif use.before is None:
                slots.append(self.reserve(0, self.program.bytes_of(use.extent)))
            elif use.extent.kind is Kind.FULL and use.before == 0 and self.lost(use.extent):
                slots.append(self.gather(use.extent.index))
            else:
                slots.append(self.bring(use.extent, 0))
        reads = tuple(slot for slot, use in zip(slots, uses, strict=True) if use.before is not None)
        writes = tuple(slot for slot, use in zip(slots, uses, strict=True) if use.before != use.after)
        self.add(Queue.COMPUTE, Run(visit.index, tuple(slots), visit.nonmodel_bytes), reads, writes)
        for slot, use in zip(slots, uses, strict=True):
            self.put(slot, (use.extent, use.after))
        stays = {use.extent for use in following if use.held}
        self.held = {use.extent: slot for slot, use in zip(slots, uses, strict=True) if use.extent in stays}
        if self.segment.is_micro:
            for group in visit.grads:
                if self.program.gradient_visits[group][-1] == visit.index:
                    self.complete(group)
            for activation in visit.takes:
                if self.program.last_takes[activation] == visit.index:
                    del self.latest[Extent(Kind.ACT, activation)]

    def lost(self, full: Extent) -> bool:
        return full not in self.latest or self.find(full) is None

    def gather(self, group: int) -> int:
        full = Extent(Kind.FULL, group)
        shard = self.bring(Extent(self.program.weight_of(group), group), 0)
        slot = self.reserve(0, self.program.bytes_of(full))
        self.add(Queue.COLL, Gather(group, shard, slot, self.next()), (shard,), (slot,))
        return self.put(slot, (full, 0))

    def complete(self, group: int) -> None:
        program, count = self.program, len(self.program.gradient_visits[group])
        target = Extent(Kind.P16 if program.overwritten(group) else Kind.RGRAD, group)
        if program.sharded:
            source = Extent(Kind.FULL if program.overwritten(group) else Kind.GRAD, group)
            origin = self.bring(source, 0)
            wire = self.reserve(0, program.bytes_of(Extent(Kind.WIRE, group)))
            shard = self.reserve(0, program.bytes_of(target))
            op = ReduceScatter(group, origin, wire, shard, self.next())
            self.add(Queue.COLL, op, (origin,), (wire, shard))
            self.put(shard, (target, count))
            del self.latest[source]
            self.release(wire)
        if not program.overwritten(group):
            self.accumulate(group)

    def accumulate(self, group: int) -> None:
        first, tier = self.program.accumulates_first(self.segment), self.able()
        total, part = Extent(Kind.ACC, group), Extent(self.program.local_gradient, group)
        gradient = self.bring(part, tier)
        slot = self.reserve(tier, self.program.bytes_of(total)) if first else self.bring(total, tier)
        op = Accumulate(group, gradient, slot, first)
        self.add(worker(self.tiers, tier), op, (gradient,), (slot,))
        self.put(slot, (total, 1 if first else 2))
        del self.latest[part]

    def norm(self, group: int) -> None:
        tier = self.able()
        slot = self.bring(Extent(Kind.P16 if self.program.overwritten(group) else Kind.ACC, group), tier)
        self.add(worker(self.tiers, tier), Norm(group, slot), (slot,))

    def step(self, group: int) -> None:
        tier, program = self.able(), self.program
        extents = [Extent(kind, group) for kind in program.home_kinds(group)]
        slots = []
        for extent in extents:
            born = extent.kind is Kind.P16 and not program.overwritten(group)
            slots.append(self.reserve(tier, program.bytes_of(extent)) if born else self.bring(extent, tier))
        self.add(worker(self.tiers, tier), Step(group, tuple(slots)), writes=tuple(slots))
        for extent, slot in zip(extents, slots, strict=True):
            if extent.kind is Kind.ACC:
                del self.latest[extent]
            else:
                self.put(slot, (extent, program.rebuilt(group) if extent.kind is Kind.P16 else 1))

    def cast(self, group: int) -> None:
        tier = self.able()
        weight = Extent(Kind.P16, group)
        master = self.bring(Extent(Kind.P32, group), tier)
        slot = self.reserve(tier, self.program.bytes_of(weight))
        self.add(worker(self.tiers, tier), Cast(group, master, slot), (master,), (slot,))
        self.put(slot, (weight, self.program.rebuilt(group)))

    # The way back.

    def go_home(self) -> None:
        leave = self.program.exit(self.segment)
        self.latest = {extent: version for extent, version in self.latest.items() if extent in leave}
        settled: set[int] = set()
        for held in sorted(self.home, key=lambda held: held.extent not in leave):
            settled.add(self.settle(held, leave.get(held.extent), settled))
        for slot in self.places.keys() - settled:
            self.release(slot)

    def settle(self, held: Held, version: int | None, settled: set[int]) -> int:
        """Have a home slot in place, with what it must hold at the end; its number."""
        slot = self.home_slot(held, settled)
        if version is None or self.places[slot].content == (held.extent, version):
            return slot
        beside = [tier for tier in (held.tier - 1, held.tier + 1) if 0 <= tier < len(self.tiers)]
        here = self.find(held.extent, held.tier)
        if here is not None and here not in settled and (not beside or self.rng.random() < self.restless):
            self.release(slot)
            self.shift(here, held.offset)
            return here
        if self.rng.random() < self.restless:
            self.release(slot)  # reserved again where it was
            slot = self.reserve(held.tier, held.bytes, held.offset)
            settled.add(slot)
        return self.copy(self.bring(held.extent, self.rng.choice(beside)), slot)

    def home_slot(self, held: Held, settled: set[int]) -> int:
        """The slot on that ground; whoever else has settled there moves away."""
        for slot, place in list(self.places.items()):
            tier, start, end = place.span
            if tier != held.tier or start >= held.offset + held.bytes or end <= held.offset:
                continue
            exact = (start, place.size) == (held.offset, held.bytes)
            ours = place.content is not None and place.content[0] == held.extent
            if exact and (ours or not self.precious(slot)) and slot not in settled:
                return slot
            self.shift(slot, self.clear(tier, end - start))
        return self.reserve(held.tier, held.bytes, held.offset)

    def clear(self, tier: int, size: int) -> int:
        """An address above everything, homes to come included."""
        ends = [place.span[2] for place in self.places.values() if place.tier == tier]
        return max([0, *ends, *(held.offset + held.bytes for held in self.home if held.tier == tier)])


# ---------------------------------------------------------------- non-model bytes and waits


def _with_nonmodel(program: Program, rows: list[Row]) -> int:
    """Bytes the compute tier needs for slots and non-model data together."""
    ahead = [row.op.nonmodel_bytes for row in rows if isinstance(row.op, Run)]
    need, nonmodel = 0, 0
    for row in rows:
        if isinstance(row.op, Run):
            need = max(need, row.top + ahead[0])
            now = ahead.pop(0)
            nonmodel = min(now, ahead[0]) if ahead else 0
        need = max(need, row.top + nonmodel)
    return need


def _write_down(program: Program, rows: list[Row], capacity: int, waits: Waits) -> tuple[Instr, ...]:
    before: list[int] = []
    last: dict[Queue, int] = {}
    instrs = []
    for place, row in enumerate(rows):
        if isinstance(row.op, Run):
            row.writes.append((0, capacity - row.op.nonmodel_bytes, capacity))
        if isinstance(row.op, Norm):
            row.writes.append((-1, row.op.group, row.op.group + 1))
        if isinstance(row.op, Decide):
            row.reads.append((-1, 0, len(program.layout.groups)))
        implied = 0
        if row.queue in last:
            implied = before[last[row.queue]] | 1 << last[row.queue]
        after = []
        for other in reversed(range(place)):
            conflict = other == place - 1 if waits is Waits.CHAIN else _conflict(row, rows[other])
            if conflict and (waits is not Waits.NEEDED or not implied >> other & 1):
                after.append(other)
                implied |= before[other] | 1 << other
        last[row.queue] = place
        before.append(implied)
        instrs.append(Instr(place, row.queue, row.op, tuple(sorted(after))))
    return tuple(instrs)


def _conflict(one: Row, two: Row) -> bool:
    return _meet(one.writes, two.writes) or _meet(one.reads, two.writes) or _meet(one.writes, two.reads)


def _meet(left: list[Span], right: list[Span]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in left for b in right)

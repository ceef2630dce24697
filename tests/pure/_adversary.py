"""An executor that wants a plan to fail.

It runs one segment instruction by instruction, in any order that queues and waits allow, on symbolic bytes: every
slot holds a token, fresh slots and those on the move hold poison. It knows nothing of clocks or races; it reports what
goes wrong in the one order it ran. `_orders` has the orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Instr,
    Norm,
    Op,
    Plan,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Shift,
    Step,
)
from ps_core._program import Program

Token = tuple[Extent, int] | str
"""A version of an extent, or words for bytes that nobody may read."""

POISON = "poison"
RUNS_ON = {
    ("device", "host"): Queue.D2H,
    ("host", "device"): Queue.H2D,
    ("host", "disk"): Queue.DISK_W,
    ("disk", "host"): Queue.DISK_R,
}


class Broken(Exception):
    """Something the executor cannot do, or a result that is wrong."""


@dataclass(slots=True)
class Room:
    """A live slot and what is in it."""

    tier: int
    offset: int
    size: int
    token: Token = POISON
    moves: int = 0
    """How often it was put somewhere else."""

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass
class Machine:
    """One process carrying out one segment."""

    program: Program
    plan: Plan
    segment: SegmentName
    rooms: dict[int, Room] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)
    done_visits: int = 0
    collectives: int = 0
    decisions: int = 0
    parts: set[int] = field(default_factory=set)
    once: set[tuple[type, int]] = field(default_factory=set)
    """Sums and norms that were made."""
    nonmodel: int = 0
    moving: dict[int, Token] = field(default_factory=dict)
    used: dict[Extent, tuple[int, int]] = field(default_factory=dict)
    """Slots of the last moment, and how often each had moved."""
    declared: list[int] = field(default_factory=list)

    def start(self, instrs: Sequence[Instr]) -> None:
        """Home as the segment finds it."""
        entry = self.program.entry(self.segment, self.plan.stepped_in_backward)
        for number, held in enumerate(self.plan.home):
            token: Token = (held.extent, entry[held.extent]) if held.extent in entry else POISON
            self._place(number, Room(held.tier, held.offset, held.bytes, token))
        self.declared = [instr.op.nonmodel_bytes for instr in instrs if isinstance(instr.op, Run)]

    # Space.

    def _place(self, number: int, room: Room) -> None:
        if room.size <= 0 or room.size % 128 or room.offset % 128 or room.offset < 0:
            raise Broken(f"slot {number} is not aligned")
        if not 0 <= room.tier < len(self.plan.tiers):
            raise Broken(f"no tier {room.tier}")
        top = self.plan.tiers[room.tier].capacity_bytes - (self.nonmodel if room.tier == 0 else 0)
        if room.end > top:
            raise Broken(f"slot {number} ends at {room.end}, above {top}")
        for other, theirs in self.rooms.items():
            if (
                other not in (number, _ghost(number))
                and theirs.tier == room.tier
                and theirs.offset < room.end
                and room.offset < theirs.end
            ):
                raise Broken(f"slots {number} and {other} overlap")
        self.rooms[number] = room

    def _nonmodel_to(self, size: int) -> None:
        self.nonmodel = size
        top = self.plan.tiers[0].capacity_bytes - size
        if top < 0:
            raise Broken(f"{size} non-model bytes on a tier of {self.plan.tiers[0].capacity_bytes}")
        for number, room in self.rooms.items():
            if room.tier == 0 and room.end > top:
                raise Broken(f"non-model data reach slot {number}")

    def _room(self, number: int) -> Room:
        if number not in self.rooms:
            raise Broken(f"slot {number} is not there")
        if number in self.moving and _ghost(number) in self.rooms:
            raise Broken(f"slot {number} is on the move")
        return self.rooms[number]

    def _take(self, number: int, extent: Extent, version: int) -> Room:
        room = self._room(number)
        if room.token != (extent, version):
            raise Broken(f"slot {number}: wanted {extent} {version}, read {room.token}")
        return room

    def _put(self, number: int, extent: Extent, version: int) -> Room:
        room = self._room(number)
        if room.size < self._bytes(extent):
            raise Broken(f"slot {number} is too small")
        room.token = (extent, version)
        return room

    def _bytes(self, extent: Extent) -> int:
        many = self.program.trace.activations if extent.kind is Kind.ACT else self.program.layout.groups
        if not 0 <= extent.index < len(many):
            raise Broken(f"no such extent: {extent}")
        return self.program.bytes_of(extent)

    def _together(self, queue: Queue, *numbers: int, tier: int | None = None) -> None:
        """All slots different and on one tier that this queue works on."""
        tiers = {self._room(number).tier for number in numbers}
        if len(tiers) != 1 or len(set(numbers)) != len(numbers):
            raise Broken(f"slots {numbers} do not go together")
        found = tiers.pop()
        if tier is not None:
            if found != tier:
                raise Broken(f"slots {numbers} are on tier {found}")
            return
        able = Queue.COMPUTE if found == 0 else Queue.CPU
        if queue is not able or (found and self.plan.tiers[found].name == "disk"):
            raise Broken(f"{queue.name} cannot compute on tier {found}")

    def _gradients(self, group: int) -> int:
        if not 0 <= group < len(self.program.layout.groups) or not self.program.gradient_visits[group]:
            raise Broken(f"group {group} has no gradient")
        return len(self.program.gradient_visits[group])

    def _collective(self, queue: Queue, seq: int) -> None:
        if queue is not Queue.COLL or seq != self.collectives:
            raise Broken(f"collective {seq} on {queue.name}, after {self.collectives}")
        self.collectives += 1

    # Instructions.

    def do(self, instr: Instr) -> None:
        """Carry out one instruction."""
        queue, op = Queue(instr.queue), instr.op
        match op:
            case Reserve(slot, tier, offset, size):
                if slot in self.reserved or slot < len(self.plan.home):
                    raise Broken(f"slot number {slot} is used twice")
                self.reserved.add(slot)
                self._place(slot, Room(tier, offset, size))
            case Release(slot):
                self._room(slot)
                del self.rooms[slot]
            case Shift(slot, offset):
                room = self._room(slot)
                host = self.plan.tiers[room.tier].name == "host"
                if queue is not (Queue.COMPUTE if room.tier == 0 else Queue.CPU if host else Queue.DISK_W):
                    raise Broken(f"{queue.name} cannot shift on tier {room.tier}")
                self._begin_shift(slot, room, offset)
            case Copy():
                self._copy(queue, op)
            case Run():
                self._run(queue, op)
            case Step():
                self._step(queue, op)
            case _:
                self._reduce(queue, op)

    def _begin_shift(self, number: int, room: Room, offset: int) -> None:
        self.moving[number] = room.token
        if offset != room.offset:
            self.rooms[_ghost(number)] = room  # the old range is not free before the move is over
            self.rooms[number] = Room(room.tier, room.offset, room.size)
            self._place(number, Room(room.tier, offset, room.size, "half a move", room.moves + 1))

    def end_shift(self, number: int) -> None:
        """A move is over: what was read when it began is now in its place."""
        token = self.moving.pop(number)
        self._room(number).token = token
        self.rooms.pop(_ghost(number), None)

    def _copy(self, queue: Queue, op: Copy) -> None:
        source, target = self._room(op.source), self._room(op.target)
        names = self.plan.tiers[source.tier].name, self.plan.tiers[target.tier].name
        if RUNS_ON.get(names) is not queue:
            raise Broken(f"{queue.name} cannot copy from {names[0]} to {names[1]}")
        if op.bytes != self._bytes(op.extent):
            raise Broken(f"{op.bytes} bytes are not all of {op.extent}")
        self._take(op.source, op.extent, op.version)
        self._put(op.target, op.extent, op.version)

    def _run(self, queue: Queue, op: Run) -> None:
        visits = self.program.segment_visits(self.segment)
        if self.done_visits == len(visits) or visits[self.done_visits].index != op.visit or queue is not Queue.COMPUTE:
            raise Broken(f"moment {op.visit} on {queue.name} after {self.done_visits} moments")
        visit = visits[self.done_visits]
        uses = self.program.uses(self.segment, visit)
        if op.nonmodel_bytes < visit.nonmodel_bytes:
            raise Broken("the moment takes more than it was given")
        self._nonmodel_to(op.nonmodel_bytes)
        if len(op.slots) != len(uses):
            raise Broken(f"moment {op.visit} has {len(uses)} uses")
        if uses:
            self._together(queue, *op.slots, tier=0)
        now = {use.extent: (number, self._room(number).moves) for number, use in zip(op.slots, uses, strict=True)}
        for number, use in zip(op.slots, uses, strict=True):
            if use.held and self.used.get(use.extent) != now[use.extent]:
                raise Broken(f"{use.extent} is still referenced, and was moved from {self.used.get(use.extent)}")
            if use.before is not None:
                self._take(number, use.extent, use.before)
            self._put(number, use.extent, use.after)
        self.used = now
        self.done_visits += 1
        following = self.declared[self.done_visits : self.done_visits + 1]
        self._nonmodel_to(min(op.nonmodel_bytes, *following) if following else 0)

    def _reduce(self, queue: Queue, op: Op) -> None:
        program, last = self.program, self.segment is SegmentName.MICRO_LAST
        if isinstance(op, ReduceScatter | Accumulate | Norm):
            if (type(op), op.group) in self.once:
                raise Broken(f"a second {type(op).__name__} of group {op.group}")
            self.once.add((type(op), op.group))
        match op:
            case Gather(group, shard, full, seq):
                self._collective(queue, seq)
                self._together(queue, shard, full, tier=0)
                if group not in range(len(program.layout.groups)):
                    raise Broken(f"there is no group {group}")
                self._take(shard, Extent(program.weight_of(group), group), 0)
                self._put(full, Extent(Kind.FULL, group), 0)
            case ReduceScatter(group, source, wire, shard, seq):
                self._collective(queue, seq)
                self._together(queue, source, wire, shard, tier=0)
                count = self._gradients(group)
                whole, part = (Kind.FULL, Kind.P16) if program.overwritten(group) else (Kind.GRAD, Kind.RGRAD)
                self._room(wire).token = POISON
                self._take(source, Extent(whole, group), count)
                if self._room(wire).size < self._bytes(Extent(Kind.WIRE, group)):
                    raise Broken(f"the wire slot has only {self._room(wire).size} bytes")
                self._put(shard, Extent(part, group), count)
            case Accumulate(group, gradient, accumulator, first):
                self._together(queue, gradient, accumulator)
                self._take(gradient, Extent(program.local_gradient, group), self._gradients(group))
                self._total(group, accumulator, first)
            case Norm(group, slot):
                self._together(queue, slot)
                self._take(slot, *self._final(group))
                self.parts.add(group)
            case Decide(seq):
                self._collective(queue, seq)
                self.decisions += 1
                if not last or self.parts != set(program.stepped):
                    raise Broken(f"decided on {sorted(self.parts)} of {program.stepped}")
            case Cast(group, master, weight):
                self._together(queue, master, weight)
                self._take(master, Extent(Kind.P32, group), 0)
                self._put(weight, Extent(Kind.P16, group), program.rebuilt(group))

    def _total(self, group: int, accumulator: int, first: bool) -> None:
        extent = Extent(Kind.ACC, group)
        starts = self.segment is SegmentName.MICRO_FIRST or self.program.accumulate == 1
        if first and starts:
            self._put(accumulator, extent, 1)
        elif first:
            self._room(accumulator).token = "a sum that lost its beginning"
        else:
            room = self._room(accumulator)
            known = not starts and room.token == (extent, 1)
            room.token = (extent, 2) if known else "a sum of something else"

    def _final(self, group: int) -> tuple[Extent, int]:
        count = self._gradients(group)
        if self.program.overwritten(group):
            return Extent(Kind.P16, group), count
        return Extent(Kind.ACC, group), 1 if self.program.accumulate == 1 else 2

    def _step(self, queue: Queue, op: Step) -> None:
        count, program = self._gradients(op.group), self.program
        kinds = program.home_kinds(op.group)
        if len(op.slots) != len(kinds):
            raise Broken(f"a step of {op.group} takes {len(kinds)} slots")
        if self.segment is SegmentName.MICRO_LAST and op.group not in self.parts:
            raise Broken(f"{op.group} is stepped before its norm is known")
        self._together(queue, *op.slots)
        for kind, number in zip(kinds, op.slots, strict=True):
            extent = Extent(kind, op.group)
            if kind is Kind.ACC:
                self._take(number, extent, 1)
            elif kind is Kind.P16:
                if program.overwritten(op.group):
                    self._take(number, extent, count)
                self._put(number, extent, program.rebuilt(op.group))
            else:
                self._take(number, extent, 0)
                self._put(number, extent, 1)

    def finish(self) -> None:
        """Home as the next segment wants it, and nothing else."""
        if self.done_visits != len(self.program.segment_visits(self.segment)):
            raise Broken("moments are missing")
        if self.decisions != (self.segment is SegmentName.MICRO_LAST):
            raise Broken(f"{self.decisions} decisions")
        leave = self.program.exit(self.segment, self.plan.stepped_in_backward)
        left = {(room.tier, room.offset, room.size): room.token for room in self.rooms.values()}
        for held in self.plan.home:
            token = left.pop((held.tier, held.offset, held.bytes), "no slot")
            if token == "no slot" or (held.extent in leave and token != (held.extent, leave[held.extent])):
                raise Broken(f"home of {held.extent}: {token}")
        if left:
            raise Broken(f"left behind: {left}")


def _ghost(number: int) -> int:
    return -1 - number

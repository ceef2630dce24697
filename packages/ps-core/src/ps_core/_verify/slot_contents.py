"""Track what each instruction does to a segment's slots, and compare with what the program needs.

Contents are (extent, version), never bytes: see [Note: extents and versions] in `_extents`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Instr,
    Norm,
    Plan,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Segment,
    Shift,
    Step,
    link,
    worker,
)
from ps_core._program import Program
from ps_core._verify.order import BEGINNING, START, Clock, Stamp
from ps_core._verify.plan_fault import Fault
from ps_core._verify.ranges import NON_MODEL
from ps_core._verify.slots import Slot, Slots, describe, ids

_ANYWHERE: tuple[type, ...] = (Reserve, Release, Copy, Shift)


def allowed_in(program: Program, segment: SegmentName) -> frozenset[type]:
    """Return the instructions that a segment may have."""
    if segment is SegmentName.STEP:
        return frozenset((*_ANYWHERE, Step))
    if segment in (SegmentName.SKIP, SegmentName.PROLOGUE):
        return frozenset((*_ANYWHERE, Cast))
    moments = (*_ANYWHERE, Run, *((Gather,) if program.sharded else ()))
    if segment is SegmentName.EVAL:
        return frozenset(moments)
    accumulates = not all(map(program.overwritten, program.stepped))
    gradients = (*((ReduceScatter,) if program.sharded else ()), *((Accumulate,) if accumulates else ()))
    last = (Norm, Decide) if segment is SegmentName.MICRO_LAST else ()
    early = (Step,) if last and program.may_step_in_backward else ()
    return frozenset((*moments, *gradients, *last, *early))


def sizes(program: Program) -> dict[Extent, int]:
    """Return the bytes of every possible extent."""
    kinds = [kind for kind in Kind if kind is not Kind.ACT]
    extents = [Extent(kind, group.index) for group in program.layout.groups for kind in kinds]
    extents += [Extent(Kind.ACT, index) for index in range(len(program.trace.activations))]
    return {extent: program.bytes_of(extent) for extent in extents}


def _queues_between(plan: Plan) -> dict[tuple[int, int], Queue]:
    """Return, for each pair of adjacent tiers, the queue that copies from the first to the second."""
    names = [tier.name for tier in plan.tiers]
    pairs = [pair for low in range(len(names) - 1) for pair in ((low, low + 1), (low + 1, low))]
    return {(source, target): link(names[source], names[target]) for source, target in pairs}


class Contents:
    """The contents of one segment's slots during the walk."""

    def __init__(self, program: Program, plan: Plan, segment: Segment, sizes: dict[Extent, int]) -> None:
        self._program = program
        self._plan = plan
        self._segment = segment.name
        self._sizes = sizes
        self._early = plan.stepped_in_backward
        self._slots = Slots(plan.tiers, plan.home, program.entry(segment.name, self._early))
        self._links = _queues_between(plan)
        self._workers = [worker(plan.tiers, tier) for tier in range(len(plan.tiers))]
        self._visits = program.segment_visits(segment.name)
        self._ran = 0
        self._used: dict[Extent, tuple[int, Stamp]] = {}
        """The extents of the last moment: the slot, and the instruction that put each there."""
        self._nonmodel_ahead = [instr.op.nonmodel_bytes for instr in segment.instrs if isinstance(instr.op, Run)]
        self._nonmodel_bytes = 0
        self._seq = 0
        self._decisions = 0
        self._norms: dict[int, Stamp | None] = dict.fromkeys(program.stepped)
        """The norm of each group that gets a gradient; None: not taken yet."""
        self._done: set[tuple[type, int]] = set()
        """Instructions that a group may have once."""
        self._handlers = self._choose_handlers()
        self._me = BEGINNING
        self._clock = START

    def _choose_handlers(self) -> dict[type, Callable[[Any], None]]:
        handlers: dict[type, Callable[[Any], None]] = {
            Reserve: self._reserve,
            Release: self._release,
            Copy: self._copy,
            Shift: self._shift,
            Gather: self._gather,
            ReduceScatter: self._reduce_scatter,
            Run: self._run,
            Accumulate: self._accumulate,
            Norm: self._norm,
            Decide: self._decide,
            Step: self._step,
            Cast: self._cast,
        }
        allowed = allowed_in(self._program, self._segment)
        return {op: handler for op, handler in handlers.items() if op in allowed}

    def apply(self, instr: Instr, me: Stamp, clock: Clock) -> None:
        """Apply an instruction; raise `Fault` if that breaks a rule in any order."""
        self._me, self._clock = me, clock
        handler = self._handlers.get(type(instr.op))
        if handler is None:
            raise Fault(f"an instruction for {self._segment.value}", type(instr.op).__name__)
        handler(instr.op)

    def finish(self) -> None:
        """Raise `Fault` unless the segment ends in its home placement with all its work done."""
        if self._ran < len(self._visits):
            raise Fault(f"moment {self._visits[self._ran].name!r} run", "it never is")
        wanted = int(self._segment is SegmentName.MICRO_LAST)
        if self._decisions != wanted:
            raise Fault(f"{wanted} decisions", f"{self._decisions}")
        live = self._slots.live
        at = {(slot.tier, slot.offset, slot.bytes): slot for slot in live.values()}
        exits = self._program.exit(self._segment, self._early)
        for held in self._plan.home:
            slot = at.pop((held.tier, held.offset, held.bytes), None)
            home = f"home of {held.extent.kind.value} of {held.extent.index}"
            if slot is None:
                raise Fault(f"{home} in place at the end", "no such slot")
            version = exits.get(held.extent)
            if version is not None and slot.content != (held.extent, version):
                raise Fault(f"{home} to end with version {version}", describe(slot.content), others=ids(slot.writers))
        for slot in at.values():
            raise Fault("nothing but home at the end", f"slot {slot.number}")

    # What all instructions need.

    def _slot(self, number: int) -> Slot:
        return self._slots.get(number, self._clock)

    def _slots_on(self, tier: int | None, *numbers: int) -> list[Slot]:
        """Return different slots, all on one tier (None: the first one's)."""
        if len(set(numbers)) < len(numbers):
            raise Fault("different slots", f"slots {numbers}")
        slots = [self._slot(number) for number in numbers]
        for slot in slots:
            tier = slot.tier if tier is None else tier
            if slot.tier != tier:
                raise Fault(f"slot {slot.number} on tier {tier}", f"it is on tier {slot.tier}")
        return slots

    def _worker_slots(self, *numbers: int) -> list[Slot]:
        """Return different slots on one tier that can compute, if this is its worker."""
        slots = self._slots_on(None, *numbers)
        tier = slots[0].tier
        if tier and self._workers[tier] is not Queue.CPU:
            raise Fault("a tier that can compute", self._plan.tiers[tier].name)
        self._check_queue(self._workers[tier])
        return slots

    def _check_queue(self, queue: Queue) -> None:
        if self._me.queue != queue:
            raise Fault(f"queue {queue.name}", Queue(self._me.queue).name)

    def _read(self, slot: Slot, extent: Extent, version: int) -> None:
        self._slots.read(slot, (extent, version), self._me, self._clock)

    def _write(self, slot: Slot, extent: Extent, version: int) -> None:
        size = self._sizes[extent]
        if slot.bytes < size:
            raise Fault(f"{size} bytes in slot {slot.number}", f"{slot.bytes}")
        self._slots.write(slot, (extent, version), self._me, self._clock)

    def _learning(self, group: int) -> int:
        """Return how many gradient moments a group has; raise if it has none."""
        if group not in self._norms:
            raise Fault("a group that gets a gradient", f"group {group}")
        return len(self._program.gradient_visits[group])

    def _check_once(self, op: ReduceScatter | Accumulate | Norm) -> None:
        """Raise `Fault` if a group has such an instruction already."""
        key = type(op), op.group
        if key in self._done:
            raise Fault(f"one {type(op).__name__} of group {op.group}", "another one")
        self._done.add(key)

    def _collective(self, seq: int) -> None:
        self._check_queue(Queue.COLL)
        if seq != self._seq:
            raise Fault(f"seq {self._seq}", f"{seq}")
        self._seq += 1

    # Slots and moves.

    def _reserve(self, op: Reserve) -> None:
        self._slots.reserve(op.slot, (op.tier, op.offset, op.bytes), self._me, self._clock)

    def _release(self, op: Release) -> None:
        self._slots.release(op.slot, self._me, self._clock)

    def _shift(self, op: Shift) -> None:
        self._check_queue(self._workers[self._slot(op.slot).tier])
        self._slots.shift(op.slot, op.offset, self._me, self._clock)

    def _copy(self, op: Copy) -> None:
        source, target = self._slot(op.source), self._slot(op.target)
        queue = self._links.get((source.tier, target.tier))
        if queue is None:
            raise Fault("slots on neighbouring tiers", f"tiers {source.tier} and {target.tier}")
        self._check_queue(queue)
        self._read(source, op.extent, op.version)
        if op.bytes != self._sizes[op.extent]:
            raise Fault(f"{self._sizes[op.extent]} bytes", f"{op.bytes}")
        self._write(target, op.extent, op.version)

    # Moments and gradients.

    def _run(self, op: Run) -> None:
        self._check_queue(Queue.COMPUTE)
        wanted = self._visits[self._ran] if self._ran < len(self._visits) else None
        if wanted is None or op.visit != wanted.index:
            raise Fault("no more moments" if wanted is None else f"moment {wanted.index}", f"moment {op.visit}")
        self._raise_nonmodel(op.nonmodel_bytes, wanted.nonmodel_bytes)
        uses = self._program.uses(self._segment, wanted)
        if len(op.slots) != len(uses):
            raise Fault(f"{len(uses)} slots", f"{len(op.slots)}")
        slots = self._slots_on(0, *op.slots)
        for slot, (extent, before, after, held) in zip(slots, uses, strict=True):
            if held:
                self._check_held(slot, extent)
            if before is not None:
                self._read(slot, extent, before)
            if before != after:
                self._write(slot, extent, after)
        self._used = {use.extent: (slot.number, slot.since) for slot, use in zip(slots, uses, strict=True)}

    def _check_held(self, slot: Slot, extent: Extent) -> None:
        """Raise `Fault` if an extent has moved since the moment before.

        Whatever moves or releases a slot is ordered against the moments that use it, so one order tells of all.
        """
        number, since = self._used.get(extent, (-1, BEGINNING))
        if (slot.number, slot.since) != (number, since):
            name = f"{extent.kind.value} of {extent.index}, still referenced since the moment before,"
            moved = f"slot {slot.number}" if slot.number != number else f"moved by instruction {slot.since.id}"
            raise Fault(f"{name} to stay in slot {number}", moved, others=ids([slot.since]))

    def _raise_nonmodel(self, nonmodel_bytes: int, wanted_bytes: int) -> None:
        """Set the non-model bytes of this moment, and take back those that it will not need until the next."""
        if not nonmodel_bytes >= wanted_bytes:
            raise Fault(f"{wanted_bytes} non-model bytes", f"{nonmodel_bytes}")
        ranges, capacity = self._slots.ranges[0], self._plan.tiers[0].capacity_bytes
        ranges.check_free(capacity - nonmodel_bytes, capacity - self._nonmodel_bytes, self._clock)
        self._ran += 1
        stays = min(nonmodel_bytes, self._nonmodel_ahead[self._ran]) if self._ran < len(self._nonmodel_ahead) else 0
        ranges.paint(capacity - stays, capacity, NON_MODEL)
        ranges.paint(capacity - nonmodel_bytes, capacity - stays, self._me)
        self._nonmodel_bytes = stays

    def _gather(self, op: Gather) -> None:
        self._collective(op.seq)
        shard, full = self._slots_on(0, op.shard, op.full)
        if op.group not in range(len(self._program.layout.groups)):
            raise Fault("a group of the layout", f"group {op.group}")
        self._read(shard, Extent(self._program.weight_of(op.group), op.group), 0)
        self._write(full, Extent(Kind.FULL, op.group), 0)

    def _reduce_scatter(self, op: ReduceScatter) -> None:
        self._collective(op.seq)
        self._check_once(op)
        version, overwritten = self._learning(op.group), self._program.overwritten(op.group)
        source, wire, shard = self._slots_on(0, op.source, op.wire, op.shard)
        self._read(source, Extent(self._program.gradient_of(op.group), op.group), version)
        scratch = self._sizes[Extent(Kind.WIRE, op.group)]
        if wire.bytes < scratch:
            raise Fault(f"a wire slot of {scratch} bytes", f"{wire.bytes}")
        self._slots.write(wire, None, self._me, self._clock)
        self._write(shard, Extent(Kind.P16 if overwritten else Kind.RGRAD, op.group), version)

    def _accumulate(self, op: Accumulate) -> None:
        version, first = self._learning(op.group), self._program.accumulates_first(self._segment)
        if op.first is not first:
            raise Fault(f"first {first}", f"{op.first}")
        self._check_once(op)
        gradient, accumulator = self._worker_slots(op.gradient, op.accumulator)
        total = Extent(Kind.ACC, op.group)
        self._read(gradient, Extent(self._program.local_gradient, op.group), version)
        if not first:
            self._read(accumulator, total, 1)
        self._write(accumulator, total, 1 if first else 2)

    def _norm(self, op: Norm) -> None:
        self._check_once(op)
        version = self._learning(op.group)
        (slot,) = self._worker_slots(op.slot)
        if self._program.overwritten(op.group):
            self._read(slot, Extent(Kind.P16, op.group), version)
        else:
            self._read(slot, Extent(Kind.ACC, op.group), 1 if self._program.accumulates_first(self._segment) else 2)
        self._norms[op.group] = self._me

    def _decide(self, op: Decide) -> None:
        self._collective(op.seq)
        self._decisions += 1
        for group in self._norms:
            self._check_normed(group, "the decision")

    def _check_normed(self, group: int, use: str) -> None:
        """Raise `Fault` unless this waits for the group's norm, which finds gradients that are not finite."""
        part = self._norms[group]
        if part is None or not part.before(self._clock):
            found = "none before it" if part is None else "none that is waited for"
            raise Fault(f"the norm of group {group} before {use}", found, others=ids([part] if part else []))

    # Updates.

    def _step(self, op: Step) -> None:
        gradient = self._learning(op.group)
        if self._segment is SegmentName.MICRO_LAST:
            self._check_normed(op.group, "its step")
        kinds = self._program.home_kinds(op.group)
        if len(op.slots) != len(kinds):
            raise Fault(f"{len(kinds)} slots", f"{len(op.slots)}")
        slots = dict(zip(kinds, self._worker_slots(*op.slots), strict=True))
        if self._plan.step_tiers and self._plan.step_tiers[op.group] != slots[Kind.P32].tier:
            raise Fault(f"tier {self._plan.step_tiers[op.group]}", f"tier {slots[Kind.P32].tier}")
        for kind, slot in slots.items():
            extent = Extent(kind, op.group)
            if kind is Kind.ACC:
                self._read(slot, extent, 1)
            elif kind is Kind.P16:
                if self._program.overwritten(op.group):
                    self._read(slot, extent, gradient)
                self._write(slot, extent, self._program.rebuilt(op.group))
            else:
                self._read(slot, extent, 0)
                self._write(slot, extent, 1)

    def _cast(self, op: Cast) -> None:
        master, weight = self._worker_slots(op.master, op.weight)
        self._read(master, Extent(Kind.P32, op.group), 0)
        self._write(weight, Extent(Kind.P16, op.group), self._program.rebuilt(op.group))

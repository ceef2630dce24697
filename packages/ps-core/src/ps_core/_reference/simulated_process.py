"""Simulate one process: its memory, its slots' contents, and what it remembers between instructions."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ps_core._errors import PlanMismatch
from ps_core._extents import STATES, Extent, Kind, Precision, SegmentName
from ps_core._plan import Plan
from ps_core._program import Program
from ps_core._reference.floats import Floats, pack, unpack
from ps_core._reference.process_memory import Bank, Slot, SlotKey, Tag
from ps_core._reference.state_lifecycle import Lifecycle
from ps_core._reference.training_rules import Decision, Network, Saved, Training, last_reads

FP32 = Precision.FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One segment of the run, and the micro-batch whose data it uses."""

    serial: int
    name: SegmentName
    iteration: int
    micro: int
    loss_scale: float
    decision: Decision | None


@dataclass(slots=True)
class Process:
    """A rank's memory, and what it remembers between instructions."""

    rank: int
    network: Network
    program: Program
    plan: Plan
    training: Training
    bank: Bank = field(init=False)
    lifecycle: Lifecycle | None
    """The tensors' states; None if segments overlap, and so their events."""
    losses: dict[int, list[float]] = field(default_factory=dict)
    parts: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """Norm parts by group."""
    legs: list[SegmentName] = field(default_factory=list)
    """Names of the segments begun so far, by serial number."""
    claimed: set[SlotKey] = field(default_factory=set)
    """Home slots that segments have used."""
    saved: Saved = field(default_factory=dict)
    aside: dict[int, Floats] = field(default_factory=dict)
    """Partial gradients of tensors whose weights are still to be read."""
    over: set[int] = field(default_factory=set)
    """Tensors whose gradient was written over their weight."""
    running: int = -1
    """Serial number of the pass whose moments are running."""
    used: dict[Extent, tuple[Slot, int]] = field(default_factory=dict)
    """Slots of the last moment, and how often each had been moved."""
    last_reads: tuple[int, ...] = field(init=False)
    early: frozenset[int] = field(init=False)
    """Groups that the plan steps within backward."""

    def __post_init__(self) -> None:
        self.bank = Bank(self.plan)
        self.last_reads = last_reads(self.program.trace)
        self.early = self.plan.stepped_in_backward
        first = SegmentName.EVAL if not self.program.training else self.program.segments[0]
        entry = self.program.entry(first)
        for number, held in enumerate(self.plan.home):
            slot = self.bank.slots[-1, number]
            if held.extent in entry:
                values = self.initial(held.extent)
                self.bank.view(slot)[: len(values)] = values
                slot.tag = Tag(held.extent, entry[held.extent], 0)

    # Contents.

    def initial(self, extent: Extent) -> bytes:
        """Return what an extent holds before anything has run."""
        kind, index = extent
        if kind in STATES:
            return bytes(self.program.bytes_of(extent))
        group = self.program.layout.groups[index]
        values = array("f")
        for tensor in group.tensors:
            values.extend(self.network.initial(tensor))
        values.extend(bytes(group.shard_numel * self.program.ranks - group.numel))
        start = self.rank * group.shard_numel
        return pack(values[start : start + group.shard_numel], self.precision(extent))

    def precision(self, extent: Extent) -> Precision:
        """Return the precision that an extent is stored in."""
        kinds = (Kind.P32, *STATES, Kind.ACC, Kind.RGRAD)
        return FP32 if extent.kind in kinds else self.program.precision_of(extent.index)

    def key(self, leg: Leg, slot: int) -> SlotKey:
        """Return the key of a leg's slot among all slots."""
        key = (leg.serial, slot)
        if slot < len(self.plan.home) and key not in self.claimed:
            self.claimed.add(key)
            self.bank.claim(key, self.plan.home[slot])
        return key

    def holding(self, leg: Leg, number: int, extent: Extent, version: int | None, tier: int | None = None) -> Slot:
        """Return a slot; raise unless it holds this version (None: any) and is on this tier (None: any)."""
        slot = self.bank.slot(self.key(leg, number))
        if tier is not None and slot.tier != tier:
            raise PlanMismatch(f"{leg.name.value}: slot {number} is on tier {slot.tier}, expected {tier}")
        self.check(leg, slot, extent, version)
        return slot

    def check(self, leg: Leg, slot: Slot, extent: Extent, version: int | None) -> None:
        """Raise `PlanMismatch` unless a slot has room for an extent, and holds this version of it (None: any)."""
        where = f"process {self.rank}, {leg.name.value}, slot at {slot.offset} of tier {slot.tier}"
        if slot.bytes < self.program.bytes_of(extent):
            raise PlanMismatch(f"{where}: too small for {extent.kind.value} of {extent.index}")
        found = None if slot.tag is None else self._as_seen_by(leg.serial, slot.tag)
        if version is not None and found != (extent, version):
            wanted = f"{extent.kind.value} of {extent.index} in version {version}"
            raise PlanMismatch(f"{where}: expected {wanted}, found {found or 'poison'}")

    def _as_seen_by(self, serial: int, tag: Tag) -> tuple[Extent, int] | None:
        """Return an earlier segment's contents of a slot with the versions that a later one counts."""
        version: int | None = tag.version
        for earlier in range(tag.serial, serial):
            if self.program.exit(self.legs[earlier], self.early).get(tag.extent) != version:
                return None
            version = self.program.entry(self.legs[earlier + 1], self.early).get(tag.extent)
        return None if version is None else (tag.extent, version)

    def read(self, slot: Slot, extent: Extent) -> Floats:
        """Return the values of an extent that a slot holds."""
        return unpack(self.bank.view(slot)[: self.program.bytes_of(extent)], self.precision(extent))

    def write(self, leg: Leg, slot: Slot, extent: Extent, version: int, values: Floats | None = None) -> None:
        """Note what a slot holds from now on, and write the values if they are given."""
        if values is not None:
            self.put(slot, extent, 0, values)
        slot.tag = Tag(extent, version, leg.serial)

    def put(self, slot: Slot, extent: Extent, offset: int, values: Floats) -> None:
        """Write values from an element offset on."""
        data = pack(values, self.precision(extent))
        start = offset * (len(data) // len(values)) if values else 0
        self.bank.view(slot)[start : start + len(data)] = data

    def begin(self, leg: Leg) -> None:
        """Begin a pass over the moments with nothing saved."""
        self.running = leg.serial
        self.saved, self.aside, self.over, self.used = {}, {}, set(), {}
        if leg.name is not SegmentName.EVAL:
            self.parts.clear()

    def pieces(self, group: int) -> list[tuple[int, int, int]]:
        """Return the tensors of this process's shard: each with its first element in the shard and its end."""
        row = self.program.layout.groups[group]
        first = self.rank * row.shard_numel
        found = []
        for tensor, offset in zip(row.tensors, row.offsets, strict=True):
            start = max(offset - first, 0)
            end = min(offset + self.program.trace.tensors[tensor].numel - first, row.shard_numel)
            if start < end:
                found.append((tensor, start, end))
        return found

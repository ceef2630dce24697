"""Simulate one process's memory as bytes: freed bytes are poisoned, reads of stale contents are refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ps_core._errors import PlanMismatch
from ps_core._extents import Extent
from ps_core._plan import Held, Instr, Plan, Reserve, Shift

POISON = 0xFF
"""The byte that fills memory without contents: not-a-number in every precision."""

SlotKey: TypeAlias = tuple[int, int]
"""A segment's serial number and its number for the slot (-1: before the first segment)."""


class Tag(NamedTuple):
    """Say what a slot holds: an extent's version, as a segment counts it."""

    extent: Extent
    version: int
    serial: int


@dataclass(slots=True)
class Slot:
    """A range of one tier, and its contents (None: poison)."""

    tier: int
    offset: int
    bytes: int
    tag: Tag | None = None
    moves: int = 0
    """How often the slot was moved."""


class Bank:
    """The tiers of one process. Breaking a rule of the plan's memory raises `PlanMismatch`."""

    def __init__(self, plan: Plan) -> None:
        self.tiers = plan.tiers
        self.slots: dict[SlotKey, Slot] = {}
        self.nonmodel_bytes = 0
        self._bytes = [bytearray([POISON]) * extent for extent in used_extents(plan)]
        for number, held in enumerate(plan.home):
            self._own(held.tier, held.offset, held.bytes)
            self.slots[-1, number] = Slot(held.tier, held.offset, held.bytes)

    def used_bytes(self, tier: int) -> int:
        """Return the bytes of the tier's slots."""
        return sum(slot.bytes for slot in self.slots.values() if slot.tier == tier)

    def slot(self, key: SlotKey) -> Slot:
        """Return an existing slot."""
        if key not in self.slots:
            raise PlanMismatch(f"slot {key[1]} is used while it is not reserved")
        return self.slots[key]

    def reserve(self, key: SlotKey, op: Reserve) -> None:
        """Reserve a range."""
        if key in self.slots or not 0 <= op.tier < len(self.tiers):
            raise PlanMismatch(f"slot {op.slot} cannot be reserved (again, or on tier {op.tier})")
        self._own(op.tier, op.offset, op.bytes)
        self.slots[key] = Slot(op.tier, op.offset, op.bytes)

    def _at_home(self, held: Held) -> SlotKey | None:
        for key, slot in self.slots.items():
            if (slot.tier, slot.offset, slot.bytes) == (held.tier, held.offset, held.bytes):
                return key
        return None

    def home(self, held: Held) -> Slot:
        """Return the slot that takes exactly a home slot's range, under any number."""
        key = self._at_home(held)
        if key is None:
            raise PlanMismatch(f"the home of {held.extent.kind.value} of {held.extent.index} is not in place")
        return self.slots[key]

    def claim(self, key: SlotKey, held: Held) -> None:
        """Give a segment a home slot, which an earlier segment may have left under another number."""
        there = self._at_home(held)
        if there is not None:
            self.slots[key] = self.slots.pop(there)

    def release(self, key: SlotKey) -> None:
        """Release a range, and poison it."""
        slot = self.slot(key)
        self._poison(slot.tier, slot.offset, slot.bytes)
        del self.slots[key]

    def shift(self, key: SlotKey, op: Shift) -> None:
        """Move a slot within its tier, and poison the bytes that it leaves."""
        slot = self.slot(key)
        self._own(slot.tier, op.offset, slot.bytes, but=slot)
        data = bytes(self.view(slot))
        self._poison(slot.tier, slot.offset, slot.bytes)
        slot.moves += slot.offset != op.offset
        slot.offset = op.offset
        self.view(slot)[:] = data

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes."""
        return memoryview(self._bytes[slot.tier])[slot.offset : slot.offset + slot.bytes]

    def rise(self, nonmodel_bytes: int) -> None:
        """Set the size of the range for non-model data at the top of the compute tier; its contents are destroyed."""
        start = self.tiers[0].capacity_bytes - nonmodel_bytes
        if start < 0:
            raise PlanMismatch(f"{nonmodel_bytes} non-model bytes do not fit {self.tiers[0].name}")
        self.nonmodel_bytes = 0
        self._own(0, start, nonmodel_bytes)
        self.nonmodel_bytes = nonmodel_bytes
        end = len(self._bytes[0])
        if start < end:
            self._poison(0, start, end - start)

    def _poison(self, tier: int, offset: int, count: int) -> None:
        self._bytes[tier][offset : offset + count] = bytes([POISON]) * count

    def _own(self, tier: int, offset: int, count: int, but: Slot | None = None) -> None:
        """Check that a range may be owned: it is within the budget, and has no other owner."""
        end, name = offset + count, self.tiers[tier].name
        top = self.tiers[tier].capacity_bytes - (self.nonmodel_bytes if tier == 0 else 0)
        if offset < 0 or count < 0 or end > top:
            raise PlanMismatch(f"{offset} to {end} is not within the {top} bytes that model data may use on {name}")
        for other in self.slots.values():
            if other.tier == tier and other is not but and offset < other.offset + other.bytes and other.offset < end:
                raise PlanMismatch(f"{offset} to {end} on {name} overlaps a slot at {other.offset}")


def used_extents(plan: Plan) -> list[int]:
    """Return, for each tier, the end of the highest address that the plan ever uses, within the budget."""
    ends = [0] * len(plan.tiers)
    for tier, _, end in ranges_of(plan.home):
        ends[tier] = max(ends[tier], end)
    for segment in plan.segments:
        for rows in slot_ranges(plan, segment.instrs).values():
            for tier, _, end in rows:
                ends[tier] = max(ends[tier], end)
    return [min(end, tier.capacity_bytes) for end, tier in zip(ends, plan.tiers, strict=True)]


Range: TypeAlias = tuple[int, int, int]
"""Tier, start, end."""


def ranges_of(home: Iterable[Held]) -> Iterator[Range]:
    """Return the ranges of home slots."""
    return ((held.tier, held.offset, held.offset + held.bytes) for held in home)


def slot_ranges(plan: Plan, instrs: Iterable[Instr]) -> dict[int, list[Range]]:
    """Return every range that each slot occupies at some time in a segment; only on existing tiers."""
    found = {number: [row] for number, row in enumerate(ranges_of(plan.home))}
    sizes = {number: held.bytes for number, held in enumerate(plan.home)}
    ops = [instr.op for instr in instrs]
    for op in ops:
        if isinstance(op, Reserve) and 0 <= op.tier < len(plan.tiers):
            sizes[op.slot] = op.bytes
            found.setdefault(op.slot, []).append((op.tier, op.offset, op.offset + op.bytes))
    for op in ops:  # a shift may be listed before the slot's reservation, which it waits for
        if isinstance(op, Shift) and op.slot in found:
            tier = found[op.slot][0][0]
            found[op.slot].append((tier, op.offset, op.offset + sizes[op.slot]))
    return found

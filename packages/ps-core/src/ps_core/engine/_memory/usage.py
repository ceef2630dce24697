"""Count the bytes that each tier has in use, and give out the addresses of the compute tier.

The compute tier is one block of memory, in which every slot has a range of its own.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import torch

from ps_core._errors import PlanMismatch
from ps_core._plan import Queue
from ps_core._planner.holds import Span, lowest
from ps_core.engine._devices.device import Device
from ps_core.engine._memory.chunk import Slot

POISON = 0xFF
"""Fills freed memory where asked to: not-a-number in every precision."""

_PIECE_BYTES = 2**20
"""Bytes that `Arena.shift` copies at a time, by way of other memory."""


class ByteLedger:
    """Bytes by tier, slots and non-model bytes apart; only the methods of this class write its attributes."""

    def __init__(self, tiers: int) -> None:
        self.used_bytes = [0] * tiers
        """By tier: bytes of slots that are reserved now."""
        self.peak_bytes = [0] * tiers
        """By tier: the most bytes in use at one time, with the compute tier's non-model bytes."""
        self.nonmodel_bytes = 0
        """Non-model bytes on the compute tier, as last measured or planned."""
        self.highest_nonmodel_bytes = 0
        """The most non-model bytes so far."""
        self.highest_rise_bytes = 0
        """The most by which non-model bytes rose within one moment of a backward pass."""
        self.promoted_bytes = 0
        """Bytes of shards that are on the compute tier only while there is room for them."""
        self.peak_besides_bytes = 0
        """The most bytes of the compute tier in use at one time without promoted shards."""
        self.foreseen_bytes = 0
        """Bytes of the compute tier that a whole pass needs by its fake trace, where they do not fit; else 0."""
        self.left_over_bytes = 0
        """Non-model bytes alive at the start of this pass, if an exception ended the pass before; else 0."""
        self.fixed_host_bytes = 0
        """Bytes of the host tier that embedding tables keep for good."""

    def add(self, tier: int, size: int) -> None:
        """Count the bytes of a slot that was reserved."""
        total = self.used_bytes[tier] = self.used_bytes[tier] + size
        if tier == 0:
            total += self.nonmodel_bytes
            self.peak_besides_bytes = max(self.peak_besides_bytes, total - self.promoted_bytes)
        self.peak_bytes[tier] = max(self.peak_bytes[tier], total)

    def remove(self, tier: int, size: int) -> None:
        """Stop counting the bytes of a slot that was released."""
        self.used_bytes[tier] -= size

    def fix_on_host(self, home_bytes: int, gradient_bytes: int) -> None:
        """Count embedding tables: home slots, which are reserved already, and gradients, which never get a slot."""
        self.fixed_host_bytes = home_bytes + gradient_bytes
        self.add(1, gradient_bytes)

    def set_nonmodel(self, nonmodel_bytes: int) -> None:
        """Store how many non-model bytes are on the compute tier now."""
        self.nonmodel_bytes = nonmodel_bytes

    def begin_moment(self, nonmodel_bytes: int) -> None:
        """Count the non-model bytes that a planned moment may have, as if they were there."""
        self.nonmodel_bytes = nonmodel_bytes
        self.update_peaks()

    def end_moment(self, peak_nonmodel_bytes: int, *, backward: bool) -> None:
        """Store the most non-model bytes of a moment that is over."""
        if backward:
            self.highest_rise_bytes = max(self.highest_rise_bytes, peak_nonmodel_bytes - self.nonmodel_bytes)
        self.nonmodel_bytes = peak_nonmodel_bytes
        self.update_peaks()

    def update_peaks(self) -> None:
        """Compare every peak with what is in use now."""
        nonmodel = self.nonmodel_bytes
        self.highest_nonmodel_bytes = max(self.highest_nonmodel_bytes, nonmodel)
        for tier, used in enumerate(self.used_bytes):
            total = used + (nonmodel if tier == 0 else 0)
            self.peak_bytes[tier] = max(self.peak_bytes[tier], total)
            if tier == 0:
                self.peak_besides_bytes = max(self.peak_besides_bytes, total - self.promoted_bytes)

    def note_promoted(self, size: int) -> None:
        """Count a shard that came to the compute tier; below 0: one that went back."""
        self.promoted_bytes += size

    def note_besides(self, used_bytes: int) -> None:
        """Store that everything but promoted shards is known to need so many bytes of the compute tier."""
        self.peak_besides_bytes = max(self.peak_besides_bytes, used_bytes)

    def note_foreseen(self, needed_bytes: int) -> None:
        """Store what a fake trace says that a whole pass needs, where that is too much; 0: the pass fits."""
        self.foreseen_bytes = needed_bytes

    def note_left_over(self, size: int) -> None:
        """Store how many non-model bytes an exception left alive."""
        self.left_over_bytes = size


class Arena:
    """The compute tier's slots in order of address.

    Addresses go up to the tier's budget. The block of memory may end before that; a slot beyond its end has memory of
    its own. Where the device overcommits (`Device.overcommits`), the block covers the whole budget.
    """

    def __init__(self, device: Device, capacity_bytes: int, *, exists: bool, host: bool, poison: bool) -> None:
        """``exists``: slots of the compute tier have addresses at all; ``host``: the block is the system's memory."""
        self._device, self._capacity_bytes, self._poison = device, capacity_bytes, poison
        self.exists = exists
        self._returns_pages = exists and host and not poison
        self._slots: list[Slot] = []
        """In order of address."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if exists:
            self._memory = self._block(capacity_bytes if device.overcommits else 0)

    # Slots.

    def reserve(self, size: int, offset: int) -> Slot:
        """Reserve a range at an address; `PlanMismatch` if another slot has some of it."""
        slot = Slot(0, offset, size, self._window(offset, size))
        self._insert(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Give a slot's range back."""
        self._slots.remove(slot)

    def shift(self, slot: Slot, offset: int, queue: Queue) -> None:
        """Move a slot and its bytes to another address; the two ranges may overlap."""
        target = self._window(offset, slot.bytes)  # of all this, only that may fail
        self._slots.remove(slot)
        old, slot.offset = slot.offset, offset
        self._insert(slot)
        self._device.work(queue, "shift", (slot.memory,), (target,))
        starts = range(0, slot.bytes, _PIECE_BYTES)
        with self._device.on(queue):
            for start in starts if offset < old else reversed(starts):
                piece = slice(start, min(start + _PIECE_BYTES, slot.bytes))
                target[piece].copy_(slot.memory[piece].clone())
        slot.memory = target

    def _insert(self, slot: Slot) -> None:
        end = slot.offset + slot.bytes
        place = len(self._slots)
        for index, other in enumerate(self._slots):
            if other.offset >= end:
                place = index
                break
            if slot.offset < other.offset + other.bytes and other.offset < end:
                raise PlanMismatch(f"{slot.offset} to {end} overlaps a slot at {other.offset}")
        if end > self._capacity_bytes:
            raise PlanMismatch(f"{slot.offset} to {end} is beyond {self._capacity_bytes} bytes")
        self._slots.insert(place, slot)

    # Questions.

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, in order of address."""
        return tuple(self._slots)

    def overlapping(self, offset: int, size: int) -> list[Slot]:
        """Return the slots that have some of a range; empty: the range can be reserved."""
        found = []  # a comprehension would be one more Python call, for each slot that a plan reserves
        for slot in self._slots:
            if slot.offset < offset + size and offset < slot.offset + slot.bytes:
                found.append(slot)
        return found

    def lowest_free(self, size: int, end: int | None = None) -> int | None:
        """Return the lowest address with so many free bytes, all below ``end``; None: there is none."""
        start = lowest(self._spans(), size)
        return start if start + size <= (self._capacity_bytes if end is None else end) else None

    def highest_free(self, size: int) -> int | None:
        """Return the highest address with so many free bytes; None: there is none."""
        end = self._capacity_bytes
        for slot in reversed(self._slots):
            if end - slot.offset - slot.bytes >= size:
                break
            end = min(end, slot.offset)
        return end - size if end >= size else None

    def fits_all(self, sizes: Iterable[int]) -> bool:
        """True if slots of these sizes can be reserved one after the other."""
        spans = self._spans()
        for size in sizes:
            start = lowest(spans, size)
            if start + size > self._capacity_bytes:
                return False
            insort(spans, (start, start + size))
        return True

    def _spans(self) -> list[Span]:
        return [(slot.offset, slot.offset + slot.bytes) for slot in self._slots]

    # Memory.

    @property
    def taken_bytes(self) -> int:
        """Bytes that no other allocation can use: the whole block, and slots beyond its end."""
        end = self._memory.numel()
        return end + sum(slot.bytes for slot in self._slots if slot.offset + slot.bytes > end)

    def resize(self, end: int) -> None:
        """Make the block end at an address, between passes; the bytes of slots wait in host memory meanwhile."""
        if not self.exists or self._device.overcommits or self._memory.numel() == max(128, end):
            return
        saved = [(slot, slot.in_host_memory()) for slot in self._slots if slot.offset < max(end, self._memory.numel())]
        for slot, _ in saved:
            slot.memory = slot.memory.new_empty(0)
        self._memory = self._memory.new_empty(0)
        try:
            self._memory = self._block(end)
        except torch.OutOfMemoryError:  # then each slot has memory of its own, as before there was a plan
            self._memory = self._block(0)
        for slot, contents in saved:
            slot.memory = self._window(slot.offset, slot.bytes)
            slot.memory.copy_(contents)

    def return_pages(self, start: int) -> None:
        """Give the system the pages from an address on that no slot has; nothing may be under way there."""
        if not self._returns_pages:
            return
        for slot in [*self._slots, None]:
            end = self._memory.numel() if slot is None else slot.offset
            if start < end:
                self._device.trim(self._memory[start:end])
            start = start if slot is None else max(start, slot.offset + slot.bytes)

    def close(self) -> None:
        """Release the block."""
        self._memory = self._memory.new_empty(0)

    def _block(self, size: int) -> torch.Tensor:
        made = self._device.arena(max(128, size))
        return made.fill_(POISON) if self._poison else made

    def _window(self, offset: int, size: int) -> torch.Tensor:
        """Return memory for a range: of the block, or beyond its end memory of its own."""
        if offset + size <= self._memory.numel():
            return self._memory[offset : offset + size]
        return self._device.arena(size)

"""Reserve and release slots on all tiers of one engine, and copy bytes between them.

The compute tier is one block of memory, an `Arena`, in which every slot has a range of its own.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import torch

from ps_core._address_ranges import Span, lowest
from ps_core._errors import DoesNotFit, InvalidInput, PlanMismatch
from ps_core._plan import Queue, Tier, link
from ps_core.engine._devices.device import Device, WorkEvent
from ps_core.engine._devices.disk.file import DiskFile, FileExtent
from ps_core.engine._devices.disk.queues import DISK_QUEUES
from ps_core.engine._memory.budget_suggestions import TierBudget, UserLimits, options_as, suggest_budget
from ps_core.engine._memory.chunk import MemoryView, Slot, ViewKey
from ps_core.engine._memory.slot_cache import SlotCache
from ps_core.engine._support.counters import ByteLedger

POISON = 0xFF
"""The byte that fills freed memory on request: not-a-number in every precision."""

_OFFSET = attrgetter("offset")
_NO_LIMIT_BYTES = 2**62
_PIECE_BYTES = 2**20
"""Bytes that `Arena.shift` copies at a time, through other memory."""


class TierStore:
    """All tiers of one engine, and the slots on them."""

    def __init__(
        self,
        device: Device,
        tiers: tuple[Tier, ...],
        *,
        poison: bool,
        file: DiskFile | None = None,
        given: UserLimits | None = None,
        shared: bool = False,
    ) -> None:
        """Make the store; ``shared``: several ranks have a shard of the model each, so groups come and go on any
        tier.
        """
        self.device = device
        self.file = file
        """The file of the disk tier, which is the last tier; None: there is none."""
        if file is not None:
            device.attach(file)
        self._process = os.getpid()
        self.stays_with_process = file is not None or device.shares_memory
        """True if a forked copy of the process has no copy of its own of what the tiers hold."""
        self.synchronous = device.synchronous
        """True if all work is over when a call returns."""
        disk_queues = DISK_QUEUES if file is not None else ()
        waits_for_collectives = shared and not device.has_collective_stream  # [Note: two threads] in `_sharding`
        collective_queues = (Queue.COLL,) if waits_for_collectives else ()
        self.queues = (Queue.COMPUTE, Queue.H2D, Queue.D2H, *disk_queues, *collective_queues)
        """Queues on which work may run."""
        self.tiers = tiers
        self.given = given or UserLimits()
        self.resident = len(tiers) == 1 and not shared
        """True if nothing ever moves: parameters are bound to home slots."""
        self.poison = poison
        self.ledger = ByteLedger(len(tiers))
        top = tiers[0]
        self.arena = Arena(device, top.capacity_bytes, exists=len(tiers) > 1, host=top.name == "host", poison=poison)
        self.spare = SlotCache()
        self._optional_bytes = 0
        """Bytes of host memory that are given back when anything needs them."""
        self._free_optional: Callable[[], None] | None = None
        """Releases all of that memory."""
        self._free_host_slots: Callable[[], None] | None = None
        """See `free_host_slots_by`."""
        self._leaving: list[WorkEvent] = []
        """Ends of the work on host memory that was released before the work was over."""

    @property
    def limits(self) -> TierBudget:
        """Sizes of all tiers, for errors that suggest others."""
        return TierBudget(self.tiers, self.given, self.device.memory_bytes())

    def end_work(self) -> None:
        """Finish the worker's work, whether it fails or not; its results are not used."""
        if self.device.worker is not None:
            self.device.worker.close()

    @property
    def is_leaving(self) -> bool:
        """Return True if work still runs on host memory that was released: `reserve` waits for it."""
        return any(not event.done for event in self._leaving)

    # Slots.

    def reserve(self, tier: int, size: int, offset: int = -1) -> Slot:
        """Reserve a slot; on the compute tier at an address, or at the lowest with room. `DoesNotFit` without room."""
        if tier or not self.arena.exists:
            if self._free_now(tier) < size + (0 if tier else self.ledger.nonmodel_bytes):
                self._free_unused(tier)
            if self.free_bytes(tier) < size:
                raise self._too_small(tier, size)
            if tier == 1 and self._free_now(tier) < size and self._free_optional is not None:
                self._free_optional()
            for event in self._leaving:
                event.block()
            self._leaving.clear()
            with torch.inference_mode(False):  # or it could not be written outside of inference mode
                slot = self._on_disk(tier, size) if self.is_disk(tier) else Slot(tier, -1, size, self.device.host(size))
            if self.poison:
                self.fill(slot, POISON)
        else:
            address = offset if offset >= 0 else self.arena.lowest_free(size)
            if address is None:
                raise self._too_small(tier, size)
            slot = self.arena.reserve(size, address)
        self.ledger.add(tier, size)
        return slot

    def reserve_optional(self, size: int) -> Slot | None:
        """Reserve host memory that counts as free, and is given back for any other use; None: there is no room."""
        if len(self.tiers) < 2 or self.is_disk(1) or self._free_now(1) < size:
            return None
        slot = self.reserve(1, size)
        self._optional_bytes += size
        return slot

    def free_optional_by(self, free: Callable[[], None]) -> None:
        """Call this to release all optional memory."""
        self._free_optional = free

    def free_host_slots_by(self, free: Callable[[], None]) -> None:
        """Call this, when host memory runs short, to release the slots there that are kept for reuse."""
        self._free_host_slots = free

    def _free_unused(self, tier: int) -> None:
        """Release the slots of a tier that are kept for reuse."""
        if tier == 0:
            self.free_spare()
        elif tier == 1 and self._free_host_slots is not None:
            self._free_host_slots()

    def release_optional(self, slot: Slot, queue: Queue) -> None:
        """Release such memory once the queue has done all work launched so far."""
        self._optional_bytes -= slot.bytes
        self.release(slot, queue)

    def adopt(self, memory: torch.Tensor) -> Slot:
        """Return a slot of the compute tier for memory that other ranks map too; it counts like any other slot."""
        self.ledger.add(0, memory.nbytes)
        return Slot(0, -1, memory.nbytes, memory)

    def free_spare(self) -> int:
        """Release the slots that are kept for reuse; return their bytes."""
        freed = self.spare.bytes
        for slot in self.spare.pop_all():
            self.release(slot, Queue.COMPUTE)
        return freed

    def is_disk(self, tier: int) -> bool:
        """Return True if a tier is the disk: its bytes are in a file, and no processor works on them."""
        return self.file is not None and tier == len(self.tiers) - 1

    def work_tier(self, tier: int) -> int:
        """Return the nearest tier, this one or the one above, on which a processor can work."""
        return tier - self.is_disk(tier)

    def free_bytes(self, tier: int) -> int:
        """Return the bytes of a tier's budget that no slot needs; non-model bytes are not subtracted."""
        return self._free_now(tier) + (self._optional_bytes if tier == 1 else 0)

    def _free_now(self, tier: int) -> int:
        return self.tiers[tier].capacity_bytes - self.ledger.used_bytes[tier]

    def _on_disk(self, tier: int, size: int) -> Slot:
        assert self.file is not None, "a disk tier has a file"
        return Slot(tier, -1, size, torch.empty(size, dtype=torch.uint8, device="meta"), place=self.file.reserve(size))

    def _too_small(self, tier: int, size: int) -> DoesNotFit:
        name, capacity = self.tiers[tier].name, self.tiers[tier].capacity_bytes
        needed = self.ledger.used_bytes[tier] + size
        if needed <= capacity:  # there is room, but in pieces
            needed = capacity + size
        return DoesNotFit(
            tier=name,
            moment="making room for gradients or copies",
            needed_bytes=needed,
            available_bytes=capacity,
            proven=False,
            remedies=(
                suggest_budget(self.limits, tier, needed),
                "accumulation_steps=2, or as many backward passes as a step has: room for their sums is planned ahead",
                f"{options_as(self.given, group_bytes=max(1, size // 4))}: less is copied at a time",
            ),
        )

    def release(self, slot: Slot, queue: Queue) -> None:
        """Release a slot once the queue has done all work launched so far."""
        if slot.offset >= 0:
            if self.poison:
                self.device.declare_access(queue, "poison", (), (slot.memory,))
                with self.device.on(queue):
                    slot.memory.fill_(POISON)
            self.arena.remove(slot)
        if slot.place is not None:
            self._release_on_disk(slot, slot.place, queue)
        if slot.work is not None and not slot.work.done:
            self._leaving.append(slot.work)
        slot.clear()
        slot.views = {}
        self.ledger.remove(slot.tier, slot.bytes)
        slot.memory = slot.memory.new_empty(0)

    def _release_on_disk(self, slot: Slot, place: FileExtent, queue: Queue) -> None:
        """Release a range of the file. Its next owner writes first, and that write waits for what was launched here."""
        assert self.file is not None, "a disk tier has a file"
        if self.file.failure is None:
            if queue is not Queue.DISK_W:
                self.device.wait(Queue.DISK_W, self.device.record(queue))
            if self.poison:
                self.fill(slot, POISON)
        self.file.free(place)
        slot.place = None

    def fill(self, slot: Slot, value: int) -> None:
        """Set every byte of a slot to one value; no other work on the slot may run."""
        if slot.place is None:
            slot.memory.fill_(value)
        else:
            self.device.write(slot.place, 0, torch.full((slot.bytes,), value, dtype=torch.uint8, device="cpu"))

    def link(self, source: Slot, target: Slot) -> Queue:
        """Return the queue that copies from one slot to another, on a neighbouring tier."""
        return link(self.tiers[source.tier].name, self.tiers[target.tier].name)

    def copy(self, queue: Queue, target: Slot, source: Slot, size: int, *, begin: int = 0, to: int = 0) -> None:
        """Launch a copy of ``size`` bytes on the queue of the link, from byte ``begin`` to byte ``to``."""
        if target.place is not None:
            self.device.write(target.place, to, source.memory[begin : begin + size])
        elif source.place is not None:
            self.device.read(target.memory[to : to + size], source.place, begin, target.mark_unread)
        elif self.synchronous:
            target.memory[to : to + size].copy_(source.memory[begin : begin + size])
        else:
            self.device.copy(queue, target.memory[to : to + size], source.memory[begin : begin + size])

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the compute tier that nothing else can use: a whole arena, if it keeps its memory."""
        return self.ledger.used_bytes[0] if not self.arena.exists or self.device.overcommits else self.arena.taken_bytes

    @property
    def forked(self) -> bool:
        """Return True in a forked copy of a process to which the tiers belong: leave them alone."""
        return self.stays_with_process and os.getpid() != self._process

    def check_process(self) -> None:
        """Raise `InvalidInput` in a forked process that would change what its parent's tiers hold."""
        if self.file is not None:
            self.file.check_process()
        if self.forked:
            raise InvalidInput(
                f"this is process {os.getpid()}, a copy (fork) of process {self._process}, whose host memory other "
                f"ranks read: only process {self._process} can use that model. Start workers with "
                'multiprocessing.get_context("spawn"), or hand them what they need as plain tensors'
            )

    def lift_budget(self) -> None:
        """Allow any number of bytes, for what has to be done before a model that does not fit is released."""
        self.tiers = tuple(replace(tier, capacity_bytes=_NO_LIMIT_BYTES) for tier in self.tiers)
        self.arena.lift_budget()

    def close(self) -> None:
        """Release all memory; every slot was released before, and none is reserved any more."""
        self.free_spare()
        self._free_optional = self._free_host_slots = None
        self.arena.close()
        self.device.close()


class Arena:
    """The compute tier's slots in order of address.

    Addresses go up to the tier's budget. The block of memory may end before that; a slot beyond its end has memory of
    its own. Where the device overcommits (`Device.overcommits`), the block covers the whole budget.
    """

    def __init__(self, device: Device, capacity_bytes: int, *, exists: bool, host: bool, poison: bool) -> None:
        """Make an arena; ``exists``: slots of the compute tier have addresses; ``host``: the block is host memory."""
        self._device, self._capacity_bytes, self._poison = device, capacity_bytes, poison
        self.exists = exists
        self._returns_pages = exists and host and not poison
        self._slots: list[Slot] = []
        """In order of address."""
        self._views: dict[ViewKey, MemoryView] = {}
        """Views of the block that parameters were bound to; the same slots come again in every step of a plan."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if exists:
            self._memory = self._block(capacity_bytes if device.overcommits else 0)

    # Slots.

    def reserve(self, size: int, offset: int) -> Slot:
        """Reserve a range at an address; `PlanMismatch` if another slot has some of it."""
        memory, views = self._window(offset, size)
        slot = Slot(0, offset, size, memory, views=views)
        self._insert(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Return a slot's range to the arena."""
        self._slots.remove(slot)

    def shift(self, slot: Slot, offset: int, queue: Queue) -> None:
        """Move a slot and its bytes to another address; the two ranges may overlap, but no other slot."""
        target, views = self._window(offset, slot.bytes)  # of all this, only that may fail
        self._slots.remove(slot)
        old, slot.offset = slot.offset, offset
        self._insert(slot)
        self._device.declare_access(queue, "shift", (slot.memory,), (target,))
        starts = range(0, slot.bytes, _PIECE_BYTES)
        with self._device.on(queue):
            for start in starts if offset < old else reversed(starts):
                piece = slice(start, min(start + _PIECE_BYTES, slot.bytes))
                target[piece].copy_(slot.memory[piece].clone())
        slot.memory, slot.views = target, views

    def _insert(self, slot: Slot) -> None:
        end = slot.offset + slot.bytes
        place = bisect_right(self._slots, slot.offset, key=_OFFSET)
        for other in self._slots[max(0, place - 1) : place + 1]:  # its neighbours
            if slot.offset < other.offset + other.bytes and other.offset < end:
                raise PlanMismatch(f"{slot.offset} to {end} overlaps a slot at {other.offset}")
        if end > self._capacity_bytes:
            raise PlanMismatch(f"{slot.offset} to {end} is beyond {self._capacity_bytes} bytes")
        self._slots.insert(place, slot)

    # Questions.

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return all slots, in order of address."""
        return tuple(self._slots)

    def overlapping(self, offset: int, size: int) -> list[Slot]:
        """Return the slots that have some of a range; empty: the range can be reserved."""
        slots, end, found = self._slots, offset + size, []
        first = bisect_right(slots, offset, key=_OFFSET)  # of the earlier slots only the last may reach into the range
        for slot in slots[max(0, first - 1) : bisect_left(slots, end, first, key=_OFFSET)]:
            if offset < slot.offset + slot.bytes:
                found.append(slot)  # a comprehension would be one more Python call, for each slot that is reserved
        return found

    def lowest_free(self, size: int, end: int | None = None) -> int | None:
        """Return the lowest address with so many free bytes, all below ``end``; None: there is none."""
        start = lowest(self._spans(), size)
        return start if start + size <= (self._capacity_bytes if end is None else end) else None

    def _spans(self) -> list[Span]:
        return [(slot.offset, slot.offset + slot.bytes) for slot in self._slots]

    # Memory.

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that no other allocation can use: the whole block, and slots beyond its end."""
        end = self._memory.numel()
        return end + sum(slot.bytes for slot in self._slots if slot.offset + slot.bytes > end)

    def resize(self, end: int) -> None:
        """Make the block end at an address, between passes; host memory holds the slots' bytes meanwhile."""
        if not self.exists or self._device.overcommits or self._memory.numel() == max(128, end):
            return
        saved = [
            (slot, self._in_host_memory(slot)) for slot in self._slots if slot.offset < max(end, self._memory.numel())
        ]
        self._device.synchronize()
        for slot, _ in saved:
            slot.memory, slot.views = slot.memory.new_empty(0), {}
        self._views.clear()  # they refer to the old block
        with self._device.changing_memory():
            self._memory = self._memory.new_empty(0)
            self._device.release_freed()  # else PyTorch's allocator keeps the old block, and takes more for the new one
            try:
                self._memory = self._block(end)
            except torch.OutOfMemoryError:  # each slot then has separate memory, as without a plan
                self._memory = self._block(0)
        for slot, contents in saved:
            slot.memory, slot.views = self._window(slot.offset, slot.bytes)
            slot.memory.copy_(contents, non_blocking=True)
        self._device.synchronize()

    def _in_host_memory(self, slot: Slot) -> torch.Tensor:
        """Return a copy of the bytes, outside every budget; it is complete once the device is done.

        Pinned memory holds it where home slots left some behind. Pinning more would take as long as many copies.
        """
        memory = self._device.kept_host(slot.bytes)
        if memory is None:
            memory = torch.empty(slot.bytes, dtype=torch.uint8, device="cpu")
        return memory.copy_(slot.memory, non_blocking=True)

    def return_pages(self, start: int) -> None:
        """Return unused pages, from an address on, to the system; no work on them may run."""
        if not self._returns_pages:
            return
        for slot in [*self._slots, None]:
            end = self._memory.numel() if slot is None else slot.offset
            if start < end:
                self._device.trim(self._memory[start:end])
            start = start if slot is None else max(start, slot.offset + slot.bytes)

    def lift_budget(self) -> None:
        """Allow any address; slots beyond the end of the block have memory of their own."""
        self._capacity_bytes = _NO_LIMIT_BYTES

    def close(self) -> None:
        """Release the block."""
        self._views.clear()
        with self._device.changing_memory():
            self._memory = self._memory.new_empty(0)

    def _block(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # as in `TierStore.reserve`
            made = self._device.arena(max(128, size))
        return made.fill_(POISON) if self._poison else made

    def _window(self, offset: int, size: int) -> tuple[torch.Tensor, dict[ViewKey, MemoryView]]:
        """Return memory for a range, and where its views are kept: the block, or beyond its end memory of its own."""
        if offset + size <= self._memory.numel():
            return self._memory[offset : offset + size], self._views
        with torch.inference_mode(False):
            return self._device.arena(size), {}

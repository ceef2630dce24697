"""All tiers of one engine: slots reserved and released, and how many bytes each tier uses."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import torch

from ps_core._errors import DoesNotFit, PlanMismatch
from ps_core._plan import Queue, Tier, link
from ps_core._planner.holds import Span, lowest
from ps_core.engine._devices.device import Device
from ps_core.engine._devices.disk.file import DiskFile, FileExtent
from ps_core.engine._devices.disk.streams import DISK_QUEUES
from ps_core.engine._memory.slot import Slot
from ps_core.engine._memory.slot_cache import SlotCache
from ps_core.engine._memory.suggestions import TierBudget, UserLimits, options_as, suggest_budget

POISON = 0xFF
"""Fills freed memory where asked to: not-a-number in every precision."""

_PIECE_BYTES = 2**20
"""What a shift sets aside at a time."""


class TierStore:
    """All tiers of one engine; keeps count of bytes."""

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
        """``shared``: several processes have a shard of the model each, so that groups come and go on any tier."""
        self.device = device
        self.file = file
        """The disk tier's, if there is one: it is the last tier."""
        disk_queues = DISK_QUEUES if file is not None else ()
        waits_for_collectives = shared and not device.beside  # see [Note: two threads] in `_sharding.streams`
        collective_queues = (Queue.COLL,) if waits_for_collectives else ()
        self.queues = (Queue.COMPUTE, Queue.H2D, Queue.D2H, *disk_queues, *collective_queues)
        """Where work may be under way."""
        if file is not None:
            device.attach(file)
        self.tiers = tiers
        self.given = given or UserLimits()
        self.still = len(tiers) == 1 and not shared
        """Nothing ever moves: parameters lie in their homes."""
        self.poison = poison
        self.used_bytes = [0] * len(tiers)
        self.peak_bytes = [0] * len(tiers)
        self.risen_bytes = 0
        """Of the compute tier, what is there only while there is room for it."""
        self.peak_besides_bytes = 0
        """The most of the compute tier that was ever used by all else."""
        self.tide_bytes = 0
        """Non-model bytes on the compute tier, as last heard."""
        self.highest_tide_bytes = 0
        """The most of them that were seen."""
        self.highest_swell_bytes = 0
        """By how much they rose within a moment of backward, at the most."""
        self.foreseen_bytes = 0
        """Of the compute tier, for a whole pass, where fake tensors told that it does not fit."""
        self.left_over_bytes = 0
        """Non-model bytes that were alive when this pass began, if an exception ended the pass before; else 0."""
        self.fixed_bytes = 0
        """Of the host, what tables have that never leave it."""
        self._arena: torch.Tensor | None = None
        if len(tiers) > 1:
            self._arena = self._new_arena(tiers[0].capacity_bytes if device.lazy else 0)
        self._taken: list[Slot] = []
        """Of the arena, in order of address."""
        self.spare = SlotCache()

    @property
    def limits(self) -> TierBudget:
        """What the budgets are, for errors that suggest others."""
        return TierBudget(self.tiers, self.given, self.device.memory_bytes())

    # Slots.

    def reserve(self, tier: int, size: int, offset: int = -1) -> Slot:
        """A slot; on the compute tier at an address, or at the lowest that has room."""
        if tier or self._arena is None:
            if self.free_bytes(tier) < size and not tier:
                self.free_spare()
            if self.free_bytes(tier) < size:
                raise self._too_small(tier, size)
            slot = self._on_disk(tier, size) if self.is_disk(tier) else Slot(tier, -1, size, self.device.host(size))
            if self.poison:
                self.fill(slot, POISON)
        else:
            if offset < 0:
                offset = self._hole(size)
            slot = Slot(tier, offset, size, self._window(offset, size))
            self._insert(slot)
        self.used_bytes[tier] += size
        self.note_peak()
        return slot

    def keep_on_host(self, homes: int, gradients: int) -> None:
        """Tables have these bytes for good: of homes that are reserved, and, in no slot, for gradients on their way."""
        self.fixed_bytes = homes + gradients
        self.used_bytes[1] += gradients
        self.note_peak()

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the compute tier's arena, in order of address."""
        return tuple(self._taken)

    def free_spare(self) -> int:
        """Give back what is kept for later; how many bytes."""
        freed = self.spare.bytes
        for slot in self.spare.take_all():
            self.release(slot, Queue.COMPUTE)
        return freed

    def is_disk(self, tier: int) -> bool:
        """Whether a tier is the disk."""
        return self.file is not None and tier == len(self.tiers) - 1

    def work_tier(self, tier: int) -> int:
        """The nearest tier at or above this one on which a processor can work."""
        return tier - self.is_disk(tier)

    def free_bytes(self, tier: int) -> int:
        """What is left of a tier's budget, non-model bytes aside."""
        return self.tiers[tier].capacity_bytes - self.used_bytes[tier]

    def _on_disk(self, tier: int, size: int) -> Slot:
        assert self.file is not None, "a disk tier has a file"
        return Slot(tier, -1, size, torch.empty(size, dtype=torch.uint8, device="meta"), place=self.file.reserve(size))

    def _too_small(self, tier: int, size: int) -> DoesNotFit:
        name, capacity = self.tiers[tier].name, self.tiers[tier].capacity_bytes
        needed = self.used_bytes[tier] + size
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
        """Give a slot's bytes back, in the order of a queue."""
        if slot.offset >= 0:
            if self.poison:
                self.device.work(queue, "poison", (), (slot.memory,))
                with self.device.on(queue):
                    slot.memory.fill_(POISON)
            self._taken.remove(slot)
        if slot.place is not None:
            self._leave(slot, slot.place, queue)
        slot.clear()
        slot.bounds = {}
        self.used_bytes[slot.tier] -= slot.bytes
        slot.memory = slot.memory.new_empty(0)

    def _leave(self, slot: Slot, place: FileExtent, queue: Queue) -> None:
        """Give a place on the disk back: whoever gets it next writes first, and that comes after all that was here."""
        assert self.file is not None, "a disk tier has a file"
        if self.file.failure is None:
            if queue is not Queue.DISK_W:
                self.device.wait(Queue.DISK_W, self.device.record(queue))
            if self.poison:
                self.fill(slot, POISON)
        self.file.free(place)
        slot.place = None

    def fill(self, slot: Slot, value: int) -> None:
        """Let every byte be this one; nothing else is under way there."""
        if slot.place is None:
            slot.memory.fill_(value)
        else:
            self.device.write(slot.place, 0, torch.full((slot.bytes,), value, dtype=torch.uint8))

    def link(self, source: Slot, target: Slot) -> Queue:
        """The queue that copies from one slot to another, on a neighbouring tier."""
        return link(self.tiers[source.tier].name, self.tiers[target.tier].name)

    def copy(self, queue: Queue, target: Slot, source: Slot, size: int, *, begin: int = 0, to: int = 0) -> None:
        """Launch a copy on the queue of the link; from byte ``begin`` on to byte ``to`` on."""
        if target.place is not None:
            self.device.write(target.place, to, source.memory[begin : begin + size])
        elif source.place is not None:
            self.device.read(target.memory[to : to + size], source.place, begin, target.mark_unread)
        else:
            self.device.copy(queue, target.memory[to : to + size], source.memory[begin : begin + size])

    def shift(self, slot: Slot, offset: int, queue: Queue) -> None:
        """Move a slot within the arena; the ranges may overlap."""
        assert self._arena is not None, "only the arena has addresses"
        target = self._window(offset, slot.bytes)  # of all this, only that may fail
        self._taken.remove(slot)
        old, slot.offset = slot.offset, offset
        self._insert(slot)
        self.device.work(queue, "shift", (slot.memory,), (target,))
        starts = range(0, slot.bytes, _PIECE_BYTES)
        with self.device.on(queue):
            for start in starts if offset < old else reversed(starts):
                piece = slice(start, min(start + _PIECE_BYTES, slot.bytes))
                target[piece].copy_(slot.memory[piece].clone())
        slot.memory = target

    # The arena.

    def settle(self, line: int) -> None:
        """Between passes, with nothing under way: let the arena end here; what is in it waits in the host's memory."""
        if self._arena is None or self.device.lazy or self._arena.numel() == max(128, line):
            return
        end = max(line, self._arena.numel())
        aside = [(slot, slot.in_host_memory()) for slot in self._taken if slot.offset < end]
        for slot, _ in aside:
            slot.memory = slot.memory.new_empty(0)
        self._arena = None
        try:
            self._arena = self._new_arena(line)
        except torch.OutOfMemoryError:  # then each slot has memory of its own, as before there was a plan
            self._arena = self._new_arena(0)
        for slot, contents in aside:
            slot.memory = self._window(slot.offset, slot.bytes)
            slot.memory.copy_(contents)

    def _new_arena(self, size: int) -> torch.Tensor:
        made = self.device.arena(max(128, size))
        return made.fill_(POISON) if self.poison else made

    def _window(self, offset: int, size: int) -> torch.Tensor:
        """Memory for these addresses: the arena's, or where that does not reach memory of its own."""
        assert self._arena is not None, "only the arena has addresses"
        if offset + size <= self._arena.numel():
            return self._arena[offset : offset + size]
        return self.device.arena(size)

    def trim(self, line: int) -> None:
        """Give the system the pages of the arena above a line that no slot has; nothing else is under way there."""
        if self._arena is None or self.tiers[0].name != "host" or self.poison:
            return
        at = line
        for slot in [*self._taken, None]:
            end = self._arena.numel() if slot is None else slot.offset
            if at < end:
                self.device.trim(self._arena[at:end])
            at = at if slot is None else max(at, slot.offset + slot.bytes)

    @property
    def held_bytes(self) -> int:
        """What of the compute tier nobody else can have: all of an arena that has taken its memory for good."""
        if self._arena is None or self.device.lazy:
            return self.used_bytes[0]
        end = self._arena.numel()
        return end + sum(slot.bytes for slot in self._taken if slot.offset + slot.bytes > end)

    @property
    def forked(self) -> bool:
        """True if there is a disk tier and this is a forked copy of its process: leave file and streams alone."""
        return self.file is not None and self.file.forked

    def check_process(self) -> None:
        """`InvalidInput` in a forked copy of the process, if there is a disk tier; see `DiskFile.check_process`."""
        if self.file is not None:
            self.file.check_process()

    def close(self) -> None:
        """Let go of all memory: every slot was given back, and none is reserved any more."""
        self.free_spare()
        self._arena = None
        self.device.close()

    def note_left_over(self, size: int) -> None:
        """Note how many non-model bytes an exception left alive."""
        self.left_over_bytes = size

    def foresee(self, needed_bytes: int) -> None:
        """Note what fake tensors say a whole pass needs of the compute tier, where that is too much; 0: it fits."""
        self.foreseen_bytes = needed_bytes

    def set_tide(self, nonmodel_bytes: int) -> None:
        """Note how many non-model bytes are on the compute tier now."""
        self.tide_bytes = nonmodel_bytes

    def note_tide(self, peak_bytes: int, *, backward: bool) -> None:
        """Note the most non-model bytes of a moment that is over."""
        if backward:
            self.highest_swell_bytes = max(self.highest_swell_bytes, peak_bytes - self.tide_bytes)
        self.tide_bytes = peak_bytes
        self.note_peak()

    def note_risen(self, size: int) -> None:
        """Note bytes that came up to the compute tier while there is room for them, or went down (below 0)."""
        self.risen_bytes += size

    def note_besides(self, used_bytes: int) -> None:
        """Note how much of the compute tier all but what has risen is known to need."""
        self.peak_besides_bytes = max(self.peak_besides_bytes, used_bytes)

    def note_peak(self) -> None:
        """Remember the most that was ever used, non-model bytes included."""
        self.highest_tide_bytes = max(self.highest_tide_bytes, self.tide_bytes)
        for tier, used in enumerate(self.used_bytes):
            total = used + (self.tide_bytes if tier == 0 else 0)
            self.peak_bytes[tier] = max(self.peak_bytes[tier], total)
            if tier == 0:
                self.peak_besides_bytes = max(self.peak_besides_bytes, total - self.risen_bytes)

    def fits(self, size: int, line: int) -> bool:
        """Whether the arena has a hole of that size below a line."""
        return self._find(size, line) is not None

    def has_holes(self, sizes: Iterable[int]) -> bool:
        """Whether the compute tier has room for slots of these sizes, reserved one after the other."""
        if self._arena is None:
            return sum(sizes) <= self.free_bytes(0) + self.spare.bytes
        spans, end = self._spans(), self.tiers[0].capacity_bytes
        for size in sizes:
            start = lowest(spans, size)
            if start + size > end:
                return False
            insort(spans, (start, start + size))
        return True

    def highest_hole(self, size: int) -> int | None:
        """Where in the arena the last hole of that size ends, less the size."""
        end = self.tiers[0].capacity_bytes
        for slot in reversed(self._taken):
            if end - slot.offset - slot.bytes >= size:
                break
            end = min(end, slot.offset)
        return end - size if end >= size else None

    def overlapping(self, offset: int, size: int) -> list[Slot]:
        """Slots of the arena that own some of these bytes."""
        return [slot for slot in self._taken if slot.offset < offset + size and offset < slot.offset + slot.bytes]

    def _hole(self, size: int) -> int:
        offset = self._find(size, self.tiers[0].capacity_bytes)
        if offset is None:
            raise self._too_small(0, size)
        return offset

    def _find(self, size: int, line: int) -> int | None:
        start = lowest(self._spans(), size)
        return start if start + size <= line else None

    def _spans(self) -> list[Span]:
        return [(slot.offset, slot.offset + slot.bytes) for slot in self._taken]

    def _insert(self, slot: Slot) -> None:
        end = slot.offset + slot.bytes
        place = len(self._taken)
        for index, other in enumerate(self._taken):
            if other.offset >= end:
                place = index
                break
            if slot.offset < other.offset + other.bytes and other.offset < end:
                raise PlanMismatch(f"{slot.offset} to {end} overlaps a slot at {other.offset}")
        if end > self.tiers[0].capacity_bytes:
            raise PlanMismatch(f"{slot.offset} to {end} is beyond {self.tiers[0].capacity_bytes} bytes")
        self._taken.insert(place, slot)

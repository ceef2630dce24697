"""Keep slots (ranges of a tier), the chunks that lie in them, and which copy of a chunk is current.

[Note: versions]
A chunk's *version* grows with every change of its bytes, on any tier. A slot remembers the version that it was filled
with. A slot whose version is its chunk's holds the current bytes, and nothing is read from any other slot. At least one
slot is current at all times. The methods of `Chunk` keep that, and raise `IllegalTransition` without a change where
they could not. There are two exceptions. A gathered chunk is put together from the shards of all ranks, so its copies
may all go. A gradient sum is not read before its first gradient or after its step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from ps_core._errors import IllegalTransition, PlanMismatch
from ps_core._extents import Extent
from ps_core.engine._devices.device import WorkEvent
from ps_core.engine._devices.disk.file import FileExtent

ViewKey: TypeAlias = tuple[int, Hashable]
"""The address of a parameter's first byte (behind `Slot.offset`), and the parameter's record."""


class MemoryView(NamedTuple):
    """A tensor over a parameter's part of a slot, with a storage of its own, whose uses can be counted."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    uses: int
    """The storage's use count while it is a parameter's data and has no alias."""


@dataclass(slots=True, eq=False)
class Slot:
    """A range of bytes on one tier."""

    tier: int
    offset: int
    """The slot's address in the compute tier's arena; -1 on other tiers, where every slot is separate memory."""
    bytes: int
    memory: torch.Tensor
    """``bytes`` of uint8; on the disk they are on ``meta``, so that they cannot be read by mistake."""
    extent: Extent | None = None
    """The extent that the slot holds, or held; None: none yet."""
    version: int = -1
    """The version of the extent; -1: no usable bytes. `Chunk` writes ``extent`` and ``version``."""
    place: FileExtent | None = None
    """On the disk: where in the file."""
    views: dict[ViewKey, MemoryView] = field(default_factory=dict)
    """Views that were made here, for the next time; freed with the memory. `Residency.bind` adds to it.

    A slot within the arena's block has the arena's own dict, since the next slot there may be another."""
    work: WorkEvent | None = None
    """The end of the worker's work on this slot; None: that is known to be over."""

    @property
    def released(self) -> bool:
        """Return True if the slot has no memory any more."""
        return self.bytes > self.memory.numel()

    def clear(self) -> None:
        """Note that the slot holds nothing."""
        self.extent, self.version, self.work = None, -1, None

    def note_work(self, event: WorkEvent) -> None:
        """Note which work of the worker's thread touches the slot last."""
        self.work = event

    def mark_filled(self) -> None:
        """Note that the slot has, or is getting, the bytes of an activation, which has one version."""
        self.version = 0

    def mark_unread(self) -> None:
        """Note that a read from the disk into this slot failed."""
        self.version = -1

    def flat(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a view of the first ``numel`` elements as a vector."""
        return self.memory[: numel * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class SlotView:
    """The slot that a parameter is bound to, and the `MemoryView` that is its data there."""

    slot: Slot
    view: torch.Tensor
    storage: torch.UntypedStorage
    uses: int

    @property
    def aliased(self) -> bool:
        """Return True if a tensor besides the parameter uses the memory: keep the slot where it is."""
        return torch._C._storage_Use_Count(self.storage._cdata) > self.uses

    @property
    def outlived(self) -> bool:
        """Return True if a tensor uses the memory although the parameter does not any more: keep the slot."""
        return torch._C._storage_Use_Count(self.storage._cdata) > self.uses - 1


@dataclass(slots=True, eq=False)
class Chunk:
    """One extent (a group's weight, master, moment or gradient sum): its home slot, and its copies on other tiers.

    Only the methods of this class write its attributes, and what slots say of their contents; see [Note: versions].
    """

    extent: Extent
    bytes: int
    home: Slot
    """The home slot, which always exists (a plan for tight memory may lend its memory within a segment)."""
    version: int = 0
    copies: dict[int, Slot] = field(default_factory=dict)
    """Slots besides the home slot, by tier."""
    planned: bool = False
    """True if the chunk exists for good; a gradient sum may exist for one step only."""
    gathered: bool = False
    """True if the bytes are gathered from the shards of all ranks. Such a chunk has no home slot of its own."""

    # Changes.

    def fill(self, slot: Slot) -> None:
        """Note that ``slot`` received the current bytes."""
        slot.extent, slot.version = self.extent, self.version

    def fill_copy(self, slot: Slot) -> None:
        """Note that ``slot`` received the current bytes, and register it unless a slot on its tier has them too."""
        home, copy = self.home, self.copies.get(slot.tier)
        in_home = home.tier == slot.tier and home.version == self.version
        if slot is not home and not in_home and (copy is None or copy.version != self.version):
            self.copies[slot.tier] = slot
        slot.extent, slot.version = self.extent, self.version

    def mark_written(self, slot: Slot) -> None:
        """Note that the bytes in ``slot`` were changed: that slot alone is current now."""
        self.version += 1
        slot.extent, slot.version = self.extent, self.version

    def add_copy(self, slot: Slot) -> None:
        """Register a slot as the copy on its tier, in place of another one there."""
        old = self.copies.get(slot.tier)
        self.copies[slot.tier] = slot
        if old is not None and old.version == self.version and not self._keeps_bytes:
            self.copies[slot.tier] = old
            raise self._illegal("add_copy", old)

    def drop_copy(self, tier: int, *, needed: bool = True) -> Slot | None:
        """Unregister the copy on a tier and return its slot; ``needed``: some slot must stay current."""
        slot = self.copies.pop(tier, None)
        if needed and slot is not None and slot.version == self.version != self.home.version and not self._keeps_bytes:
            self.copies[tier] = slot
            raise self._illegal("drop_copy", slot)
        return slot

    def rehome(self, slot: Slot) -> Slot:
        """Make ``slot`` the home slot, and return the former one."""
        old, copy = self.home, self.copies.get(slot.tier)
        self.home = slot
        if copy is slot:
            del self.copies[slot.tier]
        if old.version == self.version != slot.version and not self._keeps_bytes:
            self.home = old
            if copy is slot:
                self.copies[slot.tier] = slot
            raise self._illegal("rehome", old)
        return old

    def invalidate(self, slot: Slot) -> None:
        """Note that the bytes in ``slot`` may not be used any more."""
        version, slot.version = slot.version, -1
        if version == self.version and not self._keeps_bytes:
            slot.version = version
            raise self._illegal("invalidate", slot)

    def invalidate_gathered(self) -> None:
        """Note that a shard was changed: no copy of this gathered chunk is current."""
        assert self.gathered, "other chunks have one current slot at all times"
        self.version += 1

    @property
    def _keeps_bytes(self) -> bool:
        return self.gathered or self.has_current_copy

    def _illegal(self, event: str, only: Slot) -> IllegalTransition:
        """Return the error for a change after which no slot would be current; ``only`` is the one that is."""
        return IllegalTransition(
            subject=f"{self.extent.kind.value} of group {self.extent.index}",
            state=f"(the only current copy is on tier {only.tier})",
            event=event,
            expected=("fill another slot and register it",),
        )

    # Questions.

    def newest(self, tier: int) -> Slot | None:
        """Return the slot on a tier that holds the current bytes; None: copy them there first."""
        for slot in (self.copies.get(tier), self.home):
            if slot is not None and slot.tier == tier and slot.version == self.version:
                return slot
        return None

    def source(self) -> Slot:
        """Return a slot that holds the current bytes, on the fastest tier that has one."""
        found = None
        for slot in (*self.copies.values(), self.home):
            if slot.version == self.version and (found is None or slot.tier < found.tier):
                found = slot
        if found is None:
            raise PlanMismatch(f"no copy of {self.extent.kind.value} of group {self.extent.index} is current")
        return found

    def has_current_besides(self, slot: Slot) -> bool:
        """Return True if a registered slot other than ``slot`` holds the current bytes."""
        if self.home is not slot and self.home.version == self.version:
            return True
        for copy in self.copies.values():  # noqa: SIM110 - each item of a generator is a Python call
            if copy is not slot and copy.version == self.version:
                return True
        return False

    @property
    def has_current_copy(self) -> bool:
        """Return True if any registered slot holds the current bytes."""
        if self.home.version == self.version:
            return True
        for slot in self.copies.values():  # noqa: SIM110 - each item of a generator is a Python call
            if slot.version == self.version:
                return True
        return False

    @property
    def home_is_stale(self) -> bool:
        """Return True if the home slot does not hold the current bytes: copy them there before giving up another
        slot.
        """
        return self.home.version != self.version

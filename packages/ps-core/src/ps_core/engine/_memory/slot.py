"""Slots, the chunks that they hold, and which copy of a chunk is the newest.

[Note: stamps]
An extent's *stamp* grows with every change of its contents, wherever that happens; a slot remembers the stamp it was
filled with. A slot whose stamp is its extent's holds the newest bytes. At least one always does: a release of the last
one raises. Nothing is read from a slot that is behind.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ps_core._errors import PlanMismatch
from ps_core._program import Extent
from ps_core.engine._devices.disk.file import FileExtent


@dataclass(slots=True, eq=False)
class Slot:
    """A range of one tier."""

    tier: int
    offset: int
    """Its address in the compute tier's arena; -1 on other tiers, where every slot is memory of its own."""
    bytes: int
    memory: torch.Tensor
    """``bytes`` of uint8; on the disk they are on ``meta``, so that nobody takes them for contents."""
    extent: Extent | None = None
    version: int = -1
    place: FileExtent | None = None
    """On the disk: where in the file."""
    bounds: dict[Hashable, SlotView] = field(default_factory=dict)
    """What parameters were bound to here, for the next time; goes with the memory."""

    def flat(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first elements, as a vector."""
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def in_host_memory(self) -> torch.Tensor:
        """A copy of its bytes there."""
        return torch.empty(self.bytes, dtype=torch.uint8).copy_(self.memory)


@dataclass(slots=True)
class SlotView:
    """A parameter's residency: a view of a slot with a storage of its own, whose uses can be counted."""

    slot: Slot
    view: torch.Tensor
    storage: torch.UntypedStorage
    uses: int
    """How often the storage is used while nothing else holds on to it."""

    @property
    def aliased(self) -> bool:
        """Whether something besides the parameter holds on to the memory."""
        return torch._C._storage_Use_Count(self.storage._cdata) > self.uses

    @property
    def outlived(self) -> bool:
        """True if something holds on to the memory although the parameter does not any more: keep the slot."""
        return torch._C._storage_Use_Count(self.storage._cdata) > self.uses - 1


@dataclass(slots=True, eq=False)
class Chunk:
    """One extent: the slot that always exists for it, and its other copies by tier."""

    extent: Extent
    bytes: int
    home: Slot
    version: int = 0
    copies: dict[int, Slot] = field(default_factory=dict)
    planned: bool = False
    """Whether it is there for good (an accumulator may be there for one step only)."""

    def newest(self, tier: int) -> Slot | None:
        """The slot on a tier that holds the newest bytes."""
        for slot in (self.copies.get(tier), self.home):
            if slot is not None and slot.tier == tier and slot.version == self.version:
                return slot
        return None

    def source(self) -> Slot:
        """Any slot that holds the newest bytes, fastest tier first."""
        for slot in sorted((*self.copies.values(), self.home), key=lambda slot: slot.tier):
            if slot.version == self.version:
                return slot
        raise PlanMismatch(f"no copy of {self.extent.kind.value} of group {self.extent.index} is the newest")

    def mark_written(self, slot: Slot) -> None:
        """Note that a slot's bytes were changed: it alone is the newest now."""
        self.version += 1
        slot.version = self.version
        slot.extent = self.extent

    @property
    def has_current_copy(self) -> bool:
        """Whether the newest bytes are anywhere."""
        return any(slot.version == self.version for slot in (self.home, *self.copies.values()))

    @property
    def home_is_stale(self) -> bool:
        """Whether home is behind."""
        return self.home.version != self.version

"""Keep offloaded activations where a plan has them.

[Note: planned activations]
To a plan an offloaded activation is an extent. It is made in one moment, in a slot of the compute tier, and it is taken
in others. In between the plan may move it down and up, as it moves weights: on the same queues, in a known order.
Autograd's tensors stay PyTorch's. While it is made the tensor is copied into the slot. When backward asks for it the
slot is copied to a new tensor. Both copies are the compute queue's. So a copy down runs beside the next moment. A copy
up is over when the moment begins in which backward asks: one block before its use.

A slot here has version 0 once it has the bytes; `Slot.mark_unread` takes that back.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from ps_core._errors import DoesNotFit
from ps_core._plan import Queue
from ps_core._units import align_up
from ps_core.engine._execution.segment_queues import PlannedMoment
from ps_core.engine._memory.activation_slots import OffloadedActivation
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.tier_store import TierStore


class PlannedActivations:
    """The activations that one segment of a plan moves; see [Note: planned activations]."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._kept: dict[str, weakref.ref[OffloadedActivation]] = {}
        """The activations that were made, by name."""
        self._copies: dict[str, list[Slot]] = {}
        """The slots that have, or are getting, each one's bytes."""
        self._name_of: dict[Slot, str] = {}
        self._here: dict[str, Slot] = {}
        """The slots of the activations that the moment makes or takes."""

    def begin(self, moment: PlannedMoment, slots: Mapping[int, Slot]) -> None:
        """Note the slots of a moment that begins; ``slots``: by the plan's numbers."""
        self._here = {name: slots[number] for name, number in moment.activations}

    # What autograd saves.

    def keep(self, activation: OffloadedActivation) -> bool:
        """Copy an activation's tensor into the slot that the plan has for it; False: it has none."""
        slot, tensor = self._here.get(activation.name), activation.held
        if slot is None or tensor is None or activation.name in self._kept or slot.bytes < activation.nbytes:
            return False
        self._copy("keep an activation", bytes_of(tensor), slot.memory[: activation.nbytes])
        slot.mark_filled()
        self._kept[activation.name] = weakref.ref(activation)
        self._copies[activation.name], self._name_of[slot] = [slot], activation.name
        activation.move_to(None)
        return True

    def restore(self, activation: OffloadedActivation, target: torch.Tensor) -> bool:
        """Copy an activation's bytes from its slot; False: the plan does not have it here now."""
        slot = self._here.get(activation.name)
        if slot is None or not self._has(activation) or slot not in self._copies[activation.name] or slot.version:
            return False
        self._copy("restore an activation", slot.memory[: activation.nbytes], target)
        return True

    def _has(self, activation: OffloadedActivation) -> bool:
        kept = self._kept.get(activation.name)
        return kept is not None and kept() is activation

    def _copy(self, what: str, source: torch.Tensor, target: torch.Tensor) -> None:
        self._store.device.declare_access(Queue.COMPUTE, what, (source,), (target,))
        target.copy_(source)

    # What the plan does.

    def copy(self, queue: Queue, name: str, source: Slot, target: Slot) -> int:
        """Launch the plan's copy of an activation; return its bytes, 0 where there is nothing to copy."""
        activation = self._kept[name]() if self._name_of.get(source) == name else None
        if activation is None or not _wanted(activation) or source.version:
            return 0
        size = align_up(activation.nbytes)
        self._store.copy(queue, target, source, size)
        target.mark_filled()
        self._copies[name].append(target)
        self._name_of[target] = name
        return size

    def release(self, slot: Slot) -> bool:
        """Note that a slot is released; False, and nothing done: it has the only bytes of what is still wanted."""
        name = self._name_of.get(slot)
        if name is None:
            return True
        copies, activation = self._copies[name], self._kept[name]()
        if activation is not None and _wanted(activation) and len(copies) == 1:
            return False
        copies.remove(slot)
        del self._name_of[slot]
        return True

    # The end.

    @property
    def slots(self) -> list[Slot]:
        """Return the slots that have an activation's bytes."""
        return list(self._name_of)

    def abandon(self) -> set[Slot]:
        """Make activations independent of the plan; return the slots that are theirs now."""
        theirs = set[Slot]()
        for name, copies in self._copies.items():
            activation = self._kept[name]()
            if activation is None or not _wanted(activation):
                continue
            current = [slot for slot in copies if slot.version == 0]
            below = min((slot for slot in current if slot.tier), key=lambda slot: slot.tier, default=None)
            if below is not None:
                activation.room.adopt(activation, below)
                theirs.add(below)
            elif current:
                _leave(activation, current[0].memory[: activation.nbytes])
        self._kept.clear()
        return theirs


def _leave(activation: OffloadedActivation, memory: torch.Tensor) -> None:
    """Move an activation off the compute tier; where there is no room below, hold it as a tensor of its own."""
    try:
        activation.room.offload(activation, memory)
    except DoesNotFit:
        tensor = activation.empty(memory.device)
        bytes_of(tensor).copy_(memory)
        activation.hold(tensor)


def _wanted(activation: OffloadedActivation) -> bool:
    """Return True if the plan's slots have the only bytes."""
    return activation.held is None and activation.slot is None


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)

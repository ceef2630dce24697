"""Keep released slots for the next use of the same size, where each slot is memory of its own.

The system clears every page of new memory. That costs a step of several ranks up to a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Hashable

from ps_core.engine._memory.chunk import Slot


class SlotCache:
    """Kept slots of the compute tier of a store without an arena; the ledger counts them as used."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {}
        """Kept slots by size."""

    def put(self, slot: Slot) -> None:
        """Keep a slot that nothing works on any more."""
        slot.clear()
        self._slots.setdefault(slot.bytes, []).append(slot)

    def has(self, size: int) -> bool:
        """Return True if a slot of this size is kept: `pop` returns it."""
        return bool(self._slots.get(size))

    def pop(self, size: int, record: Hashable = None) -> Slot | None:
        """Return a kept slot of this size, if possible the one where this parameter was; None: there is none."""
        slots = self._slots.get(size)
        if not slots:
            return None
        places = (place for place, slot in enumerate(slots) if (slot.offset, record) in slot.views)
        return slots.pop(next(places, -1))

    @property
    def bytes(self) -> int:
        """Return the bytes of all kept slots."""
        return sum(slot.bytes for each in self._slots.values() for slot in each)

    def pop_all(self) -> list[Slot]:
        """Return all kept slots, and keep none."""
        slots = [slot for each in self._slots.values() for slot in each]
        self._slots.clear()
        return slots

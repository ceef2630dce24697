"""Slots kept for the next of their size, where each is memory of its own: the system takes long to give that anew.

It clears every page first, which costs a step of several processes up to a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Hashable

from ps_core.engine._memory.slot import Slot


class SlotCache:
    """Of the compute tier of a store that has no arena; they count as used."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {}
        """By size."""

    def put(self, slot: Slot) -> None:
        """Keep it; nothing works on it any more."""
        slot.clear()
        self._slots.setdefault(slot.bytes, []).append(slot)

    def has(self, size: int) -> bool:
        """Whether there is one of this size."""
        return bool(self._slots.get(size))

    def take(self, size: int, record: Hashable = None) -> Slot | None:
        """One of this size; best that in which this parameter was."""
        slots = self._slots.get(size)
        if not slots:
            return None
        places = (place for place, slot in enumerate(slots) if record in slot.bounds)
        return slots.pop(next(places, -1))

    @property
    def bytes(self) -> int:
        """What is kept."""
        return sum(slot.bytes for each in self._slots.values() for slot in each)

    def take_all(self) -> list[Slot]:
        """Everything that is kept."""
        slots = [slot for each in self._slots.values() for slot in each]
        self._slots.clear()
        return slots

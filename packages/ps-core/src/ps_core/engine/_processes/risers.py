"""Shards that leave the disk while there is room above it: without a plan, what steps and passes have shown decides.

Everything of a group changes once a step, so what is above the disk spares a write and a read, whatever it is; weights
first, for they are read twice. Which shards are where is each process's own business.
"""

from __future__ import annotations

from collections.abc import Iterator

from ps_core.engine._records import GroupRecord
from ps_core.engine._residency import Residency
from ps_core.engine._store import Home


class Risers:
    """Homes that lie at the top of the compute tier's memory, which the disk is next to."""

    def __init__(self, residency: Residency, groups: list[GroupRecord]) -> None:
        self._residency, self._store, self._groups = residency, residency.store, groups
        self._risen: list[Home] = []
        """In order; each lies below the one before."""
        self._besides_bytes = 0
        """The most that was ever taken by all else."""

    @property
    def _bytes(self) -> int:
        return sum(home.bytes for home in self._risen)

    def rise(self) -> None:
        """After a step: bring up what there was room for all the time, if this step took no more than those before."""
        store, known = self._store, self._besides_bytes
        if not store.is_disk(1) or self._residency.broken:
            return
        self._besides_bytes = max(known, store.peak_bytes[0] - self._bytes)
        if self._besides_bytes > known:
            return
        room = store.tiers[0].capacity_bytes - self._besides_bytes - self._bytes
        for home in self._waiting():
            top = self._risen[-1].slot.offset if self._risen else store.tiers[0].capacity_bytes
            room -= home.bytes
            if room < 0 or store.overlapping(top - home.bytes, home.bytes):
                return
            self._move(home, 0, top - home.bytes)
            self._risen.append(home)

    def _waiting(self) -> Iterator[Home]:
        """Those on the disk."""
        rows = [(kind is not group.weight, group.homes[kind]) for group in self._groups for kind in group.homes]
        for _, home in sorted(rows, key=lambda row: row[0]):
            if home.planned and home.slot.place is not None:
                yield home

    def sink(self, size: int) -> int:
        """Take back at least so many bytes, if there are; how many it came to."""
        done = 0
        while self._risen and done < size and not self._residency.broken:
            home = self._risen.pop()
            self._move(home, 1)
            done += home.bytes
        return done

    def _move(self, home: Home, tier: int, offset: int = -1) -> None:
        target = self._store.reserve(tier, home.bytes, offset)
        self._residency.copy_to(home, target)
        old, home.slot = home.slot, target
        self._residency.give_back(old)

"""Shards that leave the disk while there is room above it: without a plan, what steps and passes have shown decides.

Everything of a group changes once a step, so what is above the disk spares a write and a read, whatever it is; weights
and sums first, for they are used more than once. Which shards are where is each process's own business.
"""

from __future__ import annotations

from collections.abc import Iterator

from ps_core._program import Kind
from ps_core.engine._records import GroupRecord
from ps_core.engine._residency import Residency
from ps_core.engine._store import Home

_WEIGHTS, _SUMS, _STATES = range(3)


class Risers:
    """Homes that lie at the top of the compute tier's memory, which the disk is next to."""

    def __init__(self, residency: Residency, groups: list[GroupRecord]) -> None:
        self._residency, self._store, self._groups = residency, residency.store, groups
        self._risen: list[Home] = []
        """In order; each lies below the one before."""
        self._besides_bytes = 0
        """What all else took at most, as known after the last step."""

    def rise(self) -> None:
        """After a step: bring up what there was room for all the time, if this step took no more than those before."""
        store, known = self._store, self._besides_bytes
        if not store.is_disk(1) or self._residency.broken:
            return
        self._besides_bytes = store.peak_besides_bytes
        room = store.tiers[0].capacity_bytes - self._besides_bytes - store.risen_bytes
        self._sink(-room, _WEIGHTS)
        if self._besides_bytes > known:
            return
        for home in self._waiting():
            top = self._risen[-1].slot.offset if self._risen else store.tiers[0].capacity_bytes
            room -= home.bytes
            if room < 0 or store.overlapping(top - home.bytes, home.bytes):
                return
            store.risen_bytes += home.bytes
            self._move(home, 0, top - home.bytes)
            self._risen.append(home)

    def _waiting(self) -> Iterator[Home]:
        """Those on the disk."""
        homes = [home for group in self._groups for home in group.homes.values()]
        for home in sorted(homes, key=self._rank):
            if home.planned and home.slot.place is not None:
                yield home

    def _rank(self, home: Home) -> int:
        if home.extent.kind is self._groups[home.extent.index].weight:
            return _WEIGHTS
        return _SUMS if home.extent.kind is Kind.ACC else _STATES

    def sink(self, size: int) -> int:
        """Amid a pass, take back so many bytes of what no collective works on; how many it came to."""
        return self._sink(size, _STATES)

    def _sink(self, size: int, first: int) -> int:
        done = 0
        while self._risen and done < size and self._rank(self._risen[-1]) >= first and not self._residency.broken:
            home = self._risen.pop()
            self._move(home, 1)
            self._store.risen_bytes -= home.bytes
            done += home.bytes
        return done

    def _move(self, home: Home, tier: int, offset: int = -1) -> None:
        target = self._store.reserve(tier, home.bytes, offset)
        self._residency.copy_to(home, target)
        old, home.slot = home.slot, target
        self._residency.give_back(old)

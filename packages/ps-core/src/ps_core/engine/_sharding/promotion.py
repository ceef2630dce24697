"""Shards that come up to the compute tier while there is room: without a plan, what steps have shown decides.

[Note: who rises]
Above a disk a shard of anything spares a write and a read a step. On an accelerator a 16-bit weight spares two copies
up and a sum down, and costs a copy of its gradient down and one of what the step makes of it; states spare those two,
and are stepped on the card. In fp32, where the weight is the master, all of a group spares whatever crosses the link,
and less than all of it nothing. So weights come first, then sums, then states, and what a step must find in one place
comes at once. Which shards are where is each process's own business: no result and no message depends on it.

A home that has risen keeps its place below: it can go back at any time, and a step that is done there finds room. What
a collective works on does not move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias

import torch

from ps_core._program import Kind
from ps_core._simulate.cluster import FRAGMENTATION
from ps_core.engine._memory.reserve import bytes_to_reserve
from ps_core.engine._memory.slot import Chunk, Slot
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state import ParamGroup

_WEIGHTS, _SUMS, _STATES = range(3)
_Unit: TypeAlias = tuple[Chunk, ...]
"""Homes of one group that rise and sink at once."""


class ShardPromoter:
    """Homes that lie at the top of the compute tier's memory."""

    def __init__(self, residency: Residency, groups: list[ParamGroup]) -> None:
        self._residency, self._store, self._groups = residency, residency.store, groups
        self._risen: list[_Unit] = []
        """In the order in which they came up."""
        self._besides_bytes = 0
        """What all else took at most, as known after the last step."""
        self._spare_bytes = 0
        """Left free beyond that, since the device ran out of memory."""
        self.waiting = len(self._store.tiers) > 1
        """Whether anything would still come up, had it room."""

    def rise(self) -> None:
        """Between passes: bring up what there was room for all the time, if the last one took no more than before."""
        store, known = self._store, self._besides_bytes
        if not (self.waiting or self._risen) or self._residency.broken:
            return
        self._besides_bytes = store.ledger.peak_besides_bytes
        room = store.tiers[0].capacity_bytes - self._besides_bytes - store.ledger.promoted_bytes - self._margin_bytes()
        self.sink(-room)
        if self._besides_bytes > known:
            return
        for unit in self._below():
            room -= sum(chunk.bytes for chunk in unit)
            if room < 0 or not self._lift(unit):
                return
        self.waiting = False

    def _margin_bytes(self) -> int:
        """What a card's allocator loses to pieces too small to use."""
        lost = 0 if self._store.device.lazy else int(self._store.ledger.highest_nonmodel_bytes * FRAGMENTATION)
        return lost + self._spare_bytes

    def _below(self) -> Iterator[_Unit]:
        """Units that have not risen, those first that are worth most."""
        apart = self._store.is_disk(1)
        rows = [row for group in self._groups if not group.pinned for row in _units(group, apart=apart)]
        for _, unit in sorted(rows, key=lambda row: row[0]):
            if all(chunk.planned and chunk.home.tier for chunk in unit):
                yield unit

    def _lift(self, unit: _Unit) -> bool:
        """Bring a unit up, if there is memory for it."""
        targets: list[Slot] = []
        for chunk in unit:
            offset = self._store.arena.highest_free(chunk.bytes)
            try:
                if offset is None:
                    break
                targets.append(self._store.reserve(0, chunk.bytes, offset))
            except torch.OutOfMemoryError:  # others have it
                break
        if len(targets) < len(unit):
            for target in targets:
                self._residency.give_back(target)
            return False
        for chunk, target in zip(unit, targets, strict=True):
            self._store.ledger.note_promoted(chunk.bytes)
            self._residency.copy_to(chunk, target)
            chunk.add_copy(chunk.rehome(target))
        self._risen.append(unit)
        return True

    def sink(self, size: int, in_use: Collection[ParamGroup] = ()) -> int:
        """Take so many bytes back, but none of groups in use by a collective; return how many it came to."""
        done = 0
        for unit in reversed(list(self._risen)):
            if done >= size or self._residency.broken:
                break
            if self._groups[unit[0].extent.index] not in in_use:
                self._risen.remove(unit)
                self.waiting = True
                done += sum(self._lower(chunk) for chunk in unit)
        return done

    def give_in(self, size: int, in_use: Collection[ParamGroup]) -> int:
        """The same amid a pass, which shows that all else needs more than was known."""
        done = self.sink(size, in_use)
        if done:
            self._store.ledger.note_besides(self._store.tiers[0].capacity_bytes - self._store.ledger.promoted_bytes)
        return done

    def sink_all(self, missing_bytes: int) -> None:
        """Take everything back; so much was asked for in vain, if any, and more is to be left free from now on."""
        if missing_bytes:
            self._spare_bytes += bytes_to_reserve(missing_bytes, self._store.tiers[0].capacity_bytes)
        self.sink(self._store.ledger.promoted_bytes)

    def _lower(self, chunk: Chunk) -> int:
        risen, below = chunk.home, chunk.copies[low_tier(chunk)]
        if below.version != chunk.version:
            self._residency.copy_to(chunk, below)
            self._residency.check_disk()
        chunk.rehome(below)
        self._store.ledger.note_promoted(-risen.bytes)
        self._residency.give_back(risen)
        return risen.bytes


def low_tier(chunk: Chunk) -> int:
    """Where a home is, or where it goes back to."""
    return max((chunk.home.tier, *chunk.copies))


def _units(group: ParamGroup, *, apart: bool) -> Iterator[tuple[int, _Unit]]:
    """What of a group rises at once, and how soon; ``apart``: every home by itself."""
    chunks = {kind: chunk for kind, chunk in group.chunks.items() if kind is not Kind.FULL}
    ranks = {kind: _WEIGHTS if kind is group.weight else _SUMS if kind is Kind.ACC else _STATES for kind in chunks}
    if apart:
        yield from ((ranks[kind], (chunk,)) for kind, chunk in chunks.items())
    elif group.weight is Kind.P32:
        yield _WEIGHTS, tuple(chunks.values())
    else:
        for rank in sorted(set(ranks.values())):
            yield rank, tuple(chunk for kind, chunk in chunks.items() if ranks[kind] == rank)

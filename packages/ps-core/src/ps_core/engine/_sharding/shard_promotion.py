"""Promote shards to the compute tier while it has room: without a plan, what earlier steps took decides.

[Note: which shards are promoted]
Above a disk a shard of anything spares a write and a read a step. On an accelerator a promoted 16-bit weight saves two
copies up and a sum down. It costs two copies down: its gradient's, and that of what the step makes of it. Promoted
states save those two, and are stepped on the card. In fp32 the weight is the master. There all of a group saves
whatever crosses the link, and less than all of it saves nothing. So weights come first, then sums, then states, and
what a step must find in one place comes at once. Each rank decides alone which of its shards are promoted: no result
and no message depends on it.

A promoted chunk keeps its slot on the lower tier. So it can be demoted at any time, and a step there finds room. The
memory that a collective works on does not move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias

import torch

from ps_core._program import Kind
from ps_core._simulate.cluster import FRAGMENTATION
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._memory.reserved_bytes import bytes_to_reserve
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._parameters.residency import Residency

_WEIGHTS, _SUMS, _STATES = range(3)
_Unit: TypeAlias = tuple[Chunk, ...]
"""Chunks of one group that are promoted and demoted together."""


class ShardPromoter:
    """Promotes and demotes shards; promoted ones lie at the top of the compute tier's arena."""

    def __init__(self, residency: Residency, groups: list[ParamGroup]) -> None:
        self._residency, self._store, self._groups = residency, residency.store, groups
        self._promoted: list[_Unit] = []
        """In the order of their promotion."""
        self._besides_bytes = 0
        """The most that everything else took, as known after the last step."""
        self._spare_bytes = 0
        """Left free beyond that, since the device ran out of memory."""
        self.waiting = len(self._store.tiers) > 1
        """True: a shard could still be promoted if there were room."""
        self._stopped = False

    def stop(self) -> None:
        """Promote nothing from now on: a plan says where shards live."""
        self._stopped, self.waiting = True, False

    def promote(self) -> None:
        """Promote, between passes, what always had room, unless the last pass took more memory than before."""
        store, known = self._store, self._besides_bytes
        if self._stopped or not (self.waiting or self._promoted) or self._residency.transfers.broken:
            return
        self._besides_bytes = store.ledger.peak_besides_bytes
        room = store.tiers[0].capacity_bytes - self._besides_bytes - store.ledger.promoted_bytes - self._margin_bytes()
        self.demote(-room)
        if self._besides_bytes > known:
            return
        for unit in self._not_promoted():
            room -= sum(chunk.bytes for chunk in unit)
            if room < 0 or not self._promote_unit(unit):
                return
        self.waiting = False

    def _margin_bytes(self) -> int:
        """Return the bytes to leave free: for fragmentation, and for what the device ran out of before."""
        lost = 0 if self._store.device.overcommits else int(self._store.ledger.highest_nonmodel_bytes * FRAGMENTATION)
        return lost + self._spare_bytes

    def _not_promoted(self) -> Iterator[_Unit]:
        """Yield units that are not promoted, the most useful first."""
        apart = self._store.is_disk(1)
        rows = [row for group in self._groups if not group.pinned for row in _units(group, apart=apart)]
        for _, unit in sorted(rows, key=lambda row: row[0]):
            if all(chunk.planned and chunk.home.tier for chunk in unit):
                yield unit

    def _promote_unit(self, unit: _Unit) -> bool:
        """Promote a unit; return False if there is no memory for it."""
        targets: list[Slot] = []
        for chunk in unit:
            offset = self._store.arena.highest_free(chunk.bytes)
            try:
                if offset is None:
                    break
                targets.append(self._store.reserve(0, chunk.bytes, offset))
            except torch.OutOfMemoryError:  # other tensors have it
                break
        if len(targets) < len(unit):
            for target in targets:
                self._residency.transfers.release_slot(target)
            return False
        for chunk, target in zip(unit, targets, strict=True):
            self._store.ledger.note_promoted(chunk.bytes)
            self._residency.transfers.copy_to(chunk, target)
            chunk.add_copy(chunk.rehome(target))
        self._promoted.append(unit)
        return True

    def demote(self, size: int, in_use: Collection[ParamGroup] = ()) -> int:
        """Demote at least ``size`` bytes, but no group that a collective uses; return how many were demoted."""
        done = 0
        for unit in reversed(list(self._promoted)):
            if done >= size or self._residency.transfers.broken:
                break
            if self._groups[unit[0].extent.index] not in in_use:
                self._promoted.remove(unit)
                self.waiting = True
                done += sum(self._demote_chunk(chunk) for chunk in unit)
        return done

    def demote_during_pass(self, size: int, in_use: Collection[ParamGroup]) -> int:
        """Demote during a pass, and remember that everything else needs more memory than was known."""
        done = self.demote(size, in_use)
        if done:
            self._store.ledger.note_besides(self._store.tiers[0].capacity_bytes - self._store.ledger.promoted_bytes)
        return done

    def demote_all(self, missing_bytes: int) -> None:
        """Demote everything; if an allocation of ``missing_bytes`` failed, leave more memory free from now on."""
        if missing_bytes:
            self._spare_bytes += bytes_to_reserve(missing_bytes, self._store.tiers[0].capacity_bytes)
        self.demote(self._store.ledger.promoted_bytes)

    def _demote_chunk(self, chunk: Chunk) -> int:
        promoted, below = chunk.home, chunk.copies[low_tier(chunk)]
        if below.version != chunk.version:
            self._residency.transfers.copy_to(chunk, below)
            self._residency.transfers.check_disk()
        chunk.rehome(below)
        self._store.ledger.note_promoted(-promoted.bytes)
        self._residency.transfers.release_slot(promoted)
        return promoted.bytes


def low_tier(chunk: Chunk) -> int:
    """Return the lowest tier on which a chunk has a slot."""
    return max((chunk.home.tier, *chunk.copies))


def _units(group: ParamGroup, *, apart: bool) -> Iterator[tuple[int, _Unit]]:
    """Yield a group's units, each with its priority; ``apart``: every chunk by itself."""
    chunks = {kind: chunk for kind, chunk in group.chunks.items() if kind is not Kind.FULL}
    ranks = {kind: _WEIGHTS if kind is group.weight else _SUMS if kind is Kind.ACC else _STATES for kind in chunks}
    if apart:
        yield from ((ranks[kind], (chunk,)) for kind, chunk in chunks.items())
    elif group.weight is Kind.P32:
        yield _WEIGHTS, tuple(chunks.values())
    else:
        for rank in sorted(set(ranks.values())):
            yield rank, tuple(chunk for kind, chunk in chunks.items() if ranks[kind] == rank)

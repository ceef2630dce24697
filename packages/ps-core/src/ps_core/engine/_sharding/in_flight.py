"""Collectives of a pass, made ready and taken in: their memory, and what this process puts into them."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

from ps_core._plan import Queue
from ps_core._program import WIRE_BYTES
from ps_core._units import align_up
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.make_room import has_room, make_room
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._parameters.errors import compute_tier_too_small
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._sharding.collective_order import CollectiveOp, CollectiveOrder, StagedGradients
from ps_core.engine._sharding.collective_schedule import Collective, ProposalKind
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency

_ON_WAY = 2
"""Sums that may be on their way at once: each holds a group's memory."""


class GatherWatcher(TransferObserver, Protocol):
    """Told of gathers too."""

    def fetched(self, *, early: bool) -> None:
        """Count a gather of a group that is used now; ``early``: the gather had begun before."""


class InFlightCollectives:
    """Collectives of this rank that were begun or prepared, and their buffers."""

    def __init__(self, residency: ShardedResidency, gradients: ShardedGradients, order: CollectiveOrder) -> None:
        self._shards, self._sums, self._order = residency, gradients, order
        self._store = residency.store
        self.staged: dict[ParamGroup, StagedGradients] = {}
        self.ahead: dict[ParamGroup, CollectiveOp] = {}
        """Gathers that were begun (and may be over) of groups that were not used yet."""
        self.under_way: deque[CollectiveOp] = deque()
        """In the order in which they are done."""
        self._records = {record.index: record for group in residency.groups for record in group.tensors}

    # Gathers.

    def gather(self, group: ParamGroup, position: int | None, *, wanted: bool) -> CollectiveOp:
        """Prepare a gather of a group; with ``wanted`` False, only give this rank's shard."""
        collective, name = Collective(ProposalKind.GATHER, group.index), f"gather {group.name}"
        if wanted:
            slot, whole, own = self._shards.begin_gather(group)
            step = CollectiveOp(collective, group, position, own, whole, slot=slot)
            self.ahead[group] = step
            self._store.device.declare_access(Queue.COLL, name, (own,), (whole,))
        else:
            step = CollectiveOp(collective, group, position, torch.empty(0, dtype=torch.uint8, device="cpu"))
            self.offer(step)
        return step

    def offer(self, step: CollectiveOp) -> None:
        """Prepare this rank's shard for the gather; again, if the slot it was in gets another use."""
        self.finds_hole(step.group.chunks[step.group.weight].bytes)
        step.shard, lent = self._shards.shard_for_peers(step.group, changing=self.sum_on_way(step.group) is not None)
        step.slots = () if lent is None else (lent,)
        self._store.device.declare_access(Queue.COLL, f"gather {step.group.name}", (step.shard,), ())

    # Sums.

    def sum(self, group: ParamGroup, position: int | None, *, gives: bool, alone: bool = True) -> CollectiveOp:
        """Prepare a sum of a group's gradients over ranks.

        ``gives``: what is staged goes into it. ``alone``: no other sum of the group is under way.
        """
        collective, nothing = Collective(ProposalKind.SUM, group.index), torch.empty(0, dtype=torch.uint8, device="cpu")
        step = CollectiveOp(collective, group, position, nothing, staged=self.staged.pop(group) if gives else None)
        self.allocate_buffers(step, alone=alone)
        return step

    def allocate_buffers(self, step: CollectiveOp, *, alone: bool = True) -> None:
        """Give a sum the memory it needs."""
        group, staged = step.group, step.staged
        name, numel, kind = f"gradients of {group.name}", group.shard_numel, self._sums.dtype(group)
        scratch = self.reserve(self._scratch_bytes(group), name)
        direct = self._sums.direct_target(group) if alone else None  # after everything that may move home slots
        target = direct or self.reserve(numel * kind.itemsize, name)
        if staged is not None:
            step.whole = staged.slot.flat(group.dtype, group.chunk_numel)
            self._clear(group, staged, step.whole)
        self._shards.ordering.before()
        reads = () if step.whole is None else (step.whole,)
        self._store.device.declare_access(Queue.COLL, name, reads, (target.memory, scratch.memory))
        step.shard, step.scratch, step.slot = target.flat(kind, numel), scratch.memory, target
        step.slots = (scratch,) if direct else (scratch, target)

    def release_buffers(self, step: CollectiveOp) -> None:
        """Release the buffers of a collective that was passed over; a sum gets new ones, a gather is requested anew."""
        if step.collective.kind is ProposalKind.SUM:
            slots = step.slots
            step.slot, step.slots = None, ()
        elif step.whole is not None:
            assert step.slot is not None, "it has where to go"
            assert step.position is not None, "it waits for its place in the schedule"
            self.ahead.pop(step.group, None)
            step.group.weight_chunk.drop_copy(0)
            self._order.skip_gather(step.position)
            slots = (step.slot,)
            step.whole = step.slot = None
            self.offer(step)
        else:
            return
        for slot in slots:
            self._shards.return_slot(slot)
        self._store.free_spare()

    def sum_bytes(self, group: ParamGroup) -> int:
        """Return the bytes that a sum takes besides the gradients, at most."""
        shard = group.shard_numel * self._sums.dtype(group).itemsize
        return self._scratch_bytes(group) + max(align_up(shard), 128)

    def _scratch_bytes(self, group: ParamGroup) -> int:
        return max(align_up(min(self._shards.ordering.scratch_bytes(group.shard_numel, group.dtype), WIRE_BYTES)), 128)

    def _clear(self, group: ParamGroup, staged: StagedGradients, whole: torch.Tensor) -> None:
        """Write zeros where a group has no gradient."""
        gaps = [record.span for record in group.tensors if record not in staged.records]
        for gap in (*gaps, slice(group.numel, group.chunk_numel)):
            if gap.stop > gap.start:
                self._store.device.declare_access(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
                whole[gap].zero_()

    def sum_on_way(self, group: ParamGroup) -> CollectiveOp | None:
        """Return the group's sum that is under way; None if there is none."""
        return next(
            (step for step in self.under_way if step.group is group and step.collective.kind is ProposalKind.SUM), None
        )

    def too_many_sums(self) -> CollectiveOp | None:
        """Return the sum to wait for before another one begins; None if no wait is needed."""
        sums = [step for step in self.under_way if step.collective.kind is ProposalKind.SUM]
        return sums[0] if len(sums) >= _ON_WAY else None

    # Finished collectives.

    def collect_finished(self) -> None:
        """Take over the results of finished collectives."""
        while self.under_way and self.under_way[0].done:
            step = self.under_way.popleft()
            if step.index >= 0:
                self._shards.ordering.after(step.over)
            if step.collective.kind is ProposalKind.SUM:
                records = [self._records[index] for index in _bits(step.tensors)]
                for record in records:
                    self._sums.expect(record)
                if records:
                    assert step.slot is not None, "a sum fills a slot"
                    self._sums.accept_sum(step.group, records, step.slot)
                else:
                    self._sums.no_sum_came(step.group)
            elif step.slot is not None:
                self._shards.end_gather(step.group, step.slot)
            for slot in (*step.slots, *((step.staged.slot,) if step.staged is not None else ())):
                self._shards.return_slot(slot)

    def wait(self, step: CollectiveOp) -> bool:
        """Wait for a collective; False if it was abandoned because all ranks do another one first."""
        started = time.perf_counter()
        assert step.pending is not None, "it was begun"
        step.pending.wait()
        self._shards.transfers.watcher.waited(time.perf_counter() - started)
        return step.done

    # Room.

    def reserve(self, size: int, name: str) -> Slot:
        """Reserve a slot on the compute tier, making room first; raise `DoesNotFit` if there is none to be made."""
        size = max(align_up(size), 128)
        self.make_hole(size, name)
        return self._shards.take_slot(size)

    def make_hole(self, size: int, name: str) -> None:
        """Make room for a slot on the compute tier; raise `DoesNotFit` if that fails."""
        if not self.finds_hole(size):
            store, groups = self._store, self._shards.groups
            total = store.ledger.used_bytes[0] + size + store.ledger.nonmodel_bytes
            raise compute_tier_too_small(store, groups, name, total, store.ledger.nonmodel_bytes, proven=True)

    def finds_hole(self, size: int) -> bool:
        """Make room for a slot, demoting shards if nothing else helps; return whether there is room."""
        return make_room(lambda: self.finds_unused(size), lambda: self.demote_during_pass(size))

    def demote_during_pass(self, size: int) -> int:
        """Demote shards that no collective under way reads or writes, to free so many bytes; return how many it was."""
        return self._shards.promoter.demote_during_pass(size, {step.group for step in self.under_way})

    def finds_unused(self, size: int) -> bool:
        """Make room for a slot by releasing unused memory; return whether there is room."""
        sources = (self.collect_finished, self._shards.release_unaliased, self._free_spare, self.drop_unused)
        return make_room(lambda: self.has_room(size), *sources)

    def _free_spare(self) -> None:
        self._store.free_spare()  # all of it at once: do not ask again

    def has_room(self, size: int, besides: int = 0) -> bool:
        """Return True if there is room for a slot and ``besides`` bytes; a kept slot of this size counts as room."""
        return self.has_new_room(0 if self._store.spare.has(size) else size, besides)

    def has_new_room(self, size: int, besides: int = 0) -> bool:
        """True if the compute tier has room for a new slot and for other bytes ``besides``."""
        return has_room(self._store, [size], nonmodel_bytes=self._store.ledger.nonmodel_bytes, besides=besides)

    def drop_unused(self) -> None:
        """Release groups that were gathered ahead of need."""
        for group, step in list(self.ahead.items()):
            if step.done and step not in self.under_way:
                del self.ahead[group]
                self._shards.evict(group)
        self._store.free_spare()

    def clear(self) -> None:
        """Forget everything under way: the pass is over, or broke off."""
        for staged in self.staged.values():
            self._shards.return_slot(staged.slot)
        self.staged.clear()
        self.under_way.clear()
        self.ahead.clear()


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found

"""Serve a pass of one rank on demand, while it takes part in the collectives of the others' plan.

[Note: leaving a plan with several ranks]
A rank may do other than the plan, as with a larger batch, other experts, or memory still in use. The other ranks
neither hear of it nor wait for an agreement. The rank submits the plan's collectives in the plan's order. It submits
each one as soon as it needs a later one, or has the gradients that it gives. It drops what it gathers and does not
need: how much else a moment takes is not known. It *asks for* weights that no collective brings in time. Every rank
answers from its masters, on a thread that waits for nothing. Masters do not change while any rank is in a pass. A
gradient for which the plan has no sum stays until the step. All ranks sum what is left over then, before norms are
taken.

So nobody waits for ever. A rank in a collective waits for a rank that is less far in the plan. The one that is least
far waits for nothing but answers.

[Note: passes without a plan]
A pass that no plan serves has left the plan at its beginning. Its only collectives are one sum for each group with a
parameter that requires gradients. They go from the last group to the first, as most backward passes do. All weights are
asked for. A group's gradients wait for the sums before it, in host memory if there is room. Passes without gradients
have no collective at all.

[Note: weights that one rank reads]
A program may read weights outside of the model, as `print(weight)` does, and on one rank alone. Such a pass has no
collective either. The model's forward may begin in it, if the program keeps a graph of what was read. Then the rank
goes on as one that left the plan. If backward begins in it, all ranks must do the same, as without a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

import torch

from ps_core._errors import DeviceOutOfMemory
from ps_core._plan import Queue
from ps_core._units import align_up
from ps_core.engine._execution.driver_protocols import DriverForRest
from ps_core.engine._gradients.gradient_store import sparse_gradient_error
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.make_room import has_room, make_room
from ps_core.engine._parameters.errors import compute_tier_too_small
from ps_core.engine._parameters.held_memory import check_held_memory
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.submitted_collectives import CollectiveQueue, Submitted
from ps_core.engine._support.counters import Counters


class FollowingDriver:
    """Drives a pass, or the rest of one; see [Note: leaving a plan with several ranks]."""

    tracked = True
    follows_plan = True

    def __init__(
        self,
        queue: CollectiveQueue,
        collectives: Iterable[tuple[bool, ParamGroup]],
        learning: dict[ParamGroup, list[ParamState]],
        gradients: ShardedGradients,
        counters: Counters,
        *,
        staged: dict[ParamGroup, tuple[Slot, list[ParamState]]] | None = None,
        for_rest: DriverForRest | None = None,
    ) -> None:
        """``collectives``: those that this rank has not submitted, in order; True: a sum, False: a gather.

        ``learning``: by group, the parameters whose gradients they sum. ``staged``: gradients that are there for it,
        with the slots that hold them. ``for_rest``: see `PassDriver`.
        """
        self._queue, self._collectives, self.for_rest = queue, deque(collectives), for_rest
        self._learning, self._staged = learning, staged or {}
        self._residency, self._gradients, self._counters = queue.residency, gradients, counters
        self._store = queue.residency.store
        self._fetched = {group: None for group in queue.residency.groups if 0 in group.weight_chunk.copies}
        """Groups with a gathered copy, least recently used first."""
        self.needed = set[ParamGroup]()
        """Groups that the moment reads."""
        self._gaining: list[ParamGroup] = []
        """Groups that receive gradients in the moment."""

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Gather the groups that the moment reads, and keep nothing else that can go: what it takes is not known."""
        groups = list(dict.fromkeys(record.group for record in reads))
        self.needed, self._gaining = set(groups), gains
        self._free_unneeded()
        for group in groups:
            if group.weight_chunk.newest(0) is None:
                self._fetch(group)
            self._fetched.pop(group, None)
            self._fetched[group] = None
            slot = group.weight_chunk.newest(0)
            assert slot is not None, "it was gathered"
            self._store.device.declare_access(Queue.COMPUTE, name, (slot.memory,), ())
        self._free_unneeded()  # what collectives before these gathers brought

    def _free_unneeded(self) -> None:
        """Free what the moment does not use of the compute tier."""
        while self._drop_one() or self._move_staged_to_host(into_free=True):
            pass
        self._residency.release_unaliased()
        self._store.free_spare()

    def _fetch(self, group: ParamGroup) -> None:
        """Gather a group as the plan does, if its gather can be reached; else ask the other ranks for it."""
        for place, (is_sum, other) in enumerate(self._collectives):
            if is_sum and not self._is_final(other):
                break
            if not is_sum and other is group:
                for _ in range(place + 1):
                    self._run_next()
                break
        self._counters.fetched(early=False)
        if group.weight_chunk.newest(0) is None:
            slot, whole = self._take_gather_slot(group)
            self._residency.ask_for(group, whole)
            group.weight_chunk.fill(slot)

    def _run_next(self) -> None:
        """Take part in the next collective; where memory for it is short, it stays the next one."""
        is_sum, group = self._collectives[0]
        if is_sum:
            self._sum(group)
        else:
            self._gather(group)
        self._collectives.popleft()

    # Gathers.

    def _gather(self, group: ParamGroup) -> None:
        own, lent = self._residency.shard_for_peers(group)
        here = group.weight_chunk.newest(0)
        try:
            if here is None:
                slot, whole = self._take_gather_slot(group)
                Submitted(self._queue, group, own, whole).wait()
                group.weight_chunk.fill(slot)
                self._fetched[group] = None
            elif group.common is not None:
                Submitted(self._queue, group, own, here.flat(group.dtype, group.chunk_numel)).wait()
            else:  # the copy that is here may be in use
                slot = self._take_slot(group.weight_chunk.bytes, f"gather {group.name}")
                Submitted(self._queue, group, own, slot.flat(group.dtype, group.chunk_numel)).wait()
                self._residency.return_slot(slot)
        finally:
            if lent is not None:
                self._residency.return_slot(lent)

    def _take_gather_slot(self, group: ParamGroup) -> tuple[Slot, torch.Tensor]:
        if group.common is None:
            self._make_room(group.weight_chunk.bytes, f"gather {group.name}")
        return self._residency.begin_gather(group)

    # Gradients.

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient beside those of its group; sum them over ranks once the plan comes to that."""
        if gradient.layout is not torch.strided:
            raise sparse_gradient_error(record, gradient)
        group = record.group
        if group not in self._staged and (True, group) not in self._collectives:
            self._gradients.keep_left_over(record, gradient)
            return True
        if group not in self._staged:
            self._staged[group] = self._take_gradient_slot(group), []
        slot, records = self._staged[group]
        target = record.shaped(slot.flat(group.dtype, group.chunk_numel))
        self._store.device.declare_access(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        if record in records:
            target.add_(gradient.to(target.device))
        else:
            target.copy_(gradient)
            records.append(record)
        if record in self._learning.get(group, ()):
            self._gradients.mark_given(record)
        while self._collectives and self._may_run():
            self._run_next()
        self._free_unneeded()
        return True

    def _may_run(self) -> bool:
        """Return True if a sum may be taken now, or comes right behind gathers: others need not wait."""
        for is_sum, group in self._collectives:
            if is_sum:
                return self._is_final(group)
        return False

    def _is_final(self, group: ParamGroup) -> bool:
        """Return True if all gradients are there that the plan sums."""
        there = self._staged[group][1] if group in self._staged else []
        return set(there) >= set(self._learning.get(group, ()))

    def _sum(self, group: ParamGroup) -> None:
        """Sum what is there of a group's gradients; without any, this rank gives nothing."""
        slot, records = self._take_staged(group)
        whole, planned, left = slot.flat(group.dtype, group.chunk_numel), self._learning[group], list(records)
        try:
            self._queue.fill_gaps(group, records, whole)
            for record in records:
                if record not in planned:  # it gives nothing to this sum, and is summed before the step
                    self._gradients.keep_left_over(record, record.shaped(whole))
                    whole[record.span].fill_(-0.0)
                    left.remove(record)
            take = partial(self._take_slot, name=f"gradients of {group.name}")
            self._queue.sum_now(self._gradients, group, planned, whole, take)
        except BaseException:  # where memory is short the sum is tried again
            self._staged[group] = slot, left
            raise
        self._residency.return_slot(slot)

    def _take_staged(self, group: ParamGroup) -> tuple[Slot, list[ParamState]]:
        """Return a group's gradients, on the compute tier, with the parameters that have one."""
        slot, records = self._staged.get(group, (None, []))
        if slot is None or slot.tier:
            near = self._take_gradient_slot(group)
            if slot is not None:
                self._move(slot, near)
            slot = near
        self._staged.pop(group, None)
        return slot, records

    def _move_staged_to_host(self, *, into_free: bool = False) -> bool:
        """Move the gradients of one group to host memory; return False if none are left on the compute tier.

        ``into_free``: only into memory that is free, and not if further gradients come in this moment. To a disk only
        complete ones go then, for none can be added there.
        """
        if len(self._store.tiers) == 1:
            return False
        for group, (slot, records) in self._staged.items():
            waits = not self._is_final(group) and (group in self._gaining or self._store.is_disk(1))
            if not slot.tier and not (into_free and (waits or self._store.free_bytes(1) < slot.bytes)):
                below = self._store.reserve(1, slot.bytes)
                self._move(slot, below)
                self._staged[group] = below, records
                return True
        return False

    def _move(self, source: Slot, target: Slot) -> None:
        transfers = self._residency.transfers
        transfers.finish(transfers.launch(source, target, min(source.bytes, target.bytes)))
        if source.tier:
            transfers.release_slot(source)
        else:
            self._residency.return_slot(source)

    # The end.

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Drop gathered groups that the moment does not read, until so many bytes are free."""
        before = self._store.ledger.used_bytes[0]

        def enough() -> bool:
            return before - self._store.ledger.used_bytes[0] >= needed_bytes

        make_room(enough, self._drop_one, self._store.free_spare, self._move_staged_to_host)
        return before - self._store.ledger.used_bytes[0]

    def finish(self) -> None:
        """Take part in the rest of the plan's collectives; then drop what was gathered.

        Raise `DeviceOutOfMemory` or `DoesNotFit` if memory is short for one; call this again once there is more.
        """
        self.needed.clear()
        try:
            while self._collectives:
                self._run_next()
        except torch.OutOfMemoryError as error:
            what = "sum" if self._collectives[0][0] else "gather"
            reason = str(error).partition("\n")[0]
            raise DeviceOutOfMemory(
                f"rank {self._residency.together.process}: memory is short for the {what} of "
                f"{self._collectives[0][1].name} ({reason}). This rank's pass has ended, but the other ranks wait for "
                "that. Try: delete all that refers to the pass (its loss, outputs, a caught exception), and call "
                "optimizer.zero_grad(), which runs the remaining collectives; if memory stays short, start anew with a "
                "larger Budget or a smaller batch"
            ) from error
        assert not self._staged, "gradients are only staged for a sum that is to come"
        for group in list(self._fetched):
            self._drop(group)
        self._residency.release_unaliased()

    # Memory.

    def _take_slot(self, size: int, name: str) -> Slot:
        size = max(align_up(size), 128)
        self._make_room(size, name)
        return self._residency.take_slot(size)

    def _take_gradient_slot(self, group: ParamGroup) -> Slot:
        """Return a slot for a group's gradients."""
        return self._take_slot(group.weight_chunk.bytes, f"gradients of {group.name}")

    def _make_room(self, size: int, name: str) -> None:
        """Make room for a slot by dropping gathered groups, the least recently used first."""
        if not make_room(lambda: self._fits(size), self._drop_one, self._store.free_spare, self._move_staged_to_host):
            store, nonmodel = self._store, self._store.ledger.nonmodel_bytes
            total = store.ledger.used_bytes[0] + size + nonmodel
            scattered = total <= store.tiers[0].capacity_bytes  # enough is free, but not side by side
            total = max(total, store.tiers[0].capacity_bytes + size)
            check_held_memory(store, [group for group in self._fetched if group not in self.needed], name, total)
            raise compute_tier_too_small(store, self._residency.groups, name, total, nonmodel, proven=not scattered)

    def _drop_one(self) -> bool:
        """Drop the least recently used group that the moment does not read; return False if there is none.

        A group with live aliases stays: its memory would not get free, and the recording would not have it as held.
        """
        group = next((group for group in self._fetched if group not in self.needed and not group.aliased), None)
        if group is not None:
            self._drop(group)
        return group is not None

    def _fits(self, size: int) -> bool:
        store = self._store
        return store.spare.has(size) or has_room(store, [size], nonmodel_bytes=store.ledger.nonmodel_bytes)

    def _drop(self, group: ParamGroup) -> None:
        self._residency.evict(group)
        self._fetched.pop(group, None)
        group.forget_moment()


class UnplannedDriver(FollowingDriver):
    """Drives a whole pass that no plan serves; see [Note: passes without a plan]."""

    follows_plan = False

"""Carry out a plan's gathers and sums, in the plan's order, beside the computation.

[Note: collectives of a plan]
The order of the collective queue is part of the plan. So all ranks begin the same collectives in the same order, and
nothing is said before one. The training thread submits a collective once its slots exist and the moments that it waits
for are over. It waits for the collective when an instruction or a moment uses one of its slots. Until then the
collective is *under way*, and its slots belong to it.

Every rank takes part in every gather and every sum, whether it needs the result or not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ps_core._extents import Kind, SegmentName
from ps_core._plan import Copy, Gather, Instr, Queue, ReduceScatter, Release, Reserve, slots_of
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.queues import DISK_QUEUES
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.instruction_executor import Diverged, InstructionExecutor
from ps_core.engine._execution.segment_queues import PlannedMoment, SegmentQueues
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._sharding.collective_streams import CollectiveWaits
from ps_core.engine._sharding.following_driver import FollowingDriver
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.submitted_collectives import Submitted, queue_for_pass
from ps_core.engine._support.counters import Counters


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A collective of the plan that is not known to be over."""

    op: Gather | ReduceScatter
    slots: frozenset[int]
    """The plan's numbers of the slots that it reads and writes."""
    submitted: Submitted


def collectives_of(plan: EnginePlan, segment: SegmentQueues) -> tuple[tuple[bool, ParamGroup], ...]:
    """Return a segment's collectives in order: True for a sum or False for a gather, and the group."""
    ops = [instr.op for instr in segment.by_queue[Queue.COLL]]
    return tuple(
        (isinstance(op, ReduceScatter), plan.order[op.group]) for op in ops if isinstance(op, Gather | ReduceScatter)
    )


class RanksExecutor(InstructionExecutor):
    """Carries out the instructions of one segment together with the other ranks; see [Note: collectives of a plan]."""

    _residency: ShardedResidency
    _gradients: ShardedGradients

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentQueues,
        residency: ShardedResidency,
        gradients: ShardedGradients,
        counters: Counters,
    ) -> None:
        super().__init__(plan, segment, residency, gradients, counters)
        self._queue = queue_for_pass(residency, training=segment.name is not SegmentName.EVAL)
        self._under_way: deque[_UnderWay] = deque()
        self._submitted = 0
        """How many collectives of the segment were submitted."""
        ordering, store = residency.ordering, residency.store
        self.waits = CollectiveWaits(store.device, ordering, poison=store.poison) if ordering.by_stream else None
        """Orders collectives on their stream; None: they have none, and everything waits for each."""
        self._summed: set[ParamGroup] = set()
        """Groups whose sums over ranks go to the accumulators; `_staged` has their slots until they are there."""
        self._handlers[Gather] = self._gather
        self._handlers[ReduceScatter] = self._reduce_scatter

    @property
    def waits_for_ranks(self) -> bool:
        """Return True if the segment has collectives."""
        return bool(self._segment.by_queue[Queue.COLL])

    def is_blocked(self, instr: Instr) -> bool:
        """Return True if a collective under way, which is not over, uses a slot of the instruction."""
        if not self._under_way or isinstance(instr.op, Gather | ReduceScatter):
            return False
        slots = slots_of(instr.op)
        return any(not each.submitted.done and not each.slots.isdisjoint(slots) for each in self._under_way)

    def carry_out(self, instr: Instr) -> None:
        """Do what an instruction other than a moment says, once the collectives that use its slots are over."""
        collective = isinstance(instr.op, Gather | ReduceScatter)
        if self._submitted and not collective:
            self._end_using(slots_of(instr.op), instr.queue)
        with self._residency.moving:
            super().carry_out(instr)
        if self.waits is not None and instr.queue is Queue.COLL and not collective:
            self.waits.note_carried_out(instr)

    def delay_behind(self, instr: Instr, queue: Queue) -> None:
        """Make a queue of the accelerator wait for an instruction of the collective queue, which was carried out."""
        if isinstance(instr.op, Gather | ReduceScatter):
            self._end_using(slots_of(instr.op), queue)
        elif self.waits is not None:
            self.waits.delay_behind(instr, queue)

    def begin(self, moment: PlannedMoment) -> None:
        """Wait for the collectives that a moment needs, then prepare its slots."""
        for use in moment.uses:
            if use.holds_weight:
                late = any(use.slot in each.slots and not each.submitted.done for each in self._under_way)
                self._counters.fetched(early=not late)
        self._end_using([use.slot for use in moment.uses], Queue.COMPUTE)
        super().begin(moment)
        for use in moment.uses:
            if use.holds_weight and use.gains and use.group not in self._staged:
                self._staged[use.group] = self._slots[use.slot], []
            if use.gains and use.group in self._staged:  # now, so that the sum waits for this moment only
                self._queue.fill_padding(use.group, self._slots[use.slot].flat(use.group.dtype, use.group.chunk_numel))
        if self._store.ledger.used_bytes[0] + moment.nonmodel_bytes > self._store.tiers[0].capacity_bytes:
            self._store.free_spare()

    def _use_for_gradients(self, group: ParamGroup, chunk: Chunk, slot: Slot) -> None:
        """Do nothing: a slot for gradients of a gathered group is told apart by `SlotUse.gains`."""

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient into its group's slot; raise `Diverged` for one that the plan does not have."""
        group, staged = record.group, self._staged.get(record.group)
        if staged is None or record in staged[1] or record not in self._plan.learning[group]:
            raise Diverged(f"a gradient of {record.name}, for which the plan has no place")
        if group not in self._plan.overwritten:
            super().place_gradient(record, gradient)
            record.staged_factor = None
            self._gradients.mark_given(record)
            return True
        if record.busy:
            raise Diverged(f"memory of {group.name} is wanted where the plan has its gradients")
        self._gradients.mark_given(record)
        slot, records = staged
        target = record.shaped(slot.memory.view(record.dtype))
        self._device.declare_access(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        self._residency.unbind(record)
        target.copy_(gradient)
        records.append(record)
        record.mark_slot_taken()
        return True

    # Collectives.

    def _gather(self, instr: Instr, op: Gather) -> None:
        group, full = self._plan.order[op.group], self._slots[op.full]
        weight, shard = group.chunks[group.weight], self._slots[op.shard]
        if shard.version != weight.version or any(r.contents is not SlotContents.WEIGHT for r in group.tensors):
            raise Diverged(f"the plan gathers an older weight of {group.name}")
        mapped = None if group.common is None else self._residency.map_common(group)
        target = full if mapped is None else mapped
        if mapped is None or not any(slot is mapped for slot in self._slots.values()):  # else it is used still
            if not self._residency.vacate(group, target):
                raise Diverged(f"memory of {group.name} has live aliases")
            group.weight_chunk.invalidate(target)
        if mapped is not None:
            self._residency.return_slot(full)
            self._slots[op.full] = mapped
        own, whole = shard.flat(group.dtype, group.shard_numel), target.flat(group.dtype, group.chunk_numel)
        self._note(op, Submitted(self._queue, group, own, whole, instr=instr, ready=self._ready()))

    def _reduce_scatter(self, instr: Instr, op: ReduceScatter) -> None:
        group = self._plan.order[op.group]
        if group not in self._staged:
            raise Diverged(f"the plan sums gradients of {group.name}, of which there are none")
        over = group in self._plan.overwritten
        if over and any(record.busy for record in group.tensors):
            raise Diverged(f"memory of {group.name} is wanted where the plan has its gradients")
        slot, records = self._staged.pop(group)
        _, scratch, shard = slots_of(op)
        if over:
            self._residency.vacate(group, slot)
            if group.weight_chunk.copies.get(0) is slot:
                group.weight_chunk.drop_copy(0)
            slot.clear()
        whole = slot.flat(group.dtype, group.chunk_numel)
        if self._queue.fill_missing(group, records, whole) and self.waits is not None:
            self.waits.before_next([self._device.record(Queue.COMPUTE)])
        for record in self._plan.learning[group]:
            self._gradients.expect(record)
        if over:
            self._gradients.mark_weight_overwritten(group)
        into = self._slots[shard].flat(self._gradients.dtype(group), group.shard_numel)
        sent = self._slots[scratch].memory
        self._note(op, Submitted(self._queue, group, into, whole, sent, instr=instr, ready=self._ready()))

    def _ready(self) -> Sequence[Event] | None:
        """Return what the collective that is submitted now waits for; None: everything, without a stream."""
        return None if self.waits is None else self.waits.take_ready()

    def _note(self, op: Gather | ReduceScatter, submitted: Submitted) -> None:
        self._submitted += 1
        self._under_way.append(_UnderWay(op, frozenset(slots_of(op)), submitted))

    def _end_using(self, slots: Iterable[int], queue: Queue) -> None:
        """Wait for the collectives that use any of these slots, and for those before them; the queue waits, too."""
        wanted = set(slots)
        places = [place for place, each in enumerate(self._under_way) if not wanted.isdisjoint(each.slots)]
        self._end_first(places[-1] + 1 if places else 0)
        if self.waits is not None:
            self.waits.delay_user(wanted, queue)

    def end_all(self) -> None:
        """Wait for all collectives; all queues wait for them, too."""
        self._end_first(len(self._under_way))
        if self.waits is not None:
            self.waits.delay_all()

    def _end_first(self, count: int) -> None:
        """Wait for the first collectives that are under way, and note what their slots hold."""
        for _ in range(count):
            each = self._under_way.popleft()
            started = time.perf_counter()
            if self.waits is None:
                each.submitted.wait()
            else:
                self.waits.note_ended(each.submitted.end(), each.slots)
            self._counters.waited(time.perf_counter() - started)
            group = each.submitted.group
            if isinstance(each.op, Gather):
                group.weight_chunk.fill(self._slots[each.op.full])
            else:
                self._take_sum(group, self._slots[each.op.shard])

    def _take_sum(self, group: ParamGroup, slot: Slot) -> None:
        """Note that a slot holds this rank's shard of the sum of a group's gradients."""
        records = self._plan.learning[group]
        if group not in self._plan.overwritten:
            self._summed.add(group)
            self._staged[group] = slot, records
            return
        chunk = group.chunks[Kind.P16]
        chunk.mark_written(slot)
        if slot is not chunk.home:
            chunk.add_copy(slot)
        for record in records:
            record.mark_overwritten()

    # The end.

    def hand_over(self) -> FollowingDriver:
        """Finish what was submitted, and keep what on-demand moves can use; return what drives the rest of the pass."""
        self.end_all()
        for slot in self._slots.values():
            extent = slot.extent
            if extent is not None and extent.kind is Kind.FULL:
                chunk = self._residency.groups[extent.index].weight_chunk
                if slot.version == chunk.version and 0 not in chunk.copies:
                    chunk.add_copy(slot)  # it was gathered for a later moment
        sums = {group: self._staged.pop(group) for group in self._summed if group in self._staged}
        staged = self._hand_over_gradients()
        for group, (slot, records) in sums.items():
            if records:
                self._gradients.accept_sum(group, records, slot)
        with self._residency.moving:
            self.abandon()
        rest = collectives_of(self._plan, self._segment)[self._submitted :]
        return FollowingDriver(self._queue, rest, self._plan.learning, self._gradients, self._counters, staged=staged)

    def _hand_over_gradients(self) -> dict[ParamGroup, tuple[Slot, list[ParamState]]]:
        """Return the gradients that are to be summed, in slots that hold nothing else."""
        found, gone = {}, list[Slot]()
        for group, (slot, records) in self._staged.items():
            if group not in self._plan.overwritten:
                found[group] = slot, records
            elif records:
                whole = slot.flat(group.dtype, group.chunk_numel)
                rows = {record: record.shaped(whole).clone() for record in records}
                if group.weight_chunk.copies.get(0) is slot:
                    self._residency.evict(group)
                    gone.append(slot)  # kept for its next use, or until its aliases are gone
                else:
                    slot.clear()
                own = self._residency.take_slot(group.weight_chunk.bytes)
                target = own.flat(group.dtype, group.chunk_numel)
                for record, gradient in rows.items():
                    record.shaped(target).copy_(gradient)
                found[group] = own, list(rows)
        kept = {id(slot) for slot in (*gone, *(slot for slot, _ in found.values()))}
        self._slots = {
            number: slot for number, slot in self._slots.items() if slot.memory.numel() and id(slot) not in kept
        }
        self._staged.clear()
        return found

    def _copy(self, instr: Instr, op: Copy) -> None:
        super()._copy(instr, op)
        if self._segment.lends_homes and instr.queue in DISK_QUEUES:
            self._residency.note_disk_move(op.extent.kind, instr.queue)

    # Slots of the compute tier that are memory of their own.

    def _reserve(self, instr: Instr, op: Reserve) -> None:
        if op.tier or self._store.arena.exists:
            super()._reserve(instr, op)
            return
        self._slots[op.slot] = self._residency.take_slot(op.bytes)
        self._places[op.slot] = op.tier, op.offset

    def _release(self, instr: Instr, op: Release) -> None:
        slot = self._slots[op.slot]
        if slot.tier or self._store.arena.exists:
            super()._release(instr, op)
            return
        if not slot.bytes and any(other is slot for number, other in self._slots.items() if number != op.slot):
            del self._slots[op.slot]  # a mapping that was gathered anew for a later moment
            return
        self._give_up(slot)
        self._residency.return_slot(slot)
        del self._slots[op.slot]

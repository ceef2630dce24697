"""Carry out a plan's gathers and sums, in the plan's order, on the thread that communicates with the other ranks.

[Note: collectives of a plan]
The order of the collective queue is part of the plan, so all ranks begin the same collectives in the same order, and
nothing is said before one. The training thread submits a collective as soon as its slots exist and the moments that it
waits for are over. It waits for the collective when an instruction or a moment uses one of its slots. Until then the
collective is *under way*, and its slots belong to it.

Every rank takes part in every gather and every sum. Where a rank has no gradient of a parameter it gives minus zero:
that changes no sum, and not the sign of a zero.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ps_core._plan import Gather, Instr, Queue, ReduceScatter, Release, Reserve, slots_of
from ps_core._program import Kind
from ps_core.engine._devices.device import Event
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.instruction_executor import Diverged, InstructionExecutor
from ps_core.engine._execution.segment_queues import PlannedMoment, SegmentQueues
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._sharding.collectives_protocol import CollectiveSession, Pending
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.counters import Counters


@dataclass(slots=True, eq=False)
class PlannedCollective:
    """One gather or sum that was submitted, and is not known to be over."""

    instr: Instr
    group: ParamGroup
    slots: frozenset[int]
    """The plan's numbers of the slots that it reads and writes."""
    shard: torch.Tensor
    """This rank's shard of the weight (gather), or where its shard of the sum goes."""
    whole: torch.Tensor
    """Where the group goes (gather), or this rank's gradients."""
    scratch: torch.Tensor | None
    """Memory for what the other ranks send to a sum; None: it is a gather."""
    ready: Sequence[Event] = ()
    over: Event | None = None
    pending: Pending | None = None
    done: bool = False
    """True once the other thread is done with it; that thread writes it."""


class RanksExecutor(InstructionExecutor):
    """Carries out the instructions of one segment together with the other ranks; see [Note: collectives of a plan]."""

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentQueues,
        residency: Residency,
        gradients: GradientStore,
        counters: Counters,
    ) -> None:
        super().__init__(plan, segment, residency, gradients, counters)
        assert isinstance(residency, ShardedResidency), "several ranks share the model"
        assert isinstance(gradients, ShardedGradients), "several ranks share the model"
        self._shards, self._sums = residency, gradients
        self._everyone = range(residency.together.mesh.size)
        self._under_way: deque[PlannedCollective] = deque()
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
        return any(not each.done and not each.slots.isdisjoint(slots) for each in self._under_way)

    def carry_out(self, instr: Instr) -> None:
        """Do what an instruction other than a moment says, once the collectives that use its slots are over."""
        if self._under_way and not isinstance(instr.op, Gather | ReduceScatter):
            self._end_using(slots_of(instr.op))
        super().carry_out(instr)

    def begin(self, moment: PlannedMoment) -> None:
        """Wait for the collectives that a moment needs, then prepare its slots."""
        for use in moment.uses:
            if use.holds_weight and use.group.weight_chunk.gathered:
                early = not any(use.slot in each.slots and not each.done for each in self._under_way)
                self._counters.fetched(early=early)
        self._end_using([use.slot for use in moment.uses])
        super().begin(moment)

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient into its group's slot; a second one of the same pass is added to the first."""
        staged = self._staged.get(record.group)
        if staged is not None and record in staged[1]:
            target = record.shaped(staged[0].flat(record.dtype, record.group.chunk_numel))
            self._device.work(Queue.COMPUTE, f"gradient of {record.name}", (target,), (target,))
            target.add_(gradient)
            return True
        if not super().place_gradient(record, gradient):
            raise Diverged(f"a gradient of {record.name}, for which the plan has no place")
        record.staged_factor = None
        self._sums.expect(record)
        return True

    # Collectives.

    def _gather(self, instr: Instr, op: Gather) -> None:
        group, full = self._plan.order[op.group], self._slots[op.full]
        weight, shard = group.chunks[group.weight], self._slots[op.shard]
        if shard.version != weight.version or any(r.contents is not SlotContents.WEIGHT for r in group.tensors):
            raise Diverged(f"the plan gathers an older weight of {group.name}")
        self._residency.vacate(group, full)
        group.weight_chunk.invalidate(full)
        own = shard.flat(group.dtype, group.shard_numel)
        whole = full.flat(group.dtype, group.chunk_numel)
        self._device.work(Queue.COLL, f"gather {group.name}", (own,), (whole,))
        self._submit(PlannedCollective(instr, group, frozenset((op.shard, op.full)), own, whole, None))

    def _reduce_scatter(self, instr: Instr, op: ReduceScatter) -> None:
        group = self._plan.order[op.group]
        if group not in self._staged:
            raise Diverged(f"the plan sums gradients of {group.name}, of which there are none")
        slot, records = self._staged.pop(group)
        whole = slot.flat(group.dtype, group.chunk_numel)
        self._give_nothing(group, records, whole)
        for record in self._plan.learning[group]:
            self._sums.expect(record)
        target, scratch = self._slots[op.shard], self._slots[op.wire].memory
        over = self._plan.overwrites
        if over:
            self._sums.lose_weight(group)
        into = target.flat(group.dtype if over else torch.float32, group.shard_numel)
        self._device.work(Queue.COLL, f"gradients of {group.name}", (whole,), (into, scratch))
        self._submit(PlannedCollective(instr, group, frozenset((op.source, op.shard, op.wire)), into, whole, scratch))

    def _give_nothing(self, group: ParamGroup, records: Collection[ParamState], whole: torch.Tensor) -> None:
        """Write minus zero where this rank has no gradient."""
        gaps = [record.span for record in group.tensors if record not in records]
        for gap in (*gaps, slice(group.numel, group.chunk_numel)):
            if gap.stop > gap.start:
                self._device.work(Queue.COMPUTE, f"no gradient in {group.name}", (), (whole[gap],))
                whole[gap].fill_(-0.0)

    def _submit(self, each: PlannedCollective) -> None:
        ordering = self._shards.ordering
        ordering.before()
        each.ready = ordering.ready()
        self._under_way.append(each)
        each.pending = self._shards.together.start(partial(self._run, each))

    def _run(self, each: PlannedCollective, session: CollectiveSession) -> None:
        """Do a collective, on the thread that communicates."""
        buffers, name = self._shards.ordering.begin(session, each.ready), each.group.name
        if each.scratch is None:
            buffers.all_gather(each.whole, each.shard, name, self._everyone)
        else:
            what, kind = f"gradients of {name}", each.group.dtype
            buffers.reduce_scatter(
                each.shard, each.whole, each.scratch, what, kind=kind, givers=self._everyone
            )
        each.over = self._shards.ordering.end()
        each.done = True

    def _end_using(self, slots: Iterable[int]) -> None:
        """Wait for the collectives that use any of these slots, and for those before them."""
        wanted = set(slots)
        places = [place for place, each in enumerate(self._under_way) if not wanted.isdisjoint(each.slots)]
        for _ in range(places[-1] + 1 if places else 0):
            self._end(self._under_way.popleft())

    def _end(self, each: PlannedCollective) -> None:
        """Wait for a collective, and note what its slots hold."""
        assert each.pending is not None, "it was submitted"
        started = time.perf_counter()
        each.pending.wait()
        self._counters.waited(time.perf_counter() - started)
        self._shards.ordering.after(each.over)
        group, op = each.group, each.instr.op
        if isinstance(op, Gather):
            group.weight_chunk.fill(self._slots[op.full])
        elif isinstance(op, ReduceScatter):
            self._take_sum(group, op.shard)

    def _take_sum(self, group: ParamGroup, number: int) -> None:
        """Note that a slot holds this rank's shard of the sum of a group's gradients."""
        slot, records = self._slots[number], self._plan.learning[group]
        if not self._plan.overwrites:
            self._staged[group] = (slot, records)
            return
        chunk = group.chunks[Kind.P16]
        chunk.mark_written(slot)
        if slot is not chunk.home:
            chunk.add_copy(slot)
        for record in records:
            record.mark_overwritten()

    # Slots of the compute tier that are memory of their own.

    def _reserve(self, instr: Instr, op: Reserve) -> None:
        if op.tier or self._store.arena.exists:
            super()._reserve(instr, op)
            return
        self._slots[op.slot] = self._shards.take_slot(op.bytes)
        self._places[op.slot] = op.tier, op.offset

    def _release(self, instr: Instr, op: Release) -> None:
        slot = self._slots[op.slot]
        if slot.tier or self._store.arena.exists:
            super()._release(instr, op)
            return
        self._give_up(slot)
        self._shards.return_slot(slot)
        del self._slots[op.slot]


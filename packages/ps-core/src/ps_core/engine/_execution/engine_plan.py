"""Translate a verified plan to the engine's terms: its groups, the expected moments, instructions by queue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ps_core._extents import Extent, Kind, SegmentName
from ps_core._layout import Group, Layout
from ps_core._plan import Held, Instr, Plan, Queue, Release, Reserve, Run, Segment
from ps_core._planner.search import Planned
from ps_core._program import Program
from ps_core._simulate.machine import Machine
from ps_core._trace import Trace
from ps_core.engine._devices.disk.queues import DISK_QUEUES
from ps_core.engine._execution.segment_queues import PlannedMoment, SegmentQueues, SlotUse
from ps_core.engine._memory.chunk import Chunk
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._tracing.pass_recording import PassRecording


def lay_groups(groups: list[ParamGroup], records: list[ParamState], trace: Trace) -> tuple[Layout, list[ParamGroup]]:
    """Return the engine's groups as a layout, in order of first use; unused ones last."""
    owner = {index: record.group for index, record in enumerate(records)}
    touched = [index for moment in trace.moments for index in (*moment.reads, *moment.grads)]
    order = list(dict.fromkeys([owner[index] for index in touched] + groups))
    place = {record: index for index, record in enumerate(records)}
    rows = tuple(
        Group(
            index=number,
            tensors=tuple(place[record] for record in group.tensors),
            offsets=tuple(record.offset for record in group.tensors),
            numel=group.numel,
            shard_numel=group.shard_numel,
            trainable=group.trainable,
            common=group.common is not None,
            fp32=group.weight is Kind.P32,
        )
        for number, group in enumerate(order)
    )
    number_of = {group: number for number, group in enumerate(order)}
    layout = Layout(ranks=groups[0].ranks, groups=rows, group_of=tuple(number_of[record.group] for record in records))
    return layout, order


def _waits(instrs: tuple[Instr, ...], threads: frozenset[Queue]) -> dict[int, tuple[int, ...]]:
    """Map instructions to those on streams that their queue waits for; ``threads``: queues that are no streams.

    No stream waits for a thread. What follows an instruction there follows all that its queue has waited for by then.
    """
    queue_of = {instr.id: instr.queue for instr in instrs}
    latest: dict[Queue, dict[Queue, int]] = {queue: {} for queue in threads}
    behind: dict[int, tuple[int, ...]] = {}
    waits: dict[int, tuple[int, ...]] = {}
    for instr in instrs:
        found: dict[int, None] = {}
        for wait in instr.after:
            found.update(dict.fromkeys(behind[wait] if queue_of[wait] in threads else (wait,)))
        others = tuple([wait for wait in found if queue_of[wait] is not instr.queue])
        if instr.queue in threads:
            known = latest[instr.queue]
            known.update((queue_of[wait], max(wait, known.get(queue_of[wait], -1))) for wait in others)
            behind[instr.id] = tuple(known.values())
        if others and (instr.queue is Queue.CPU or instr.queue not in threads):
            waits[instr.id] = others
    return waits


@dataclass(frozen=True)
class EnginePlan:
    """A plan, and the engine's groups and chunks for its numbers."""

    planned: Planned
    machine: Machine
    """The machine that the plan was chosen for."""
    order: list[ParamGroup]
    recording: PassRecording
    """The pass that the plan was made from."""
    prefetch: int | None = None

    @cached_property
    def in_backward(self) -> bool:
        """Return True if groups are stepped while backward goes on."""
        return bool(self.planned.early or self.stepped_in_backward)

    @cached_property
    def stepped_in_backward(self) -> set[ParamGroup]:
        """Return the groups that the plan itself steps within backward."""
        return {self.order[index] for index in self.plan.stepped_in_backward}

    @cached_property
    def moves_activations(self) -> bool:
        """Return True if offloaded activations are in the plan."""
        return bool(self.planned.program.trace.activations)

    @property
    def plan(self) -> Plan:
        """Return the plan itself."""
        return self.planned.plan

    @property
    def program(self) -> Program:
        """Return the program that the plan is for."""
        return self.planned.program

    def chunk(self, extent: Extent) -> Chunk:
        """Return the engine's chunk of one of the plan's extents that have a home slot."""
        return self.order[extent.index].chunks[extent.kind]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Return the chunks that have home slots, in the order of the plan's numbers."""
        return [self.chunk(held.extent) for held in self.plan.home]

    @cached_property
    def segments(self) -> dict[SegmentName, SegmentQueues]:
        """Return every segment by queue."""
        return {segment.name: self._queues(segment) for segment in self.plan.segments}

    @cached_property
    def nonmodel_bytes(self) -> int:
        """Return the most non-model bytes of any moment."""
        return self.program.trace.peak_nonmodel_bytes

    @cached_property
    def arena_end(self) -> int:
        """Return the address at which the plan's largest non-model bytes begin on the compute tier."""
        return self.plan.tiers[0].capacity_bytes - self.nonmodel_bytes

    @cached_property
    def block_end(self) -> int:
        """Return the address at which the last slot below `arena_end` ends: the arena's block needs no more."""
        ops = (instr.op for segment in self.plan.segments for instr in segment.instrs)
        slots: list[Held | Reserve] = [*self.plan.home, *(op for op in ops if isinstance(op, Reserve))]
        ends = [slot.offset + slot.bytes for slot in slots if slot.tier == 0]
        return max((end for end in ends if end <= self.arena_end), default=0)

    @cached_property
    def micro_segments(self) -> tuple[SegmentName, ...]:
        """Return the segments of a training step's passes, in order."""
        return self.program.iteration()[:-1]

    @cached_property
    def overwritten(self) -> frozenset[ParamGroup]:
        """Return the groups whose gradients are written over their weights."""
        return frozenset(group for number, group in enumerate(self.order) if self.program.overwritten(number))

    @cached_property
    def stepped(self) -> set[ParamGroup]:
        """Return the groups that the plan's step segment steps."""
        return {self.order[index] for index in self.program.stepped} - self.stepped_in_backward

    @cached_property
    def learning(self) -> dict[ParamGroup, list[ParamState]]:
        """Map groups to the parameters that got gradients in the planned pass."""
        found = {index for moment in self.recording.moments for index in moment.grads}
        return {group: [record for record in group.tensors if record.index in found] for group in self.order}

    @cached_property
    def step_kinds(self) -> dict[int, tuple[Kind, ...]]:
        """Map the plan's group numbers to the kinds that a step works on, in the order of `Step`'s slots."""
        return {index: self.program.home_kinds(index) for index in self.program.stepped}

    def _queues(self, segment: Segment) -> SegmentQueues:
        instrs, homes = segment.instrs, len(self.plan.home)
        over_disk = self.plan.tiers[-1].name == "disk"
        waits = _waits(instrs, frozenset({Queue.CPU} if over_disk else {Queue.CPU, *DISK_QUEUES}))
        return SegmentQueues(
            name=segment.name,
            by_queue={queue: tuple([instr for instr in instrs if instr.queue is queue]) for queue in Queue},
            moments=tuple([self._moment(segment.name, i, i.op) for i in instrs if isinstance(i.op, Run)]),
            waits=waits,
            recorded=frozenset(chain.from_iterable(waits.values())),
            count=len(instrs),
            lends_homes=any(isinstance(instr.op, Release) and instr.op.slot < homes for instr in instrs),
            early=self.planned.early if segment.name is SegmentName.MICRO_LAST else {},
            prefetch=self.prefetch,
        )

    def _moment(self, segment: SegmentName, instr: Instr, op: Run) -> PlannedMoment:
        recorded, uses = self.recording.moments[op.visit], self.program.uses(segment, self.program.visits[op.visit])
        rows, activations = [], []
        for use, slot in zip(uses, op.slots, strict=True):
            if use.extent.kind is Kind.ACT:
                activations.append((self.program.trace.activations[use.extent.index].name, slot))
                continue
            is_weight, is_read = use.extent.kind is not Kind.GRAD, use.before is not None
            gains = use.before != use.after
            rows.append(SlotUse(self.order[use.extent.index], slot, is_weight, is_read, gains))
        return PlannedMoment(
            instr=instr,
            visit=op.visit,
            name=recorded.name,
            reads=frozenset(recorded.reads),
            gains=frozenset(recorded.grad_groups),
            uses=tuple(rows),
            activations=tuple(activations),
            nonmodel_bytes=op.nonmodel_bytes,
        )

"""A verified plan in the engine's terms: the engine's groups, the beats to expect, instructions by queue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ps_core._layout import Group, Layout
from ps_core._plan import Instr, Plan, Queue, Run
from ps_core._planner.search import Planned
from ps_core._program import Extent, Program, SegmentName
from ps_core._trace import Trace
from ps_core.engine._memory.slot import Chunk
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._tracing.moments import MomentRecord


def lay_groups(groups: list[ParamGroup], records: list[ParamState], trace: Trace) -> tuple[Layout, list[ParamGroup]]:
    """The engine's groups as a layout, in order of first use; unused ones last."""
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
            shard_numel=group.chunk_numel,
            trainable=group.trainable,
        )
        for number, group in enumerate(order)
    )
    number_of = {group: number for number, group in enumerate(order)}
    layout = Layout(ranks=1, groups=rows, group_of=tuple(number_of[record.group] for record in records))
    return layout, order


@dataclass(frozen=True, slots=True)
class SegmentQueues:
    """One segment, ready to be issued."""

    by_queue: dict[Queue, tuple[Instr, ...]]
    watched: frozenset[int]
    """Instructions that another queue waits for."""
    count: int
    runs: tuple[int, ...]
    """The moments it runs, in order."""


@dataclass(frozen=True)
class EnginePlan:
    """A plan, whose group numbers are not the engine's."""

    planned: Planned
    order: list[ParamGroup]
    beats: list[MomentRecord]

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.planned.plan

    @property
    def program(self) -> Program:
        """What it plans."""
        return self.planned.program

    def chunk(self, extent: Extent) -> Chunk:
        """The engine's home of one of the plan's extents that have one."""
        return self.order[extent.index].chunks[extent.kind]

    @cached_property
    def lines(self) -> dict[SegmentName, SegmentQueues]:
        """Every segment by queue."""
        return {segment.name: _lines(segment.instrs) for segment in self.plan.segments}

    @property
    def stepped(self) -> set[ParamGroup]:
        """Groups that the plan's step steps."""
        return {self.order[index] for index in self.program.stepped}


def _lines(instrs: tuple[Instr, ...]) -> SegmentQueues:
    queue_of = {instr.id: instr.queue for instr in instrs}
    watched = {wait for instr in instrs for wait in instr.after if queue_of[wait] is not instr.queue}
    return SegmentQueues(
        by_queue={queue: tuple(instr for instr in instrs if instr.queue is queue) for queue in Queue},
        watched=frozenset(watched),
        count=len(instrs),
        runs=tuple(instr.op.visit for instr in instrs if isinstance(instr.op, Run)),
    )

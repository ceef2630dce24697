"""Describe pieces of work with their times: of a simulated plan here, of real steps in the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ps_core._extents import Kind, SegmentName
from ps_core._plan import (
    Accumulate,
    Cast,
    Copy,
    Decide,
    Gather,
    Instr,
    Norm,
    Plan,
    Queue,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Segment,
    Shift,
    Step,
    slots_of,
)
from ps_core._program import Program
from ps_core._simulate.engine_timing import Issuing, Priced, slot_bytes
from ps_core._simulate.machine import Machine
from ps_core._simulate.steps_in_backward import EarlySteps

NOTES = (Reserve, Release, Decide)
"""Instructions that take no time of a queue."""
_COPIES = {Queue.H2D: "fetch", Queue.D2H: "evict", Queue.DISK_R: "read", Queue.DISK_W: "write"}
_VERBS: dict[type, str] = {
    Gather: "gather",
    ReduceScatter: "reduce-scatter of",
    Accumulate: "sum of",
    Norm: "norm of",
    Step: "step of",
    Cast: "rebuild",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of a queue's work."""

    queue: Queue
    name: str
    """The name of the work, as ``fetch blocks.3 (p16)``."""
    begin_s: float
    end_s: float
    bytes: int = 0
    """Bytes of a copy; else those of the slots that the work uses."""
    group: str = ""
    """The group (or the activation) that the work is for; empty: none, or several."""
    step: int = 0
    """Number of optimizer steps that had ended before the launch."""
    run: int = -1
    """The run that launched it, of those carried out; -1: it follows no plan."""
    instr: Instr | None = None
    """The plan's instruction; None: it follows no plan."""


class Work(NamedTuple):
    """A description of an instruction: its name, its group and its bytes."""

    name: str
    group: str
    bytes: int


def group_names(groups: Iterable[Sequence[str]]) -> list[str]:
    """Return each group's name: its parameters' module, or the first parameter if groups share the module.

    ``groups``: the names of each group's parameters.
    """
    rows = list(groups)
    modules = [_module_of(names) for names in rows]
    return [
        module if module and modules.count(module) == 1 else names[0]
        for names, module in zip(rows, modules, strict=True)
    ]


def _module_of(names: Sequence[str]) -> str:
    """Return the innermost module that all these parameters are in; for one parameter, its own name."""
    parts = [name.split(".") for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def name_of_copy(queue: Queue, group: str, kind: Kind) -> str:
    """Return the name of a copy on a queue."""
    return f"{_COPIES[queue]} {group} ({kind.value})"


class WorkNames:
    """Name the instructions of a plan."""

    def __init__(self, program: Program, plan: Plan) -> None:
        tensors, self._moments = program.trace.tensors, program.trace.moments
        self._groups = group_names([[tensors[index].name for index in row.tensors] for row in program.layout.groups])
        self._activations = [each.name for each in program.trace.activations]
        self._home, self._sizes = plan.home, {each.name: slot_bytes(plan.home, each) for each in plan.segments}

    def of(self, instr: Instr, segment: SegmentName) -> Work:
        """Describe an instruction of a segment (one that takes time)."""
        op, sizes = instr.op, self._sizes[segment]
        if isinstance(op, Run):
            return Work(self._moments[op.visit].name, "", sum(sizes.get(slot, 0) for slot in op.slots))
        if isinstance(op, Copy):
            names = self._activations if op.extent.kind is Kind.ACT else self._groups
            group = names[op.extent.index]
            return Work(name_of_copy(instr.queue, group, op.extent.kind), group, op.bytes)
        size = sum(sizes.get(slot, 0) for slot in slots_of(op))
        if isinstance(op, Shift):
            held = self._home[op.slot].extent.index if op.slot < len(self._home) else -1
            group = self._groups[held] if held >= 0 else ""
            return Work(f"shift {group or f'slot {op.slot}'}", group, size)
        assert not isinstance(op, Reserve | Release | Decide), "notes take no time"
        group = self._groups[op.group]
        return Work(f"{_VERBS[type(op)]} {group}", group, size)


class PlannedPieces(NamedTuple):
    """The simulated pieces of work of segments that follow each other."""

    pieces: list[Piece]
    segments: list[Segment]
    """Segments by `Piece.run`."""


def planned_pieces(
    program: Program,
    plan: Plan,
    machine: Machine,
    names: Sequence[SegmentName],
    *,
    ranks_per_node: int | None = None,
    early: EarlySteps | None = None,
    speculative: bool = False,
) -> PlannedPieces:
    """Simulate these segments one after the other; see [Note: as the engine issues].

    ``early``: the steps that begin within backward; ``speculative``: they can be undone.
    """
    issuing = Issuing(program, plan.tiers, machine, ranks_per_node, undoable=speculative)
    priced: dict[SegmentName, Priced] = {
        name: issuing.price(plan.home, plan.segment(name)) for name in dict.fromkeys(names)
    }
    words, steps = WorkNames(program, plan), 0
    pieces, segments = [], []
    for run, (segment, rows) in enumerate(issuing.ran(plan.home, [priced[name] for name in names], early or {})):
        for instr, begin, end, _ in rows:
            if not isinstance(instr.op, NOTES):
                whose = SegmentName.STEP if isinstance(instr.op, Step) else segment.name
                work = words.of(instr, whose)
                pieces.append(
                    Piece(
                        queue=instr.queue,
                        name=work.name,
                        begin_s=begin,
                        end_s=end,
                        bytes=work.bytes,
                        group=work.group,
                        step=steps,
                        run=run,
                        instr=instr,
                    )
                )
        segments.append(segment)
        steps += segment.name is SegmentName.STEP
    return PlannedPieces(pieces, segments)

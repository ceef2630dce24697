"""Compute the *tide*: what fills the compute tier at each moment of a training step.

`tide` works it out from a plan as written (instructions in list order), without running anything. A slot counts from
its `Reserve` until it is released or what it holds is dead. The picture of a plan that accumulates gradients is that of
its last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ps_core._extents import STATES, Extent, Kind, SegmentName
from ps_core._plan import (
    Accumulate,
    Copy,
    Gather,
    Op,
    Plan,
    ReduceScatter,
    Release,
    Reserve,
    Run,
    Segment,
    Step,
)
from ps_core._program import Program
from ps_core._units import format_bytes


class Category(StrEnum):
    """Name what bytes are for, in the order in which they are drawn from the bottom up."""

    STATES = "optimizer states"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    BUFFERS = "gathered groups"
    CHECKPOINTS = "checkpoints"
    NONMODEL = "non-model"


CATEGORIES = tuple(Category)


_CATEGORY_OF = {
    Kind.P16: Category.WEIGHTS,
    Kind.P32: Category.STATES,
    **dict.fromkeys(STATES, Category.STATES),
    Kind.ACC: Category.GRADIENTS,
    Kind.GRAD: Category.GRADIENTS,
    Kind.RGRAD: Category.GRADIENTS,
    Kind.FULL: Category.BUFFERS,
    Kind.WIRE: Category.BUFFERS,
    Kind.ACT: Category.CHECKPOINTS,
}


def category_of(kind: Kind, weight: Kind, *, is_gradient: bool) -> Category:
    """Return what bytes of a kind are for; ``is_gradient``: a gradient was written over the weight of that kind."""
    if is_gradient and kind in (weight, Kind.FULL):
        return Category.GRADIENTS
    return Category.WEIGHTS if kind is weight else _CATEGORY_OF[kind]


@dataclass(frozen=True, slots=True)
class Column:
    """One moment: bytes of each of `CATEGORIES` while it runs."""

    name: str
    phase: str
    """``forward``, ``backward`` or ``update``."""
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tide:
    """A step's columns on the compute tier, and its budget."""

    model: str
    tier: str
    budget_bytes: int
    columns: tuple[Column, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the highest column."""
        return max((column.total for column in self.columns), default=0)


def tide(program: Program, plan: Plan) -> Tide:
    """Return what fills the compute tier at each moment of a training step (without training: of an evaluation)."""
    columns: list[Column] = []
    for name in program.iteration():
        if name in (SegmentName.MICRO_LAST, SegmentName.EVAL, SegmentName.STEP):
            columns += _columns(program, plan, plan.segment(name))
    return Tide(
        model=program.trace.model,
        tier=plan.tiers[0].name,
        budget_bytes=plan.tiers[0].capacity_bytes,
        columns=tuple(columns),
    )


def _columns(program: Program, plan: Plan, segment: Segment) -> Iterator[Column]:
    holds = _contents(program, plan, segment)
    gradients = _gradients_at_entry(program, plan, segment.name)
    sizes = {slot: held.bytes for slot, held in enumerate(plan.home) if held.tier == 0}

    def column(name: str, phase: str, nonmodel: int) -> Column:
        counts = dict.fromkeys(CATEGORIES, 0)
        counts[Category.NONMODEL] = nonmodel
        for slot, size in sizes.items():
            extent = holds.get(slot)
            if extent is None:
                counts[Category.BUFFERS] += size
            else:
                weight = program.weight if extent.kind is Kind.ACT else program.weight_of(extent.index)
                counts[category_of(extent.kind, weight, is_gradient=slot in gradients)] += size
        return Column(name, phase, tuple(counts.values()))

    for instr in segment.instrs:
        op = instr.op
        if isinstance(op, Reserve) and op.tier == 0:
            sizes[op.slot] = op.bytes
        elif isinstance(op, Release):
            sizes.pop(op.slot, None)
        elif isinstance(op, Copy) and op.extent.kind is Kind.P16:
            _mark(gradients, op.target, _is_gradient(program, op.extent.index, op.version))
        elif isinstance(op, ReduceScatter):
            gradients.add(op.shard)
            for slot in (op.source, op.wire):
                sizes.pop(slot, None)
        elif isinstance(op, Run):
            visit = program.visits[op.visit]
            for use, slot in zip(program.uses(segment.name, visit), op.slots, strict=True):
                if use.extent.kind in (Kind.P16, Kind.FULL):
                    _mark(gradients, slot, _is_gradient(program, use.extent.index, use.after))
            yield column(visit.name, visit.phase.value, op.nonmodel_bytes)
            for use, slot in zip(program.uses(segment.name, visit), op.slots, strict=True):
                if use.extent.kind is Kind.ACT and program.last_takes[use.extent.index] == visit.index:
                    sizes.pop(slot, None)
        elif isinstance(op, Step):
            yield column(f"step of group {op.group}", "update", 0)
            gradients.discard(op.slots[0])


def _mark(slots: set[int], slot: int, belongs: bool) -> None:
    if belongs:
        slots.add(slot)
    else:
        slots.discard(slot)


def _is_gradient(program: Program, group: int, version: int) -> bool:
    return program.overwritten(group) and 0 < version < program.rebuilt(group)


def _gradients_at_entry(program: Program, plan: Plan, name: SegmentName) -> set[int]:
    versions = program.entry(name, plan.stepped_in_backward)
    return {
        slot
        for slot, held in enumerate(plan.home)
        if held.extent.kind is Kind.P16 and _is_gradient(program, held.extent.index, versions.get(held.extent, 0))
    }


def _contents(program: Program, plan: Plan, segment: Segment) -> dict[int, Extent]:
    """Return the extent that each slot is for."""
    holds = {slot: held.extent for slot, held in enumerate(plan.home)}
    for instr in segment.instrs:
        for slot, extent in _fills(program, segment.name, instr.op):
            holds.setdefault(slot, extent)
    return holds


def _fills(program: Program, segment: SegmentName, op: Op) -> Iterator[tuple[int, Extent]]:
    if isinstance(op, Copy):
        yield op.target, op.extent
    elif isinstance(op, Run):
        for use, slot in zip(program.uses(segment, program.visits[op.visit]), op.slots, strict=True):
            yield slot, use.extent
    elif isinstance(op, Gather):
        yield op.full, Extent(Kind.FULL, op.group)
    elif isinstance(op, ReduceScatter):
        yield op.wire, Extent(Kind.WIRE, op.group)
        yield op.shard, Extent(program.weight_of(op.group) if program.overwritten(op.group) else Kind.RGRAD, op.group)
    elif isinstance(op, Accumulate):
        yield op.accumulator, Extent(Kind.ACC, op.group)


def upper_end(found: Tide) -> int:
    """Return the chart's upper end: the budget, unless everything stays far below it."""
    far = found.budget_bytes > 3 * found.peak_bytes > 0
    return max(1, found.peak_bytes * 5 // 4 if far else max(found.budget_bytes, found.peak_bytes) * 21 // 20)


def phases(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return the runs of one phase, and the number of columns of each."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if runs and runs[-1][0] == column.phase:
            runs[-1] = (column.phase, runs[-1][1] + 1)
        else:
            runs.append((column.phase, 1))
    return runs


def present(found: Tide) -> list[Category]:
    """Return the categories that have any bytes."""
    return [key for place, key in enumerate(CATEGORIES) if any(column.bytes[place] for column in found.columns)]


def summary(found: Tide) -> str:
    """Return a sentence about the peak."""
    if not found.columns:
        return f"nothing runs; budget {format_bytes(found.budget_bytes)}"
    highest = max(found.columns, key=lambda column: column.total)
    return (
        f"peak {format_bytes(highest.total)} of {format_bytes(found.budget_bytes)}, in {highest.phase} "
        f"at {highest.name!r}"
    )

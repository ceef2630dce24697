"""The tide, drawn: what fills the compute tier at each moment of a training step.

`tide` works it out from a plan as written (instructions in list order), without running anything; `tide_text` and
`tide_svg` draw it. A slot counts from its `Reserve` until it is released or what it holds is dead. The picture of a
plan that accumulates gradients is that of its last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import pairwise

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
from ps_core._program import Extent, Kind, Precision, Program, SegmentName
from ps_core._units import format_bytes


class Category(StrEnum):
    """What bytes are for. Drawn from the bottom up in this order."""

    STATES = "optimizer states"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    BUFFERS = "gathered groups"
    CHECKPOINTS = "checkpoints"
    NONMODEL = "non-model"


CATEGORIES = tuple(Category)


@dataclass(frozen=True, slots=True)
class Column:
    """One moment: bytes of each of `CATEGORIES` while it runs."""

    name: str
    phase: str
    """``forward``, ``backward`` or ``update``."""
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        """All categories together."""
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
        """The highest column."""
        return max((column.total for column in self.columns), default=0)


def tide(program: Program, plan: Plan) -> Tide:
    """What fills the compute tier at each moment of a training step (without training: of an evaluation)."""
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
            counts[_category(program, holds.get(slot), slot in gradients)] += size
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
    return program.overwrites and 0 < version < program.rebuilt(group)


def _gradients_at_entry(program: Program, plan: Plan, name: SegmentName) -> set[int]:
    versions = program.entry(name)
    return {
        slot
        for slot, held in enumerate(plan.home)
        if held.extent.kind is Kind.P16 and _is_gradient(program, held.extent.index, versions.get(held.extent, 0))
    }


def _category(program: Program, extent: Extent | None, is_gradient: bool) -> Category:
    if extent is None:
        return Category.BUFFERS
    if is_gradient and extent.kind in (Kind.P16, Kind.FULL):
        return Category.GRADIENTS
    if extent.kind is Kind.P32 and program.precision is Precision.FP32:
        return Category.WEIGHTS
    return _CATEGORY[extent.kind]


_CATEGORY = {
    Kind.P16: Category.WEIGHTS,
    Kind.P32: Category.STATES,
    Kind.M: Category.STATES,
    Kind.V: Category.STATES,
    Kind.ACC: Category.GRADIENTS,
    Kind.GRAD: Category.GRADIENTS,
    Kind.RGRAD: Category.GRADIENTS,
    Kind.FULL: Category.BUFFERS,
    Kind.WIRE: Category.BUFFERS,
    Kind.ACT: Category.CHECKPOINTS,
}


def _contents(program: Program, plan: Plan, segment: Segment) -> dict[int, Extent]:
    """What each slot is for."""
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
        yield op.shard, Extent(program.weight if program.overwrites else Kind.RGRAD, op.group)
    elif isinstance(op, Accumulate):
        yield op.accumulator, Extent(Kind.ACC, op.group)


# ---------------------------------------------------------------- as text

GLYPHS = dict(zip(CATEGORIES, "▒█▓░+·", strict=True))
LETTERS = dict(zip(CATEGORIES, "SWGBC.", strict=True))
"""For terminals that can write nothing else."""


def tide_text(found: Tide, *, width: int = 72, height: int = 16, ascii_only: bool = False) -> str:
    """The tide as a chart of characters, with its legend."""
    glyphs, rule, corner, bar = (LETTERS, "-", "+", "|") if ascii_only else (GLYPHS, "─", "└", "│")
    columns = _fitted(found.columns, width)
    top = _top(found)
    budget_row = _row(found.budget_bytes, top, height)
    lines = [f"{found.model}: what fills the {found.tier} at each moment of a step", ""]
    for row in range(height - 1, -1, -1):
        level = (row + 0.5) * top / height
        blank = rule if row == budget_row else " "
        cells = "".join(_cell(column, level, glyphs) or blank for column in columns)
        label = _label(row, budget_row, found, top, height)
        lines.append(f"{label:>10} {bar}{cells}" + (" budget" if row == budget_row else ""))
    lines.append(f"{'0':>10} {corner}{rule * len(columns)}")
    lines.append(" " * 12 + _phase_line(columns))
    lines += ["", " " * 12 + "  ".join(f"{glyphs[key]} {key.value}" for key in _present(found))]
    lines.append(" " * 12 + _summary(found))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _fitted(columns: Sequence[Column], width: int) -> list[Column]:
    """As many columns as there is room for: the highest of each run, or each one repeated."""
    count = len(columns)
    if not count:
        return []
    if count <= width:
        return [column for column in columns for _ in range(width // count)]
    edges = [place * count // width for place in range(width + 1)]
    return [max(columns[a:b], key=lambda column: column.total) for a, b in pairwise(edges)]


def _top(found: Tide) -> int:
    """The chart's upper end: the budget, unless everything stays far below it."""
    far = found.budget_bytes > 3 * found.peak_bytes > 0
    return max(1, found.peak_bytes * 5 // 4 if far else max(found.budget_bytes, found.peak_bytes) * 21 // 20)


def _row(count: int, top: int, height: int) -> int:
    return count * height // top


def _cell(column: Column, level: float, glyphs: dict[Category, str]) -> str:
    for category, count in zip(CATEGORIES, column.bytes, strict=True):
        level -= count
        if level < 0:
            return glyphs[category]
    return ""


def _label(row: int, budget_row: int, found: Tide, top: int, height: int) -> str:
    if row == budget_row:
        return format_bytes(found.budget_bytes)
    if budget_row - row in (0, 1) or row % 4 or not row:
        return ""
    return format_bytes(row * top / height)


def _phase_line(columns: Sequence[Column]) -> str:
    line = ""
    for phase, width in _phases(columns):
        line += f"{phase:<{width}}"[:width] if width < len(phase) + 2 else f"{'|' if line else ''}{phase}".ljust(width)
    return line


def _phases(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Runs of one phase, and how many columns each has."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if runs and runs[-1][0] == column.phase:
            runs[-1] = (column.phase, runs[-1][1] + 1)
        else:
            runs.append((column.phase, 1))
    return runs


def _present(found: Tide) -> list[Category]:
    return [key for place, key in enumerate(CATEGORIES) if any(column.bytes[place] for column in found.columns)]


def _summary(found: Tide) -> str:
    if not found.columns:
        return f"nothing runs; budget {format_bytes(found.budget_bytes)}"
    highest = max(found.columns, key=lambda column: column.total)
    return (
        f"peak {format_bytes(highest.total)} of {format_bytes(found.budget_bytes)}, in {highest.phase} "
        f"at {highest.name!r}"
    )


# ---------------------------------------------------------------- as a picture

_WIDTH, _HEIGHT = 960, 440
_LEFT, _RIGHT, _ABOVE, _BELOW = 84, 24, 76, 96
_COLOURS = dict(zip(CATEGORIES, ("#009e73", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#98a2b0"), strict=True))
"""Okabe and Ito's, which people with any colour vision tell apart, and which stand out on light and on dark."""
_STYLE = """
  .page { fill: #ffffff } .ink { fill: #1c2430 } .soft { fill: #5b6675 }
  .grid { stroke: #d7dde5 } .axis { stroke: #5b6675 } .budget { stroke: #c0392b } .budget-ink { fill: #c0392b }
  text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 13px }
  .title { font-size: 18px; font-weight: 600 }
  .budget-ink { paint-order: stroke; stroke: #ffffff; stroke-width: 4px }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12161c } .ink { fill: #e8ecf1 } .soft { fill: #a3adba }
    .grid { stroke: #2c3440 } .axis { stroke: #a3adba } .budget { stroke: #ff7b6b }
    .budget-ink { fill: #ff7b6b; stroke: #12161c }
  }
"""


def tide_svg(found: Tide) -> str:
    """The tide as a picture that stands alone: no scripts, no outside fonts, for light and dark pages."""
    title = escape(f"{found.model}: what fills the {found.tier} during a training step")
    top = _top(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="tide-title tide-about">',
        f'<title id="tide-title">{title}</title>',
        f'<desc id="tide-about">{escape(_summary(found))}. Stacked bytes at each moment.</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        f'<text class="ink title" x="{_LEFT}" y="32">{title}</text>',
        f'<text class="soft" x="{_LEFT}" y="54">{escape(_summary(found))}</text>',
        *_grid(top),
        *_areas(found, top),
        *_frame(found, top),
        *_legend(found),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _y(count: float, top: int) -> float:
    return round(_HEIGHT - _BELOW - count / top * (_HEIGHT - _ABOVE - _BELOW), 2)


def _x(place: float, count: int) -> float:
    return round(_LEFT + place / count * (_WIDTH - _LEFT - _RIGHT), 2)


def _grid(top: int) -> Iterator[str]:
    step = _tick(top)
    for tick in range(0, top + 1, step):
        y = _y(tick, top)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        label = format_bytes(tick) if tick else "0"
        yield f'<text class="soft" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>'
    middle = (_HEIGHT - _BELOW + _ABOVE) / 2
    yield (
        f'<text class="soft" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">'
        "bytes in use</text>"
    )


def _tick(top: int) -> int:
    """A round distance of grid lines: four to eight of them."""
    step = 1
    while top // step > 8:
        step *= 2
    return step


def _areas(found: Tide, top: int) -> Iterator[str]:
    count = len(found.columns)
    floor = [0] * count
    for place, category in enumerate(CATEGORIES):
        roof = [low + column.bytes[place] for low, column in zip(floor, found.columns, strict=True)]
        if roof != floor:
            path = _outline(floor, roof, top)
            yield f'<path fill="{_COLOURS[category]}" d="{path}"><title>{category.value}</title></path>'
        floor = roof


def _outline(floor: Sequence[int], roof: Sequence[int], top: int) -> str:
    """Along the roof and back along the floor, one step a column; corners only where the height changes."""
    points = [*_steps(roof, top), *reversed(list(_steps(floor, top)))]
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + "Z"


def _steps(heights: Sequence[int], top: int) -> Iterator[tuple[float, float]]:
    count = len(heights)
    yield _x(0, count), _y(heights[0], top)
    for place, (last, height) in enumerate(pairwise(heights), start=1):
        if height != last:
            yield _x(place, count), _y(last, top)
            yield _x(place, count), _y(height, top)
    yield _x(count, count), _y(heights[-1], top)


def _frame(found: Tide, top: int) -> Iterator[str]:
    base, right = _HEIGHT - _BELOW, _WIDTH - _RIGHT
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    label = f"budget {format_bytes(found.budget_bytes)}"
    if found.budget_bytes <= top:
        y = _y(found.budget_bytes, top)
        yield (
            f'<line class="budget" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke-width="1.5" '
            'stroke-dasharray="6 4"/>'
        )
        yield f'<text class="budget-ink" x="{right}" y="{y - 6}" text-anchor="end">{label}</text>'
    else:
        yield f'<text class="budget-ink" x="{right}" y="{_ABOVE - 6}" text-anchor="end">{label}, far above</text>'
    place, count = 0, max(1, len(found.columns))
    for phase, width in _phases(found.columns):
        left, middle = _x(place, count), _x(place + width / 2, count)
        if place:
            yield f'<line class="axis" x1="{left}" x2="{left}" y1="{_ABOVE}" y2="{base + 8}" stroke-dasharray="2 4"/>'
        yield f'<text class="ink" x="{middle}" y="{base + 22}" text-anchor="middle">{phase}</text>'
        place += width
    middle = (_LEFT + right) / 2
    yield f'<text class="soft" x="{middle}" y="{base + 42}" text-anchor="middle">moments of one step</text>'


def _legend(found: Tide) -> Iterator[str]:
    x, y = _LEFT, _HEIGHT - 22
    for category in _present(found):
        yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" fill="{_COLOURS[category]}"/>'
        yield f'<text class="ink" x="{x + 19}" y="{y}">{category.value}</text>'
        x += 40 + 8 * len(category.value)

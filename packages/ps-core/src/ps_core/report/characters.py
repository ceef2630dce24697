"""Draw memory over a step in characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ps_core._units import format_bytes
from ps_core.report.columns import CATEGORIES, Category, Column, Tide, phases, present, summary, upper_end

GLYPHS = dict(zip(CATEGORIES, "▒█▓░+·", strict=True))
LETTERS = dict(zip(CATEGORIES, "SWGBC.", strict=True))
"""Letters for terminals that can write ASCII only."""


def tide_text(found: Tide, *, width: int = 72, height: int = 16, ascii_only: bool = False) -> str:
    """Return memory over a step as a chart of characters, with its legend."""
    glyphs, rule, corner, bar = (LETTERS, "-", "+", "|") if ascii_only else (GLYPHS, "─", "└", "│")
    columns = _fitted(found.columns, width)
    top = upper_end(found)
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
    lines += ["", " " * 12 + "  ".join(f"{glyphs[key]} {key.value}" for key in present(found))]
    lines.append(" " * 12 + summary(found))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _fitted(columns: Sequence[Column], width: int) -> list[Column]:
    """Return as many columns as fit: the highest of each run, or each one repeated."""
    count = len(columns)
    if not count:
        return []
    if count <= width:
        return [column for column in columns for _ in range(width // count)]
    edges = [place * count // width for place in range(width + 1)]
    return [max(columns[a:b], key=lambda column: column.total) for a, b in pairwise(edges)]


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
    for phase, width in phases(columns):
        line += f"{phase:<{width}}"[:width] if width < len(phase) + 2 else f"{'|' if line else ''}{phase}".ljust(width)
    return line

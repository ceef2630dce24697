"""Draw memory over a step as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from ps_core._units import format_bytes
from ps_core.report.columns import CATEGORIES, Tide, phases, present, summary, upper_end

_WIDTH, _HEIGHT = 960, 440
_LEFT, _RIGHT, _ABOVE, _BELOW = 100, 40, 76, 96
_COLOURS = dict(zip(CATEGORIES, ("#009e73", "#0072b2", "#e69f00", "#cc79a7", "#56b4e9", "#98a2b0"), strict=True))
"""Okabe and Ito's colours: people with any colour vision can tell them apart, on light and on dark."""
STYLE = """
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
    """Return memory over a step as a self-contained picture (no scripts or fonts), for light and dark pages."""
    title = escape(f"{found.model}: what fills the {found.tier} during a training step")
    top = upper_end(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="tide-title tide-about">',
        f'<title id="tide-title">{title}</title>',
        f'<desc id="tide-about">{escape(summary(found))}. Stacked bytes at each moment.</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        f'<text class="ink title" x="{_LEFT}" y="32">{title}</text>',
        f'<text class="soft" x="{_LEFT}" y="54">{escape(summary(found))}</text>',
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
        f'<text class="soft" x="15" y="{middle}" text-anchor="middle" transform="rotate(-90 15 {middle})">'
        "bytes in use</text>"
    )


def _tick(top: int) -> int:
    """Return a round distance for grid lines: four to eight of them."""
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
    """Return a path along the top and back along the bottom, one step a column; corners only where heights change."""
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
    for phase, width in phases(found.columns):
        left, middle = _x(place, count), _x(place + width / 2, count)
        if place:
            yield f'<line class="axis" x1="{left}" x2="{left}" y1="{_ABOVE}" y2="{base + 8}" stroke-dasharray="2 4"/>'
        yield f'<text class="ink" x="{middle}" y="{base + 22}" text-anchor="middle">{phase}</text>'
        place += width
    middle = (_LEFT + right) / 2
    yield f'<text class="soft" x="{middle}" y="{base + 42}" text-anchor="middle">moments of one step</text>'


def _legend(found: Tide) -> Iterator[str]:
    x, y = _LEFT, _HEIGHT - 22
    for category in present(found):
        yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" fill="{_COLOURS[category]}"/>'
        yield f'<text class="ink" x="{x + 19}" y="{y}">{category.value}</text>'
        x += 40 + 8 * len(category.value)

"""Draw a run: its loss curve, and what filled the accelerator in one measured step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ps_core._atomic_files import write_text_atomically
from ps_core.engine import MemoryMeasurement
from ps_core.report import tide_svg
from ps_core.report.picture import STYLE

_WIDTH, _HEIGHT = 960, 440
_LEFT, _RIGHT, _ABOVE, _BELOW = 84, 40, 76, 96
_TRAINING, _VALIDATION = "#0072b2", "#d55e00"
_MOST_POINTS = 480
"""A longer run's losses are averaged over equal runs of steps, to this many points."""


class Point(NamedTuple):
    """A loss, or the mean of several, and its step."""

    step: float
    loss: float


def draw(out: Path, model: str, memory: MemoryMeasurement | None) -> str:
    """Write ``loss.svg``, and ``tide.svg`` if memory was measured, to the run's folder; return a line that says so."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [Point(row["step"], row["loss"]) for row in rows if row["loss"] is not None]
    held = [Point(row["step"], row["val_loss"]) for row in rows if row.get("val_loss") is not None]
    made, measured = [], None if memory is None else memory.report(model)
    if losses:
        write_text_atomically(out / "loss.svg", loss_svg(model, losses, held))
        made.append(f"the loss curve {out / 'loss.svg'}")
    if measured is not None:
        write_text_atomically(out / "tide.svg", tide_svg(measured))
        made.append(f"memory at each moment of a step {out / 'tide.svg'}")
    return f"drawn: {', '.join(made)}" if made else ""


def loss_svg(model: str, losses: Sequence[Point], held: Sequence[Point]) -> str:
    """Return the loss over steps as a self-contained picture, for light and dark pages."""
    losses = _thinned(losses)
    title, last = escape(f"{model}: loss"), losses[-1]
    about = f"from {losses[0].loss:.4f} to {last.loss:.4f} in {last.step:.0f} steps"
    if held:
        about += f"; {held[-1].loss:.4f} on held-back data"
    scale = _Scale([*losses, *held])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="loss-title loss-about">',
        f'<title id="loss-title">{title}</title>',
        f'<desc id="loss-about">{about}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        f'<text class="ink title" x="{_LEFT}" y="32">{title}</text>',
        f'<text class="soft" x="{_LEFT}" y="54">{about}</text>',
        *_axes(scale),
        f'<polyline fill="none" stroke="{_TRAINING}" stroke-width="2" points="{_line(losses, scale)}"/>',
        *_marks(held, scale),
        *_legend(bool(held)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    """Compute where a step and a loss are in the picture."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.first, self.last = min(point.step for point in points), max(point.step for point in points)
        low, high = min(point.loss for point in points), max(point.loss for point in points)
        margin = max(high - low, abs(high) * 1e-3, 1e-6) * 0.05
        self.low, self.high = low - margin, high + margin

    def x(self, step: float) -> float:
        part = (step - self.first) / max(1, self.last - self.first)
        return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 2)

    def y(self, loss: float) -> float:
        part = (loss - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BELOW - part * (_HEIGHT - _ABOVE - _BELOW), 2)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return the points, or means of neighbours if there are too many."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    edges = [place * len(points) // _MOST_POINTS for place in range(_MOST_POINTS + 1)]
    runs = [points[start:end] for start, end in pairwise(edges)]
    return [Point(run[-1].step, sum(point.loss for point in run) / len(run)) for run in runs]


def _line(points: Sequence[Point], scale: _Scale) -> str:
    return " ".join(f"{scale.x(point.step):g},{scale.y(point.loss):g}" for point in points)


def _marks(points: Sequence[Point], scale: _Scale) -> Iterator[str]:
    for point in points:
        at = f'cx="{scale.x(point.step):g}" cy="{scale.y(point.loss):g}"'
        told = f"{point.loss:.4f} after step {point.step}"
        yield f'<circle fill="{_VALIDATION}" {at} r="4"><title>{told}</title></circle>'


def _axes(scale: _Scale) -> Iterator[str]:
    base, right = _HEIGHT - _BELOW, _WIDTH - _RIGHT
    for tick in range(6):
        loss = scale.low + tick * (scale.high - scale.low) / 5
        y = scale.y(loss)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text class="soft" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{loss:.2f}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    for step in dict.fromkeys((scale.first, (scale.first + scale.last) // 2, scale.last)):
        yield f'<text class="ink" x="{scale.x(step)}" y="{base + 22}" text-anchor="middle">{step:g}</text>'
    yield f'<text class="soft" x="{(_LEFT + right) / 2}" y="{base + 42}" text-anchor="middle">steps</text>'


def _legend(held: bool) -> Iterator[str]:
    x, y = _LEFT, _HEIGHT - 22
    for colour, name in ((_TRAINING, "training"), (_VALIDATION, "held-back data"))[: 1 + held]:
        yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" fill="{colour}"/>'
        yield f'<text class="ink" x="{x + 19}" y="{y}">{name}</text>'
        x += 40 + 8 * len(name)

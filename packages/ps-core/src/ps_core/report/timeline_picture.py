"""Draw what each queue does in a step as an SVG picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ps_core._plan import Queue
from ps_core._simulate.clock import QUEUE_NAMES
from ps_core._simulate.work_pieces import Piece
from ps_core.report.picture import STYLE

_WIDTH, _LEFT, _RIGHT, _ABOVE, _ROW = 960, 130, 30, 72, 30
_COLOURS = {
    Queue.COMPUTE: "#0072b2",
    Queue.H2D: "#009e73",
    Queue.D2H: "#e69f00",
    Queue.DISK_R: "#56b4e9",
    Queue.DISK_W: "#98a2b0",
    Queue.COLL: "#d55e00",
    Queue.CPU: "#cc79a7",
}
"""Okabe and Ito's colours, as in `picture`."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def timeline_svg(title: str, processes: Mapping[str, Sequence[Piece]], begin_s: float, end_s: float) -> str:
    """Return a picture of the queues between two times: for every process (as in "planned") a block of rows.

    The picture is self-contained (no scripts or fonts), for light and dark pages.
    """
    rows: list[str] = []
    y = _ABOVE
    for name, pieces in processes.items():
        shown = [each for each in pieces if each.end_s > begin_s and each.begin_s < end_s]
        rows.append(f'<text class="ink" x="{_LEFT}" y="{y + 14}">{escape(name)}</text>')
        y += 22
        for queue in sorted({each.queue for each in shown}):
            line = [each for each in shown if each.queue is queue]
            rows += _row(queue, line, y, begin_s, end_s)
            y += _ROW
        y += 8
    rows += _axis(y, begin_s, end_s)
    height = y + 40
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="timeline-title">',
        f'<title id="timeline-title">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>',
        f'<text class="ink title" x="{_LEFT}" y="36">{escape(title)}</text>',
    ]
    return "\n".join([*head, *rows, "</svg>"]) + "\n"


def _x(when: float, begin_s: float, end_s: float) -> float:
    part = (min(max(when, begin_s), end_s) - begin_s) / max(end_s - begin_s, 1e-12)
    return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 2)


def _row(queue: Queue, pieces: Sequence[Piece], y: int, begin_s: float, end_s: float) -> Iterator[str]:
    yield f'<text class="soft" x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{QUEUE_NAMES[queue]}</text>'
    yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y + 22}" y2="{y + 22}"/>'
    for each in pieces:
        left, right = _x(each.begin_s, begin_s, end_s), _x(each.end_s, begin_s, end_s)
        width = round(max(right - left - 0.4, 0.3), 2)
        yield (
            f'<rect x="{left}" y="{y + 2}" width="{width}" height="20" fill="{_COLOURS[queue]}">'
            f"<title>{escape(each.name)}</title></rect>"
        )


def _axis(y: int, begin_s: float, end_s: float) -> Iterator[str]:
    whole = end_s - begin_s
    scale, unit = next((row for row in _UNITS if whole >= row[0]), _UNITS[-1])
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
    for part in range(5):
        when = begin_s + whole * part / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        text = f"{(when - begin_s) / scale:.3g} {unit}"
        yield f'<text class="soft" x="{_x(when, begin_s, end_s)}" y="{y + 20}" text-anchor="{anchor}">{text}</text>'

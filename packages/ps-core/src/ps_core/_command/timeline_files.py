"""Define ``pstar plan --timeline``: when each queue works in a step, as a picture or a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ps_core._command.forecast import Forecast
from ps_core._simulate.idle_time import step_window
from ps_core._simulate.work_pieces import Piece, planned_pieces
from ps_core.report.chrome_trace import chrome_trace
from ps_core.report.timeline_picture import timeline_svg


def timeline_text(found: Forecast, path: str) -> str:
    """Return the contents for a file of this name: a trace for ``.json``, else a picture in SVG."""
    program, plan, training = found.planned.program, found.planned.plan, found.training
    names = program.iteration() * 3
    node = training.cluster.ranks_per_node
    early = found.planned.early
    pieces = planned_pieces(program, plan, training.machine, names, ranks_per_node=node, early=early).pieces
    begin, end = step_window(pieces, 1, 2)  # the middle one of three steps
    shown: dict[str, Sequence[Piece]] = {"planned": pieces}
    if path.endswith(".json"):
        return json.dumps(chrome_trace(shown))
    return timeline_svg(f"{found.trace.model}: when each queue works in a training step", shown, begin, end)

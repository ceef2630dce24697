"""Keep what a search chose in a folder, so that later runs need not search again.

The folder keeps the choice, not the plan: the tier of each group's home and of its step, and which steps are within
backward. The plan is made from that choice and verified as any other. So a file from an older version or with wrong
contents costs a search, never a wrong plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ps_core._errors import InvalidInput, PatrickStarError
from ps_core._extents import Kind
from ps_core._input_files import read_text
from ps_core._layout import Layout
from ps_core._plan import Tier
from ps_core._planner.placement import Placement
from ps_core._planner.search import Planned, Setup, find_plan, plan_with
from ps_core._simulate.machine import Machine
from ps_core._trace import Trace

FORMAT = "ps_core.choice/6"


def find_plan_again(
    trace: Trace, tiers: tuple[Tier, ...], machine: Machine, *, setup: Setup, layout: Layout, folder: Path
) -> Planned:
    """Find a plan as `find_plan` does, but search only if the folder has no answer to exactly this question."""
    question = repr((FORMAT, trace, tiers, machine, setup, layout))
    path = folder / f"{hashlib.sha256(question.encode()).hexdigest()[:32]}.json"
    try:
        placement = _choice(read_text(path), len(layout.groups), len(tiers))
        return plan_with(placement, trace, tiers, machine, setup=setup, layout=layout)
    except (OSError, ValueError, PatrickStarError):
        planned = find_plan(trace, tiers, machine, setup=setup, layout=layout)
    _keep(path, planned.placement)
    return planned


def _choice(text: str, groups: int, tiers: int) -> Placement | None:
    data: Any = json.loads(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InvalidInput(f"not a choice: expected a JSON object with format {FORMAT!r}")
    if data.get("tight"):
        return None
    weights, states = (_tiers(data.get(name), groups, range(tiers)) for name in ("weights", "states"))
    steps = _tiers(data.get("steps"), groups, range(-1, tiers))
    within = _numbers(data.get("stepped_in_backward"), range(groups))
    return Placement(
        weights=weights,
        states=states,
        steps=steps,
        weight=Kind(data.get("weight", Kind.P16)),
        stepped_in_backward=within,
    )


def _tiers(row: Any, groups: int, allowed: range) -> tuple[int, ...]:
    found = _numbers(row, allowed)
    if len(found) != groups:
        raise InvalidInput(f"expected {groups} numbers of tiers, found {row!r}")
    return found


def _numbers(row: Any, allowed: range) -> tuple[int, ...]:
    if not isinstance(row, list) or not all(each in allowed for each in row):
        raise InvalidInput(f"expected a list of whole numbers in {allowed}, found {row!r}")
    return tuple(row)


def _keep(path: Path, placement: Placement | None) -> None:
    """Write the answer whole or not at all. If the folder cannot be written to, tell the user."""
    rows = {} if placement is None else {name: getattr(placement, name) for name in Placement.__dataclass_fields__}
    text = json.dumps({"format": FORMAT, "tight": placement is None, **rows})
    half = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(text, "utf-8")
        half.replace(path)
    except OSError as error:
        raise InvalidInput(f"Options.plan_cache: cannot write to {path.parent}: {error.strerror}") from error

"""A plan as text, for other processes: each of them verifies what it reads, so nothing here is trusted."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

from ps_core._errors import InvalidInput
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Held, Instr, Op, Plan, Queue, Segment, Tier

FORMAT = "ps_core.plan/1"
_OPS: dict[str, type[Any]] = {op.__name__: op for op in get_args(Op)}


def plan_to_text(plan: Plan) -> str:
    """Write a plan as one JSON document; `plan_from_text` gives it back equal."""
    document = {
        "format": FORMAT,
        "tiers": [[tier.name, tier.capacity_bytes] for tier in plan.tiers],
        "home": [[held.tier, held.offset, held.bytes, held.extent] for held in plan.home],
        "segments": {
            segment.name.value: [[i.id, i.queue, _written(i.op), i.after, i.visit] for i in segment.instrs]
            for segment in plan.segments
        },
        "policy": plan.policy,
        "step_tiers": plan.step_tiers,
        "notes": plan.notes,
    }
    return json.dumps(document, separators=(",", ":"))


def plan_from_text(text: str) -> Plan:
    """Read a plan; raise `InvalidInput` where the text is none."""
    try:
        data: Any = json.loads(text, parse_float=_refuse_number, parse_constant=_refuse_number)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}")
        return Plan(
            tiers=tuple(Tier(*row) for row in data["tiers"]),
            home=tuple(Held(tier, offset, size, _extent(extent)) for tier, offset, size, extent in data["home"]),
            segments=tuple(
                Segment(SegmentName(name), tuple(_instruction(row) for row in rows))
                for name, rows in data["segments"].items()
            ),
            policy=data["policy"],
            step_tiers=tuple(data["step_tiers"]),
            notes=tuple(data["notes"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"not a plan: expected a JSON object with format {FORMAT!r}; {error}") from error


def _refuse_number(digits: str) -> None:
    raise ValueError(f"each number must be a whole number, found {digits}")


def _written(op: Op) -> list[Any]:
    return [type(op).__name__, *(getattr(op, field.name) for field in fields(op))]


def _instruction(row: list[Any]) -> Instr:
    number, queue, (name, *values), after, visit = row
    return Instr(number, Queue(queue), _OPS[name](*map(_value, values)), tuple(after), visit)


def _value(value: Any) -> Any:
    """Return a field of an instruction: an extent, several slots, or what it is."""
    if not isinstance(value, list):
        return value
    return _extent(value) if value and isinstance(value[0], str) else tuple(value)


def _extent(row: list[Any]) -> Extent:
    kind, index = row
    return Extent(Kind(kind), index)

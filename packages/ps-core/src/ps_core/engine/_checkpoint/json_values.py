"""Convert Python values to JSON and back, exactly: all bits of numbers, tuples as tuples, tensors by reference.

[Note: tags]
These are unchanged in JSON: None, booleans, integers, finite numbers, texts and lists. So are dictionaries whose keys
are texts without a leading dollar sign. Anything else is a dictionary of one key: ``$float`` (not finite), ``$tuple``,
``$bytes``, ``$bytearray``, ``$dict`` (pairs), ``$tensor`` (the name of a tensor that is kept elsewhere).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

from ps_core._errors import InvalidInput
from ps_core.engine._checkpoint.dense_memory import not_dense

_DEEPEST = 100
"""The most lists, tuples and dictionaries around a value: Python and its JSON cannot follow many more."""
_LONGEST_BITS = 10_000
"""The longest whole number: Python reads no more than 4300 digits of one."""


def encode(where: str, value: Any, keep: Callable[[torch.Tensor], str], depth: int = 0) -> Any:
    """Return JSON of which `decode` makes an equal value; ``keep`` stores a tensor and returns its name.

    ``where`` names the value in messages; ``depth`` counts what it is in.
    """
    if depth > _DEEPEST:
        raise InvalidInput(
            f"{where[:60]}... is more than {_DEEPEST} deep in lists, tuples and dicts, or holds itself; a checkpoint "
            f"holds values at most {_DEEPEST} deep"
        )
    depth += 1
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() > _LONGEST_BITS:
        raise InvalidInput(
            f"{where} is a whole number of {value.bit_length()} bits; a checkpoint holds at most {_LONGEST_BITS}"
        )
    if isinstance(value, int | float | str):
        return _plain(value)
    if isinstance(value, bytes | bytearray):
        kind = "$bytes" if isinstance(value, bytes) else "$bytearray"
        return {kind: base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if why := not_dense(value):
            raise InvalidInput(
                f"{where} is {why}, which a checkpoint cannot hold: expected a dense one with memory: try .to_dense()"
            )
        return {"$tensor": keep(value.detach().resolve_conj().resolve_neg())}
    if isinstance(value, list | tuple):
        rows = [encode(f"{where}[{index}]", each, keep, depth) for index, each in enumerate(value)]
        return {"$tuple": rows} if isinstance(value, tuple) else rows
    if isinstance(value, dict):
        keys = [encode(f"a key of {where}", key, keep, depth) for key in value]
        values = [encode(f"{where}[{key!r}]", each, keep, depth) for key, each in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(zip(value, values, strict=True))
        return {"$dict": list(map(list, zip(keys, values, strict=True)))}
    raise InvalidInput(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold without pickle: expected None, bool, "
        "int, float, str, bytes, a tensor, or lists, tuples and dicts of those: try its state_dict(), or .tolist()"
    )


def _plain(value: float | str) -> Any:
    """Return a number or text as a plain one, also of a subclass (NumPy's, an enum)."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    number = float.__float__(value)
    return number if math.isfinite(number) else {"$float": repr(number)}


def decode(value: Any, find: Callable[[str], torch.Tensor]) -> Any:
    """Return the value that was encoded; ``find`` returns a tensor by its name."""
    if isinstance(value, list):
        return [decode(each, find) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag == "$float":
            return float(inner)
        if tag == "$bytes":
            return base64.b64decode(inner)
        if tag == "$bytearray":
            return bytearray(base64.b64decode(inner))
        if tag == "$tensor":
            return find(inner)
        if tag == "$tuple":
            return tuple(decode(inner, find))
        if tag == "$dict":
            return {decode(key, find): decode(each, find) for key, each in inner}
    return {key: decode(each, find) for key, each in value.items()}

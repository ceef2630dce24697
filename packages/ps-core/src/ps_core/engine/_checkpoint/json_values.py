"""Convert Python values to JSON and back, exactly: all bits of numbers, tuples as tuples, tensors by reference.

[Note: tags]
These are unchanged in JSON: None, booleans, integers, finite numbers, texts and lists. So are dictionaries whose keys
are texts without a leading dollar sign. Anything else is a dictionary of one key: ``$float`` (not finite), ``$tuple``,
``$bytes``, ``$dict`` (pairs), ``$tensor`` (the name of a tensor that is kept elsewhere).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

from ps_core._errors import InvalidInput


def encode(where: str, value: Any, keep: Callable[[torch.Tensor], str]) -> Any:
    """Return JSON of which `decode` makes the same value; ``keep`` stores a tensor and returns its name.

    ``where`` names the value in messages.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        return _plain(value)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            raise InvalidInput(
                f"{where} is a tensor of layout {value.layout} on {value.device}, which a checkpoint cannot hold: "
                "expected a dense one with memory: try .to_dense()"
            )
        return {"$tensor": keep(value)}
    if isinstance(value, list | tuple):
        rows = [encode(f"{where}[{index}]", each, keep) for index, each in enumerate(value)]
        return {"$tuple": rows} if isinstance(value, tuple) else rows
    if isinstance(value, dict):
        values = {key: encode(f"{where}[{key!r}]", each, keep) for key, each in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return values
        return {"$dict": [[encode(f"a key of {where}", key, keep), each] for key, each in values.items()]}
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
        if tag == "$tensor":
            return find(inner)
        if tag == "$tuple":
            return tuple(decode(inner, find))
        if tag == "$dict":
            return {decode(key, find): decode(each, find) for key, each in inner}
    return {key: decode(each, find) for key, each in value.items()}

"""Read and write sizes as people do."""

from __future__ import annotations

import re
import sys
from typing import TypeGuard

from ps_core._errors import InvalidInput

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {f"{letter}{rest}": 1024**power for power, letter in enumerate("KMGT", 1) for rest in ("", "IB")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

ALIGNMENT_BYTES = 128
"""Every slot starts and ends on this boundary, on every tier."""

_FEW_BYTES = 4096
"""A smaller number without a unit is taken for a mistake."""

MOST_WHOLE = 2**62
"""The largest whole number that is accepted: more bytes or elements than any computer has."""


def check_whole(what: str, value: object, least: int = 0, most: int = MOST_WHOLE) -> None:
    """Raise `InvalidInput` unless the value is a whole number from ``least`` to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{what} must be a whole number of at least {least}, found {shown(value)}")
    if value > most:
        raise InvalidInput(f"{what} must be a whole number of at most {most}, found {shown(value)}")


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a number that a float can hold; whole numbers may be too large for that."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_number(what: str, value: object, least: float = 0.0, most: float = sys.float_info.max) -> None:
    """Raise `InvalidInput` unless the value is a finite number from ``least`` to ``most``."""
    if not is_finite(value) or not least <= value <= most:
        limit = "" if most == sys.float_info.max else f" and at most {most:g}"
        raise InvalidInput(f"{what} must be a finite number of at least {least:g}{limit}, found {shown(value)}")


def check_flag(what: str, value: object) -> None:
    """Raise `InvalidInput` unless the value is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{what} must be True or False, found {shown(value)}")


def shown(value: object) -> str:
    """Return the value as text; Python refuses to print a whole number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def parse_bytes(size: int | str) -> int:
    """Return bytes from ``"20GiB"`` or ``"20G"`` (binary), ``"20GB"`` (decimal), ``"4096"`` or an integer."""
    if isinstance(size, int) and not isinstance(size, bool):
        if not 0 <= size <= MOST_WHOLE:
            what = "a size cannot be negative" if size < 0 else "not a size anything could have"
            raise InvalidInput(f"{what}: {shown(size)}")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = match[2].upper() if match else "?"
    scale = _DECIMAL.get(unit, _BINARY.get(unit))
    if match is None or scale is None:
        raise InvalidInput(f"not a size: {size!r} (write it like 20GiB, 20GB or 4096)")
    whole = float(match[1]) * scale
    if whole > MOST_WHOLE:
        raise InvalidInput(f"not a size anything could have: {size!r}")
    return int(whole) if "." in match[1] else int(match[1]) * scale


def meant_as_gib(size: int | str | None) -> str:
    """Return ``"24GiB"`` for 24: a small size without a unit is probably in GiB. Return "" for any other size."""
    text = str(size).strip()
    return f"{int(text)}GiB" if text.isdecimal() and 0 < int(text) < _FEW_BYTES else ""


def format_bytes(count: float) -> str:
    """Return a count of bytes with three or four digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_count(count: float) -> str:
    """Return a count of parameters as people write it: 1.5B, 124M."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.0f}"


def align_up(count: int, to: int = ALIGNMENT_BYTES) -> int:
    """Return the least multiple of ``to`` that is at least ``count``."""
    return -(-count // to) * to

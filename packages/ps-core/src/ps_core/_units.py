"""Read and write sizes as people do."""

from __future__ import annotations

import re

from ps_core._errors import InvalidInput

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {f"{letter}{rest}": 1024**power for power, letter in enumerate("KMGT", 1) for rest in ("", "IB")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

ALIGNMENT_BYTES = 128
"""Every slot starts and ends on this boundary, on every tier."""


def parse_bytes(size: int | str) -> int:
    """Return bytes from ``"20GiB"`` or ``"20G"`` (binary), ``"20GB"`` (decimal), ``"4096"`` or an integer."""
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise InvalidInput(f"a size cannot be negative: {size}")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = match[2].upper() if match else "?"
    scale = _DECIMAL.get(unit, _BINARY.get(unit))
    if match is None or scale is None:
        raise InvalidInput(f"not a size: {size!r} (write it like 20GiB, 20GB or 4096)")
    whole = float(match[1]) * scale
    if whole > 2**62:
        raise InvalidInput(f"not a size anything could have: {size!r}")
    return int(whole) if "." in match[1] else int(match[1]) * scale


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

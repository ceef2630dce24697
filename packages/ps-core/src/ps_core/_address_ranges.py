"""Find room between ranges of addresses."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
"""Addresses, from and up to."""


def lowest(spans: Iterable[Span], size: int, start: int = 0) -> int:
    """Return the lowest address from ``start`` on with ``size`` bytes behind it outside of the sorted spans."""
    for begin, end in spans:
        if begin >= start + size:
            break
        start = max(start, end)
    return start

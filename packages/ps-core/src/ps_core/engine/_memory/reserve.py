"""Room for what is not model data, on a device where an arena takes it away for good."""

from __future__ import annotations

from dataclasses import replace

from ps_core._simulate.cluster import FRAGMENTATION
from ps_core._trace import Trace

_SPARE_PARTS = (20, 4)
"""Where memory ran out, such parts of it are left free besides, at the least and at the most."""


def bytes_to_reserve(missing_bytes: int, capacity_bytes: int) -> int:
    """How much more to leave free, once so much was asked for in vain."""
    least, most = (capacity_bytes // part for part in _SPARE_PARTS)
    return min(max(missing_bytes, least), most)


def with_constant_peak(trace: Trace, bytes_to_reserve: int) -> Trace:
    """The trace with the tide always at its highest, a part of it more for pieces too small to use, and a spare.

    So no slot of a plan lies above one line while the model runs, and the arena can end there.
    """
    peak = trace.peak_nonmodel_bytes
    line = peak + int(peak * FRAGMENTATION) + bytes_to_reserve
    return replace(trace, moments=tuple(replace(moment, nonmodel_bytes=line) for moment in trace.moments))

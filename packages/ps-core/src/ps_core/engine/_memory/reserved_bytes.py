"""Choose how much device memory to leave free for non-model bytes, beyond the peak that was recorded."""

from __future__ import annotations

from dataclasses import replace

from ps_core._simulate.cluster import FRAGMENTATION
from ps_core._trace import Trace

_SPARE_PARTS = (20, 4)
"""The least and the most bytes left free after memory ran out: the capacity divided by these."""


def bytes_to_reserve(missing_bytes: int, capacity_bytes: int) -> int:
    """Return how many bytes more to leave free after an allocation of ``missing_bytes`` failed."""
    least, most = (capacity_bytes // part for part in _SPARE_PARTS)
    return min(max(missing_bytes, least), most)


def with_constant_peak(trace: Trace, bytes_to_reserve: int) -> Trace:
    """Return the trace with non-model bytes at their peak in every moment, with fragmentation and a reserve on top.

    So no slot of a plan lies above one address while the model runs, and the arena can end there.
    """
    peak = trace.peak_nonmodel_bytes
    line = peak + int(peak * FRAGMENTATION) + bytes_to_reserve
    return replace(trace, moments=tuple(replace(moment, nonmodel_bytes=line) for moment in trace.moments))

"""Sum arrays of several ranks in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ps_kernels._arrays import (
    FLOATS,
    Array,
    check_dtype,
    check_flat,
    check_together,
    check_written,
    note_written,
    refuse_uncounted,
    view,
)
from ps_kernels._backends import CpuBackend, choose, named
from ps_kernels._errors import InvalidArgument


def sum_in_order(parts: Sequence[Array], out: Array, *, backend: str | None = None) -> None:
    """Write the sum of ``parts`` to ``out``: added in their order in single precision, and rounded once.

    The parts are of one float type, ``out`` of any; ``out`` may be one of the parts. All arrays are in CPU memory. The
    work is done on the calling thread, so that it takes no cores from a thread that computes beside it.
    """
    if not hasattr(parts, "__len__"):
        refuse_uncounted("parts", parts)
    sources, target = [view(f"parts[{place}]", part) for place, part in enumerate(parts)], view("out", out)
    if not sources:
        raise InvalidArgument("parts: expected at least one array, found none")
    check_together([target, *sources])
    if target.device != "cpu":
        raise InvalidArgument(f"out: expected on the CPU, found on {target.device}, where there is no such kernel")
    check_dtype([sources[0], target], FLOATS)
    check_dtype(sources, (sources[0].dtype,))
    check_flat([target, *sources], target.numel)
    check_written([target], [source for source in sources if not source.is_same_as(target)])
    found: Any = choose(
        target.name, target.library, target.device, None if backend is None else named(backend)
    )  # every backend of the CPU is one
    chosen: CpuBackend = found
    chosen.sum_in_order([source.array for source in sources], target.array)
    note_written([target])

"""Find how many transformer blocks exceed the CPU's caches."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_BYTES = 2**25
"""The size to assume where the operating system reports none."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_TIMES = 2.0
_FEWEST, _MOST = 4, 16


class Cache(NamedTuple):
    """The size of the last level of cache."""

    bytes: int
    known: bool
    """True if the operating system reported the sizes."""

    def __str__(self) -> str:
        return f"a cache of {self.bytes / 2**20:.0f} MiB" + ("" if self.known else " (assumed)")


def last_cache(system: Path = _SYSTEM) -> Cache:
    """Return the largest level of data cache of the first processor."""
    found = []
    for index in system.glob("index*"):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        told = re.fullmatch(r"(\d+)([KMG]?)", size)
        if told and level.isdigit() and kind != "Instruction":
            found.append((int(level), int(told[1]) * _UNITS[told[2]]))
    return Cache(max(found)[1], known=True) if found and max(found)[1] else Cache(DEFAULT_BYTES, known=False)


def stack_size(block_bytes: int, cache_bytes: int) -> int:
    """Return how many blocks take twice the cache's bytes, within the range that a calibration has time for."""
    return min(_MOST, max(_FEWEST, math.ceil(_TIMES * cache_bytes / block_bytes)))

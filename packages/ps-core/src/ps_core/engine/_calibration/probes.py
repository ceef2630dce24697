"""Time small pieces of work so that other processes disturb the times little, and so that a disturbance shows.

[Note: how it is timed]
All probes take turns, so that a slow period meets each of them. Of each probe the lower quartile counts. What one
thread does alone is timed by the processor's clock, which stops while other processes run. What several threads or a
device do is timed by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ps_core._simulate.machine import UNSTEADY

_LONGEST_S = 5.0
"""The most seconds for the probes of one row."""
_ALONE = 1.05
"""If the process takes more than this multiple of this thread's time, other threads work too: the wall clock counts."""
SPREAD, BUSY = UNSTEADY
_BUSY_SPREAD, _BUSY_WAITING = 0.15, 0.05
_CPU = torch.device("cpu")


class Probe:
    """A piece of work, and the seconds of each time it ran."""

    def __init__(self, name: str, work: Callable[[], object], device: torch.device = _CPU) -> None:
        self.name = name
        self.work = work
        self.times: list[float] = []
        self.waited_s = 0.0
        """Seconds for which this thread was ready and did not run."""
        self._device = device

    def sample(self) -> None:
        """Time the work once more."""
        self._synchronize()
        wall, whole, mine = time.perf_counter(), time.process_time(), time.thread_time()
        self.work()
        self._synchronize()
        mine, whole, wall = time.thread_time() - mine, time.process_time() - whole, time.perf_counter() - wall
        if self._device.type == "cuda" or whole > _ALONE * mine:
            self.times.append(wall)
        else:
            self.times.append(mine)
            self.waited_s += max(0.0, wall - mine)

    @property
    def seconds(self) -> float:
        """Return the lower quartile of the seconds."""
        return sorted(self.times)[(len(self.times) - 1) // 4]

    @property
    def spread(self) -> float:
        """Return the median's excess over the lower quartile, as a fraction of the quartile."""
        return statistics.median(self.times) / max(self.seconds, 1e-9) - 1

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


Row = Sequence[Probe]
"""Probes that are taken one right after the other."""


def collect(rows: Sequence[Row], rounds: int, between: Callable[[], object] | None = None) -> None:
    """Run each probe once unmeasured, then sample all in turn, long rows less often.

    ``between`` is called before each round.
    """
    for row in rows:
        for probe in row:
            probe.work()
    for _ in range(rounds):
        if between is not None:
            between()
        for row in rows:
            if sum(sum(probe.times) for probe in row) < _LONGEST_S:
                for probe in row:
                    probe.sample()


def steadiness(rows: Sequence[Row]) -> list[str]:
    """Describe how far samples differed, and whether other processes kept the machine busy."""
    probes = [probe for row in rows for probe in row]
    worst = max(probes, key=lambda probe: probe.spread)
    usual = statistics.median(probe.spread for probe in probes)
    timed = sum(sum(probe.times) for probe in probes)
    waited = sum(probe.waited_s for probe in probes)
    waiting = waited / max(timed + waited, 1e-9)
    said = [
        f"{SPREAD}medians lie {usual:.0%} above lower quartiles, at most {worst.spread:.0%} ({worst.name}); "
        f"{waiting:.0%} of the time was spent waiting for a processor"
    ]
    if usual > _BUSY_SPREAD or waiting > _BUSY_WAITING:
        said.append(f"{BUSY}these figures are of a part of it; calibrate again when nothing else runs")
    return said

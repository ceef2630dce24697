"""Timing small pieces of work so that whatever else goes on disturbs little, and shows.

[Note: how it is timed]
All take turns, so that a slow spell meets each of them, and of each the lower quartile counts. What one thread does by
itself is timed by the processor's clock, which stands still while others are served; what several threads or a device
do, by the wall's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ps_core._simulate.machine import UNSTEADY

_LONGEST_S = 5.0
"""For the probes of one row."""
_ALONE = 1.05
"""The process's time over this thread's, where the others do nothing that matters."""
SPREAD, BUSY = UNSTEADY
_BUSY_SPREAD, _BUSY_WAITING = 0.15, 0.05
_CPU = torch.device("cpu")


class Probe:
    """A piece of work, and how long it took each time."""

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
        """The lower quartile."""
        return sorted(self.times)[(len(self.times) - 1) // 4]

    @property
    def spread(self) -> float:
        """The median's excess over the lower quartile, as a part of the quartile."""
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
    """Describe how far samples lay apart, and whether other processes kept the machine busy."""
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

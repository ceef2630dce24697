"""Time work on a device: how large everything is, medians of alternated rounds, and rows of a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MIB = 1 << 20
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large everything is, and where."""

    device: str = "cuda"
    parameters: int = 1 << 28
    """28 bytes each: far more than any cache."""
    copied: int = 1 << 30
    """Elements."""
    tensor: int = 250_000
    """Elements of each of a thousand."""
    link_bytes: tuple[int, ...] = (1024 * MIB, 256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB)
    rounds: int = 15
    warm_ups: int = 3

    @property
    def ours(self) -> str | None:
        """The backend that is measured."""
        return "cuda" if self.device == "cuda" else None


DRY = Scale(device="cpu", parameters=4096, copied=4096, tensor=16, link_bytes=(4096, 1024), rounds=1, warm_ups=0)


class Taken(float):
    """The median of some times, and these, round by round."""

    times: list[float]

    @classmethod
    def of(cls, times: list[float]) -> Taken:
        made = cls(statistics.median(times))
        made.times = times
        return made


def seconds(scale: Scale, work: Callable[[], object]) -> Taken:
    """The median time on the device."""
    return alternated(scale, work)[0]


def alternated(scale: Scale, *works: Callable[[], object]) -> list[Taken]:
    """Each one's median time on the device; they take turns, so that a change of clocks is everyone's.

    The device idles a while before each, so that the host is ahead and is not timed.
    """
    times: list[list[float]] = [[] for _ in works]
    for index in range(-scale.warm_ups, scale.rounds):
        for work, taken in zip(works, times, strict=True):
            elapsed = once(scale, work)
            if index >= 0:
                taken.append(elapsed)
    return [Taken.of(taken) for taken in times]


def once(scale: Scale, work: Callable[[], object]) -> float:
    if scale.device == "cpu":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def host_seconds(scale: Scale, work: Callable[[], object]) -> Taken:
    """The median time until the host can go on."""
    times = []
    for _ in range(scale.rounds):
        if scale.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    if scale.device == "cuda":
        torch.cuda.synchronize()
    return Taken.of(times)


def row(name: str, elapsed: Taken, moved_bytes: float, yardstick: float | None = None) -> Row:
    """One line of the table: ``yardstick`` is the rate, in bytes a second, to which the row's is compared."""
    rate = moved_bytes / elapsed
    return {
        "name": name,
        "ms": elapsed * 1e3,
        "ms_range": [min(elapsed.times) * 1e3, max(elapsed.times) * 1e3],
        "GB/s": rate / 1e9,
        "ratio": None if yardstick is None else rate / yardstick,
    }


def in_turns(names: Sequence[str], times: list[Taken], moved_bytes: float) -> list[Row]:
    """Rows of what took turns, beside the first of them: medians, and the range of the rounds' own ratios."""
    rows = []
    for name, taken in zip(names, times, strict=True):
        ratios = [first / mine for first, mine in zip(times[0].times, taken.times, strict=True)]
        made = row(name, taken, moved_bytes)
        rows.append(made | {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]})
    return rows


def drawn(scale: Scale, numel: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(numel, device=scale.device).to(kind)

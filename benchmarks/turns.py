"""Time contenders in turns, so that what disturbs the machine disturbs them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def take_turns(
    steps: dict[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    first: int = 0,
) -> dict[str, list[float]]:
    """Return each contender's seconds in each round; who begins, and who comes before whom, changes each round.

    ``first``: the number of rounds before, with other processes. A step finds the heap as the step before left it:
    where the allocator gave much back, pages are taken anew.
    """
    for step in steps.values():
        for _ in range(warm_up):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(first, first + rounds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in reversed(order) if turn % 2 else order:
            start = clock()
            steps[name]()
            taken[name].append(clock() - start)
    return taken


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio of each round; both lists have the same rounds."""
    return [one / other for one, other in zip(over, under, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Format the median, the quartiles, and the least and the most."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f}, all {min(values):.3f} to {max(values):.3f})"

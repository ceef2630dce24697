"""Order things so that each comes behind all that it waits for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush


def order_by_waits(waits: Sequence[Collection[int]]) -> list[int] | None:
    """Return the numbers of things, each behind those it waits for, else ascending; None if some wait in a circle.

    ``waits`` has, for each thing, the numbers of those that it waits for, each once.
    """
    followers = [list[int]() for _ in waits]
    for number, before in enumerate(waits):
        for other in before:
            followers[other].append(number)
    left = list(map(len, waits))
    ready = [number for number, count in enumerate(left) if not count]  # sorted, and so a heap
    order = []
    while ready:
        number = heappop(ready)
        order.append(number)
        for follower in followers[number]:
            left[follower] -= 1
            if not left[follower]:
                heappush(ready, follower)
    return order if len(order) == len(waits) else None

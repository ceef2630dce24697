"""Compute when the worker's thread is done with each piece of work, while copies use host memory too.

Work runs at the rate that known copies leave. A copy that is launched later begins later. So nothing is computed beyond
the requested time.
"""

from __future__ import annotations

import math

_LEAST = 0.25
"""The least fraction of its own bandwidth that work gets."""


class HostWorker:
    """Pieces of work in order, and the copies beside them."""

    def __init__(self, spare: float = 0.0) -> None:
        """Begin; ``spare``: the memory bandwidth that the worker cannot use, as a fraction of the worker's."""
        self._spare = spare
        self.ends: list[float] = []
        """Ends of the pieces that are over."""
        self.busy_s = 0.0
        self._ready: list[float] = []
        self._seconds: list[float] = []
        self._copies: tuple[list[tuple[float, float, float]], ...] = ([], [])
        self._at = [0, 0]
        """The first copy of each direction that is not over."""
        self._now = 0.0
        self._left: float | None = None
        """Seconds left of the piece that has begun, if no copies ran beside it; None: none has begun."""

    def launch(self, ready: float, seconds: float) -> int:
        """Add a piece of work that may begin at a time; return its number."""
        self._ready.append(ready)
        self._seconds.append(seconds)
        return len(self._ready) - 1

    def copies(self, direction: int, begin: float, end: float, share: float) -> None:
        """Add a copy, which uses this fraction of the worker's bandwidth of host memory."""
        self._copies[direction].append((begin, end, share))

    def done(self, number: int, now: float) -> bool:
        """Return True if a piece of work is over at a time; nothing may be added later that begins before."""
        self._advance(number, now)
        return number < len(self.ends) and self.ends[number] <= now

    def end(self, number: int) -> float:
        """Return when a piece of work is over, if nothing else is launched before."""
        self._advance(number, math.inf)
        return self.ends[number]

    def span(self, number: int) -> tuple[float, float]:
        """Return when a piece of work begins and is over, if nothing else is launched before."""
        end = self.end(number)
        return max(self._ready[number], self.ends[number - 1] if number else 0.0), end

    def expected_end(self, number: int) -> float:
        """Return when a piece of work is over; if not computed yet, as if no copies ran beside it."""
        if number < len(self.ends):
            return self.ends[number]
        first, end = len(self.ends), self._now
        for place in range(first, number + 1):
            left = self._seconds[place] if place > first or self._left is None else self._left
            end = max(end, self._ready[place]) + left
        return end

    def finish(self) -> float:
        """Return when all work is over."""
        return self.end(len(self._ready) - 1) if self._ready else 0.0

    def _advance(self, number: int, until: float) -> None:
        while len(self.ends) <= number and self._now < until:
            place = len(self.ends)
            if self._left is None:
                if self._ready[place] > until:
                    return
                self._now, self._left = max(self._now, self._ready[place]), self._seconds[place]
            share, change = self._beside()
            speed = max(1.0 - max(0.0, share - self._spare), _LEAST)
            over = self._now + self._left / speed
            then = min(over, change, until)
            self.busy_s += then - self._now
            if over <= then:
                self.ends.append(over)
                self._left = None
            else:
                self._left -= (then - self._now) * speed
            self._now = then

    def _beside(self) -> tuple[float, float]:
        """Return the bandwidth that copies use now, as a fraction of the worker's, and the time of its next change."""
        share, change = 0.0, math.inf
        for direction, copies in enumerate(self._copies):
            at = self._at[direction]
            while at < len(copies) and copies[at][1] <= self._now:
                at += 1
            self._at[direction] = at
            if at < len(copies):
                begin, end, part = copies[at]
                if begin <= self._now:
                    share += part
                    change = min(change, end)
                else:
                    change = min(change, begin)
        return share, change

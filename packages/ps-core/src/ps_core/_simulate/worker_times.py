"""When the worker's thread is done with each piece of work, beside copies that use the host's memory too.

Work goes on at the rate that copies leave, as far as these are known: a copy that is launched later begins later. So
nothing is worked out beyond the time that somebody asks about.
"""

from __future__ import annotations

import math

_LEAST = 0.25
"""The part of its own bandwidth that work has in any case."""


class HostWorker:
    """Pieces of work in order, and the copies beside them."""

    def __init__(self, spare: float = 0.0) -> None:
        """``spare``: what the memory gives besides what the worker can take, as a part of that."""
        self._spare = spare
        self.ends: list[float] = []
        """Of the pieces that are over."""
        self.busy_s = 0.0
        self._ready: list[float] = []
        self._seconds: list[float] = []
        self._copies: tuple[list[tuple[float, float, float]], ...] = ([], [])
        self._at = [0, 0]
        """By direction: the first copy that is not over."""
        self._now = 0.0
        self._left: float | None = None
        """Of the piece that has begun, its seconds if nothing were beside it; None: none has."""

    def launch(self, ready: float, seconds: float) -> int:
        """Add a piece of work that may begin at a time, and return its number."""
        self._ready.append(ready)
        self._seconds.append(seconds)
        return len(self._ready) - 1

    def copies(self, direction: int, begin: float, end: float, share: float) -> None:
        """Add a copy, which takes as much of the host's memory as this part of the worker's bandwidth."""
        self._copies[direction].append((begin, end, share))

    def done(self, number: int, now: float) -> bool:
        """Whether a piece of work is over at a time; nothing may be added later that begins before."""
        self._advance(number, now)
        return number < len(self.ends) and self.ends[number] <= now

    def end(self, number: int) -> float:
        """When a piece of work is over, if nothing else is launched before."""
        self._advance(number, math.inf)
        return self.ends[number]

    def span(self, number: int) -> tuple[float, float]:
        """When a piece of work begins and is over, if nothing else is launched before."""
        end = self.end(number)
        return max(self._ready[number], self.ends[number - 1] if number else 0.0), end

    def expected_end(self, number: int) -> float:
        """When a piece of work is over; where that was not asked for yet, if no copies come beside it."""
        if number < len(self.ends):
            return self.ends[number]
        first, end = len(self.ends), self._now
        for place in range(first, number + 1):
            left = self._seconds[place] if place > first or self._left is None else self._left
            end = max(end, self._ready[place]) + left
        return end

    def finish(self) -> float:
        """When all work is over."""
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
        """Return the bandwidth that copies take now, as a part of the worker's, and the time at which that changes."""
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

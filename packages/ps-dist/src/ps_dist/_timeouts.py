"""Limits of waits, and a clock that stops while the process is stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Every limit of one connection, derived from the ``timeout_s`` that the user gave."""

    timeout_s: float
    """A collective that takes longer ends with an error."""

    @property
    def look_s(self) -> float:
        """Return the seconds between two looks of the watchdog."""
        return min(1.0, max(0.05, self.timeout_s / 60))

    @property
    def long_s(self) -> float:
        """After so long in a collective, the other ranks are asked; nothing ends for that alone."""
        return 4 * self.look_s

    @property
    def failure_grace_s(self) -> float:
        """Return the seconds that the others have to explain a failure of this rank's transport that names no rank."""
        return 5 * self.look_s

    @property
    def answer_s(self) -> float:
        """Return after how many seconds without an answer a rank is called silent, when the timeout ends the wait."""
        return 10 * self.look_s

    @property
    def exit_s(self) -> float:
        """Return the most seconds that a rank which leaves after an error stays, so that the others can read why."""
        return 10 * self.look_s

    @property
    def hopeless_s(self) -> float:
        """Return the seconds after which the watchdog itself must have failed."""
        return 1.5 * self.timeout_s + 5


class AwakeClock:
    """Seconds in which this process ran: a stop (SIGSTOP, a paused machine, a held GIL) counts as one step.

    A rank that was stopped itself must not blame the others for the time that it was away.
    """

    def __init__(self, most_step_s: float = 2.0, time: Callable[[], float] = monotonic) -> None:
        """``most_step_s``: more than lies between two readings while a collective is under way."""
        self._most_step_s, self._time = most_step_s, time
        self._lock = Lock()
        self._now_s, self._read_at_s = 0.0, time()

    def __call__(self) -> float:
        """Read the clock; it must be read at least every ``most_step_s``, or time is not counted."""
        with self._lock:
            time_s = self._time()
            self._now_s += min(time_s - self._read_at_s, self._most_step_s)
            self._read_at_s = time_s
            return self._now_s

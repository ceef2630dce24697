"""Collectives that a device carries out on its stream: launched, and not known to be complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from ps_dist._collective_history import HistoryEntry


class Mark(Protocol):
    """A place in a device's stream."""

    def query(self) -> bool:
        """Return True if everything launched before it is complete."""


@dataclass(slots=True)
class Launched:
    """A collective between two marks of its stream."""

    entry: HistoryEntry
    begins: Mark
    ends: Mark
    begun_at_s: float | None = None
    """Time since when it waits for other ranks; None: the device still does earlier work of this rank."""


class LaunchedCollectives:
    """One process's launched collectives, in order; several threads look at them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, Lock()
        self._open: deque[Launched] = deque()

    def add(self, entry: HistoryEntry, begins: Mark, ends: Mark) -> None:
        """Note a collective between two marks of its stream."""
        self.oldest()  # drops what is complete
        with self._lock:
            self._open.append(Launched(entry, begins, ends))

    def oldest(self) -> Launched | None:
        """Return the first collective that is not complete; None: all are."""
        with self._lock:
            while self._open and _is_over(self._open[0].ends):
                self._open.popleft()
            if not self._open:
                return None
            first = self._open[0]
            if first.begun_at_s is None and _is_over(first.begins):
                first.begun_at_s = self._clock()
            return first


def _is_over(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device failed, which raises in the training thread: no rank is to blame
        return True

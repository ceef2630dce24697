"""What a process has done so far, so that ranks that part ways can be told where they did.

[Note: fingerprints]
Every process enters the same things in the same order: its collectives, and whatever else it is told to note. An
entry's *print* is a hash of all entries up to it. Each message between processes is tagged with the print of its entry,
so messages of processes that have parted never meet: these wait, and are told why (see `Watchdog`), instead of reading
what was meant for something else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

_KEPT = 256
"""Entries that are remembered by name; a difference before them is still noticed."""


class Entry(NamedTuple):
    """One thing done."""

    number: int
    what: str
    print: str

    @property
    def tag(self) -> int:
        """For messages: what a 32-bit tag holds of the print."""
        return int(self.print, 16) & 0x7FFFFFFF


class Journal:
    """One process's entries."""

    def __init__(self) -> None:
        self._last = Entry(0, "the start", "0" * 16)
        self._tail: deque[Entry] = deque([self._last], maxlen=_KEPT)
        self._lock = Lock()  # the watch reads from its own thread

    def add(self, what: str) -> Entry:
        """Enter one thing."""
        digest = blake2b(f"{self._last.print} {what}".encode(), digest_size=8).hexdigest()
        with self._lock:
            self._last = Entry(self._last.number + 1, what, digest)
            self._tail.append(self._last)
        return self._last

    @property
    def last(self) -> Entry:
        """The latest entry."""
        return self._last

    def tail(self) -> list[Entry]:
        """The latest entries, oldest first."""
        with self._lock:
            return list(self._tail)


def first_difference(tails: Mapping[int, Sequence[Entry]]) -> str | None:
    """Where processes parted, in words; None if each is only further on than another."""
    mine = min(tails)
    for other, theirs in tails.items():
        ours = {entry.number: entry for entry in tails[mine]}
        common = [entry for entry in theirs if entry.number in ours]
        parted = [entry for entry in common if entry.print != ours[entry.number].print]
        if not parted:
            continue
        first = parted[0]
        if first is common[0] and first.number > 1:
            return f"rank {mine} and rank {other} did different things before number {first.number} ({first.what})"
        found = ours[first.number].what
        return f"the first difference is number {first.number}: rank {mine} did {found}, rank {other} did {first.what}"
    return None

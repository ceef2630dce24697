"""Record what a process has done, so that ranks that do different things can be told where they began to.

[Note: fingerprints]
Every process adds the same entries in the same order: one for each of its collectives. An entry's *fingerprint* is a
hash of all entries up to it. Each message between processes is tagged with the fingerprint of its entry. So messages of
processes that do different things never meet. No process reads what was meant for something else. The processes wait,
and are told why (see `Watchdog`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

_KEPT = 256
"""Entries that are remembered by name; a difference before them is still noticed."""


class HistoryEntry(NamedTuple):
    """One collective."""

    number: int
    what: str
    fingerprint: str

    @property
    def tag(self) -> int:
        """Return the part of the fingerprint that a message's 32-bit tag holds."""
        return int(self.fingerprint, 16) & 0x7FFFFFFF


class CollectiveHistory:
    """One process's entries."""

    def __init__(self) -> None:
        self._tail = deque([HistoryEntry(0, "the start", "0" * 16)], maxlen=_KEPT)
        self._lock = Lock()  # the watchdog reads from its own thread

    def add(self, what: str) -> HistoryEntry:
        """Append an entry."""
        with self._lock:
            last = self._tail[-1]
            digest = blake2b(f"{last.fingerprint} {what}".encode(), digest_size=8).hexdigest()
            self._tail.append(HistoryEntry(last.number + 1, what, digest))
            return self._tail[-1]

    @property
    def last(self) -> HistoryEntry:
        """Return the latest entry."""
        return self._tail[-1]

    def tail(self) -> list[HistoryEntry]:
        """Return the latest entries, oldest first."""
        with self._lock:
            return list(self._tail)


def first_difference(tails: Mapping[int, Sequence[HistoryEntry]]) -> str | None:
    """Say where ranks began to differ; None if some are only further on than others."""
    mine = min(tails)
    ours = {entry.number: entry for entry in tails[mine]}
    for other, theirs in tails.items():
        common = [entry for entry in theirs if entry.number in ours]
        different = [entry for entry in common if entry.fingerprint != ours[entry.number].fingerprint]
        if not different:
            continue
        first = different[0]
        if first is common[0] and first.number > 1:
            return f"rank {mine} and rank {other} did different things before number {first.number} ({first.what})"
        found = ours[first.number].what
        return f"the first difference is number {first.number}: rank {mine} did {found}, rank {other} did {first.what}"
    return None

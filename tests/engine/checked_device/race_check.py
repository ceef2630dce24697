"""Happens-before by vector clocks: whether two accesses to the same bytes can meet in the wrong order.

[Note: clocks]
Each queue has a clock: for every queue, how many of that queue's operations surely come before whatever is launched
next. An operation is *ordered* after another if its clock covers the other's number. Launching takes in the host's
clock, waiting takes in the event's. Two accesses to a byte, at least one of them a write, that are not ordered are
refused although the order in which they happen to run may be harmless: on another day it is the other one.

For every byte the last write is kept, and those reads since that no later read covers: whoever is ordered after these
is ordered after everything before. So what is kept does not grow with time, only with the number of different ranges.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import TypeAlias

from ps_core._errors import PlanMismatch
from ps_core._plan import Queue

Range: TypeAlias = tuple[int, int]
"""The address of the first byte, and one past the last."""
Clock: TypeAlias = tuple[int, ...]
"""By queue; see [Note: clocks]."""


class Thread(IntEnum):
    """A thread that does work in order, as a queue does; the host thread is ``Queue.CPU``."""

    WORKER = len(Queue)


WORKER = Thread.WORKER
QueueOrWorker: TypeAlias = Queue | Thread
QUEUES_AND_WORKER: tuple[QueueOrWorker, ...] = (*Queue, WORKER)
START: Clock = (0,) * len(QUEUES_AND_WORKER)

_start, _end = attrgetter("start"), attrgetter("end")


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of a range."""

    queue: QueueOrWorker
    number: int
    """Which of its queue's operations, from 1."""
    what: str
    start: int
    end: int
    writes: bool

    def before(self, clock: Sequence[int]) -> bool:
        """Whether what has this clock surely comes later."""
        return self.number <= clock[self.queue]

    def __str__(self) -> str:
        return f"{self.what!r} (operation {self.number} on {self.queue.name})"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range whose bytes have the same history."""

    start: int
    end: int
    writer: Access | None
    readers: tuple[Access, ...]

    def cut(self, start: int, end: int) -> _Piece:
        return _Piece(start, end, self.writer, self.readers)


class History:
    """The accesses that a later one has to come after, for every byte."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []  # Invariant: disjoint, ascending, none empty.

    def __len__(self) -> int:
        return sum((piece.writer is not None) + len(piece.readers) for piece in self._pieces)

    def _touched(self, start: int, end: int) -> slice:
        first = bisect_right(self._pieces, start, key=_end)
        return slice(first, max(first, bisect_left(self._pieces, end, key=_start)))

    def conflict(self, access: Access, clock: Sequence[int]) -> Access | None:
        """An earlier access that this one conflicts with and is not ordered after."""
        for piece in self._pieces[self._touched(access.start, access.end)]:
            others = (piece.writer, *piece.readers) if access.writes else (piece.writer,)
            for other in others:
                if other is not None and not other.before(clock):
                    return other
        return None

    def enter(self, access: Access, clock: Sequence[int]) -> None:
        """Take note of an access that conflicts with nothing."""
        if access.writes:
            self._replace(access.start, access.end, [_Piece(access.start, access.end, access, ())])
            return
        found = self._pieces[self._touched(access.start, access.end)]
        self._replace(access.start, access.end, list(_joined(_read(found, access, clock))))

    def forget(self, start: int, end: int) -> None:
        """These bytes were given back; whoever gets them next starts afresh."""
        self._replace(start, end, [])

    def _replace(self, start: int, end: int, pieces: list[_Piece]) -> None:
        where = self._touched(start, end)
        old = self._pieces[where]
        if old and old[0].start < start:
            pieces.insert(0, old[0].cut(old[0].start, start))
        if old and old[-1].end > end:
            pieces.append(old[-1].cut(end, old[-1].end))
        self._pieces[where] = pieces


def _read(pieces: Iterable[_Piece], access: Access, clock: Sequence[int]) -> Iterator[_Piece]:
    """The range of a read, with the history of its pieces, gaps filled."""
    at = access.start
    for piece in pieces:
        start, end = max(piece.start, access.start), min(piece.end, access.end)
        if at < start:
            yield _Piece(at, start, None, (access,))
        still = tuple(reader for reader in piece.readers if not reader.before(clock))
        yield _Piece(start, end, piece.writer, (*still, access))
        at = end
    if at < access.end:
        yield _Piece(at, access.end, None, (access,))


def _joined(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """Neighbours with the same history, as one."""
    last: _Piece | None = None
    for piece in pieces:
        if last is None:
            last = piece
        elif last.writer is piece.writer and last.readers == piece.readers:
            last = last.cut(last.start, piece.end)
        else:
            yield last
            last = piece
    if last is not None:
        yield last


class RaceDetector:
    """The clocks of all queues, and the history of all bytes. See [Note: clocks]."""

    def __init__(self, place: Callable[[int, int], str], history: History) -> None:
        self._place, self.history = place, history
        self._clocks = [list(START) for _ in QUEUES_AND_WORKER]

    def launch(self, queue: QueueOrWorker, what: str, reads: Iterable[Range], writes: Iterable[Range]) -> None:
        """An operation on a queue; raises `PlanMismatch` if it may meet an earlier one."""
        clock = self._clocks[queue]
        _take_in(clock, self._clocks[Queue.CPU])
        clock[queue] += 1
        accesses = [Access(queue, clock[queue], what, *each, writes=False) for each in reads]
        accesses += [Access(queue, clock[queue], what, *each, writes=True) for each in writes]
        for access in accesses:
            other = self.history.conflict(access, clock)
            if other is not None:
                raise PlanMismatch(self._message(access, other, clock))
        for access in accesses:
            self.history.enter(access, clock)

    def record(self, queue: QueueOrWorker) -> Clock:
        """The clock of an event; the host's part is taken in by whoever launches behind it."""
        return tuple(self._clocks[queue])

    def wait(self, queue: QueueOrWorker, event: Clock) -> None:
        """What a queue does from here on comes after an event."""
        _take_in(self._clocks[queue], event)

    def synchronize(self) -> None:
        """The host waits for everything."""
        for clock in self._clocks:
            _take_in(self._clocks[Queue.CPU], clock)

    def _message(self, access: Access, other: Access, clock: Sequence[int]) -> str:
        mine, theirs = ("writes" if each.writes else "reads" for each in (access, other))
        queue, its = access.queue.name, other.queue.name
        met = self._place(max(access.start, other.start), min(access.end, other.end))
        return (
            f"unordered: {access} {mine} {self._place(access.start, access.end)} while {other}, launched earlier, "
            f"perhaps still {theirs} {self._place(other.start, other.end)}; both touch {met}\n"
            f"  expected: {queue} has waited for an event recorded on {its} behind its operation {other.number}; "
            f"found: it has waited for {its} up to operation {clock[other.queue]}\n"
            f"  try: event = device.record(Queue.{its}) right behind {other.what!r}, and "
            f"device.wait(Queue.{queue}, event) before {access.what!r}"
        )


def _take_in(clock: list[int], other: Sequence[int]) -> None:
    """Whatever comes before the other comes before this one too."""
    clock[:] = map(max, clock, other)

"""Manage a range of one tier's addresses: where slots come from, and which extents may be evicted for room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ps_core._extents import Extent

NEVER_FREED = -1
EMPTY = float("-inf")
"""The worth of free space: nothing need be evicted to use it."""
STALE = -1e308
"""The worth of a stale copy: less than any current one, but more than free space."""


@dataclass(slots=True, eq=False)
class Piece:
    """A run of addresses with one owner, or with none."""

    offset: int
    end: int
    owner: Extent | None = None
    since: int = NEVER_FREED
    """The last instruction known to touch the piece; once it is free, the one that released it."""
    idle: bool = False
    """True if the owner is not needed any more, but its slot has not been released."""
    key: tuple[float, int, int] | None = None
    """The worth of keeping the piece, the last instruction on it, its first address. None: it must stay."""


@dataclass(frozen=True, slots=True)
class Window:
    """Adjacent pieces that together are large enough, by address."""

    pieces: tuple[Piece, ...]

    @property
    def victims(self) -> tuple[Extent, ...]:
        """Return the owners of the window's pieces."""
        return tuple(piece.owner for piece in self.pieces if piece.owner is not None)


class Arena:
    """Manage the addresses ``offset .. end`` of a tier, cut into pieces.

    Free neighbours are not merged: each remembers what released it. So a new slot can be put where bytes have been idle
    longest, and its fill can begin earliest. Pieces are kept in order of eviction, so that only the cheapest have to be
    examined.
    """

    def __init__(self, offset: int, end: int) -> None:
        self.bytes = max(0, end - offset)
        self._pieces: dict[int, Piece] = {}
        """Pieces by first address; each ends where the next begins."""
        self._order: list[tuple[float, int, int]] = []
        """The keys of all pieces that may be evicted."""
        if end > offset:
            self._pieces[offset] = piece = Piece(offset, end)
            self._place(piece, EMPTY)

    def find(self, size: int, stays: Callable[[Extent], bool]) -> Window | None:
        """Return the window of least worth that holds ``size`` bytes; of equals, the one idle longest.

        A window is worth as much as its dearest owner, and fewer pieces are better. ``stays`` says who may not leave
        now.
        """
        # Cheapest first, until a window is there. One as cheap may have been idle for longer than this one's latest
        # piece; what comes after that cannot be better.
        runs, limit = _Runs(), None
        for worth, since, offset in self._order:
            if limit is not None and (worth, since) > limit:
                break
            piece = self._pieces[offset]
            if piece.owner is None or piece.idle or not stays(piece.owner):
                begin, end = runs.add(offset, piece.end)
                if limit is None and end - begin >= size:
                    limit = worth, max(part.since for part in self._between(begin, end))
        rows = (row for begin, end in runs.ends.items() for row in self._windows(begin, end, size))
        best = min(rows, default=None, key=lambda row: row[0])
        return None if best is None else Window(best[1])

    def lowest(self, size: int, stays: Callable[[Extent], bool]) -> Window | None:
        """Return the window of the lowest addresses that holds ``size`` bytes, whatever its worth."""
        run: list[Piece] = []
        for _, piece in sorted(self._pieces.items()):
            if piece.key is None or (piece.owner is not None and not piece.idle and stays(piece.owner)):
                run.clear()
                continue
            run.append(piece)
            if piece.end - run[0].offset >= size:
                return Window(tuple(run))
        return None

    def _windows(self, begin: int, end: int, size: int) -> Iterator[tuple[tuple[int, int, int], tuple[Piece, ...]]]:
        """Yield every window of a run of pieces, and its rank among windows of equal worth."""
        if end - begin < size:
            return
        pieces, stop = list(self._between(begin, end)), 0
        for start, first in enumerate(pieces):
            if first.offset + size > end:
                return
            while pieces[stop].end < first.offset + size:
                stop += 1
            window = tuple(pieces[start : stop + 1])
            yield (max(part.since for part in window), len(window), first.offset), window

    def _between(self, begin: int, end: int) -> Iterator[Piece]:
        while begin < end:
            piece = self._pieces[begin]
            yield piece
            begin = piece.end

    def allocate(self, window: Window, size: int, owner: Extent) -> tuple[Piece, tuple[int, ...]]:
        """Give a free window to ``owner``, which stays until it is rated; return the piece and what released its
        bytes.
        """
        first, last = window.pieces[0], window.pieces[-1]
        for part in window.pieces:
            self._place(part, None)
            del self._pieces[part.offset]
        piece = self._pieces[first.offset] = Piece(first.offset, first.offset + size, owner)
        if last.end > piece.end:
            rest = self._pieces[piece.end] = Piece(piece.end, last.end, None, last.since)
            self._place(rest, EMPTY)
        return piece, tuple({part.since for part in window.pieces if part.since != NEVER_FREED})

    def rate(self, piece: Piece, worth: float | None, since: int) -> None:
        """Set the worth of keeping a piece's owner, and the last instruction on it; worth None: it must stay."""
        piece.since = since
        self._place(piece, worth)

    def abandon(self, piece: Piece, since: int) -> None:
        """Note that a piece's owner is not needed any more, and the last instruction on it."""
        piece.since, piece.idle = since, True
        self._place(piece, EMPTY)

    def free(self, piece: Piece, freed: int) -> None:
        """Take a piece back from its owner."""
        piece.owner, piece.since, piece.idle = None, freed, False
        self._place(piece, EMPTY)

    def owned(self) -> list[Piece]:
        """Return the pieces that have an owner, by address."""
        return [piece for _, piece in sorted(self._pieces.items()) if piece.owner is not None]

    def _place(self, piece: Piece, worth: float | None) -> None:
        """Move a piece to its place in the order; None: remove it from the order."""
        key = None if worth is None else (worth, piece.since, piece.offset)
        if key == piece.key:
            return
        if piece.key is not None:
            del self._order[bisect_left(self._order, piece.key)]
        if key is not None:
            insort(self._order, key)
        piece.key = key


class _Runs:
    """Ranges of addresses that grow together as pieces are added."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        """Ends of ranges by their beginnings."""
        self._begins: dict[int, int] = {}

    def add(self, begin: int, end: int) -> tuple[int, int]:
        """Add a range; return it joined with its neighbours."""
        begin, end = self._begins.pop(begin, begin), self.ends.pop(end, end)
        self.ends[begin], self._begins[end] = end, begin
        return begin, end

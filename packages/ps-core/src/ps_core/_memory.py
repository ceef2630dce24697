"""A stretch of one tier's addresses that slots come from, and what may be thrown out to make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ps_core._program import Extent

NEVER_FREED = -1
FREE = float("-inf")
"""What a free piece is worth: nothing need be given up to have it."""


@dataclass(slots=True, eq=False)
class Piece:
    """A run of addresses with one owner, or with none."""

    offset: int
    end: int
    owner: Extent | None = None
    freed: int = NEVER_FREED
    """While free: the instruction that released it; while idle: the last known to touch it."""
    idle: bool = False
    """Its owner is not needed any more, but its slot has not been released."""


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring pieces that together are large enough."""

    start: int
    stop: int
    victims: tuple[Extent, ...]


class Arena:
    """Addresses ``offset .. end`` of a tier, cut into pieces.

    Free neighbours are not merged: each remembers what released it, so that a new slot can be put where bytes have
    been idle longest, and its fill can begin earliest.
    """

    def __init__(self, offset: int, end: int) -> None:
        self._pieces = [Piece(offset, end)] if end > offset else []
        self.bytes = max(0, end - offset)

    def find(
        self, size: int, worth: Callable[[Extent], float | None], idle_since: Callable[[Extent], int]
    ) -> Window | None:
        """The window of least worth that holds ``size`` bytes, of these the one idle longest.

        A window is worth its dearest owner, and fewer pieces are better; ``worth`` is None for owners that must stay.
        Only where no window is free to take are owners asked about.
        """
        free = [(FREE, piece.freed) if piece.owner is None or piece.idle else None for piece in self._pieces]
        found = self._cheapest(size, free)
        if found is None:
            marks: list[tuple[float, int] | None] = []
            for piece, mark in zip(self._pieces, free, strict=True):
                if mark is None and piece.owner is not None:
                    value = worth(piece.owner)
                    mark = None if value is None else (value, idle_since(piece.owner))
                marks.append(mark)
            found = self._cheapest(size, marks)
        if found is None:
            return None
        owners = (piece.owner for piece in self._pieces[found[0] : found[1]])
        return Window(*found, tuple(owner for owner in owners if owner is not None))

    def _cheapest(self, size: int, marks: list[tuple[float, int] | None]) -> tuple[int, int] | None:
        """Where the least window starts and stops; ``marks`` are None for pieces that cannot be had."""
        pieces = self._pieces
        best: tuple[float, int, int] | None = None
        found = None
        for start, first in enumerate(marks):
            if first is None or (best is not None and first > best[:2]):
                continue
            goal = pieces[start].offset + size
            dearest, latest = first
            stop = start
            while pieces[stop].end < goal:
                stop += 1
                mark = marks[stop] if stop < len(marks) else None
                if mark is None:
                    break
                dearest, latest = max(dearest, mark[0]), max(latest, mark[1])
            else:
                score = (dearest, latest, stop - start)
                if best is None or score < best:
                    best, found = score, (start, stop + 1)
        return found

    def take(self, window: Window, size: int, owner: Extent) -> tuple[Piece, tuple[int, ...]]:
        """Give a window (all of it free by now) to ``owner``; also what released its bytes."""
        old = self._pieces[window.start : window.stop]
        piece = Piece(old[0].offset, old[0].offset + size, owner)
        fresh = [piece]
        if old[-1].end > piece.end:
            fresh.append(Piece(max(piece.end, old[-1].offset), old[-1].end, None, old[-1].freed))
        self._pieces[window.start : window.stop] = fresh
        return piece, tuple({part.freed for part in old if part.freed != NEVER_FREED})

    def free(self, piece: Piece, freed: int) -> None:
        """Take a piece back from its owner."""
        piece.owner = None
        piece.freed = freed
        piece.idle = False

    def owned(self) -> list[Piece]:
        """Pieces that have an owner, by address."""
        return [piece for piece in self._pieces if piece.owner is not None]

"""Arenas: windows, what they are worth, and what their bytes have to wait for."""

from __future__ import annotations

import random
from itertools import count

import pytest

from ps_core._extents import Extent, Kind
from ps_core._planner.arena import EMPTY, STALE, Arena

A, B, C, D = (Extent(Kind.P16, index) for index in range(4))


def fill(arena, *rows):
    """Take a slot for each (owner, size), in order; their pieces."""
    pieces = {}
    for owner, size in rows:
        window = arena.find(size, nobody_asked)
        pieces[owner], _ = arena.allocate(window, size, owner)
    return pieces


def nobody_asked(_):
    raise AssertionError("nobody should be asked")


def stays_not(_):
    return False


def test_a_fresh_arena_is_taken_from_its_start():
    arena = Arena(128, 1024)
    window = arena.find(256, nobody_asked)
    piece, freed = arena.allocate(window, 256, A)
    assert (piece.offset, piece.end, freed) == (128, 384, ())
    assert [part.owner for part in arena.owned()] == [A]


def test_an_empty_arena_has_nothing():
    assert Arena(128, 128).find(1, nobody_asked) is None
    assert Arena(256, 128).bytes == 0


def test_of_free_windows_the_one_idle_longest_is_taken():
    arena = Arena(0, 384)
    pieces = fill(arena, (A, 128), (B, 128), (C, 128))
    arena.free(pieces[A], 9)
    arena.free(pieces[C], 4)
    window = arena.find(128, nobody_asked)
    piece, freed = arena.allocate(window, 128, D)
    assert (piece.offset, freed) == (256, (4,))


def test_a_window_over_several_pieces_waits_for_all_of_them_and_leaves_a_rest():
    arena = Arena(0, 512)
    pieces = fill(arena, (A, 128), (B, 256), (C, 128))
    arena.free(pieces[A], 3)
    arena.free(pieces[B], 5)
    piece, freed = arena.allocate(arena.find(256, nobody_asked), 256, D)
    assert (piece.offset, sorted(freed)) == (128, [5])  # idle since 5 either way: one piece, not two
    arena.free(pieces[C], 7)
    arena.free(piece, 8)
    piece, freed = arena.allocate(arena.find(450, nobody_asked), 450, A)
    assert (piece.offset, piece.end, sorted(freed)) == (0, 450, [3, 7, 8])
    rest, freed = arena.allocate(arena.find(62, nobody_asked), 62, B)
    assert (rest.offset, rest.end, freed) == (450, 512, (7,))


def rate(arena, pieces, worth, since=None):
    for owner, value in worth.items():
        arena.rate(pieces[owner], value, (since or {}).get(owner, 0))


@pytest.mark.parametrize(("worth", "victim"), [({A: 3, B: 1, C: 2}, B), ({A: 1, B: 1, C: 1}, C)])
def test_the_least_worthy_leaves_and_of_equals_the_longest_idle(worth, victim):
    arena = Arena(0, 384)
    pieces = fill(arena, (A, 128), (B, 128), (C, 128))
    rate(arena, pieces, worth, {A: 5, B: 6, C: 4})
    assert arena.find(128, stays_not).victims == (victim,)


def test_a_window_is_worth_its_dearest_owner_and_cannot_span_what_must_stay():
    arena = Arena(0, 512)
    pieces = fill(arena, (A, 128), (B, 128), (C, 128), (D, 128))
    assert arena.find(128, stays_not) is None, "they stay until somebody says what they are worth"
    rate(arena, pieces, {A: 9.0, B: 1.0, C: 2.0, D: 8.0})
    assert arena.find(256, stays_not).victims == (B, C)
    rate(arena, pieces, {A: 1.0, B: None, C: 2.0, D: 8.0})
    assert arena.find(256, stays_not).victims == (C, D)
    assert arena.find(256, lambda owner: owner == D) is None
    rate(arena, pieces, {D: None})
    assert arena.find(256, stays_not) is None


def test_of_windows_as_dear_the_one_idle_longest_is_found_behind_later_ones():
    arena = Arena(0, 640)
    pieces = fill(arena, (A, 256), (B, 128), (C, 128), (D, 128))
    rate(arena, pieces, {A: 2.0, B: 1.0, C: 2.0, D: 2.0}, {A: 3, B: 9, C: 2, D: 4})
    assert arena.find(256, stays_not).victims == (A,), "B with C would do, but B was touched later"


def test_what_is_idle_is_taken_before_anybody_is_asked():
    arena = Arena(0, 256)
    pieces = fill(arena, (A, 128), (B, 128))
    arena.abandon(pieces[B], 3)
    assert arena.find(128, nobody_asked).victims == (B,)
    arena.free(pieces[B], 2)
    assert not pieces[B].idle


def plain_find(rows, size):
    """The best window by trying all: rows are (begin, end, worth or None, since) by address."""
    found = []
    for start in range(len(rows)):
        for stop in range(start, len(rows)):
            part = rows[start : stop + 1]
            if any(row[2] is None for row in part):
                break
            if part[-1][1] - part[0][0] >= size:
                found.append((max(row[2] for row in part), max(row[3] for row in part), len(part), part[0][0]))
                break
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_trying_all_windows_finds(seed):
    rng = random.Random(seed)
    arena = Arena(0, 4000)
    numbers = count()
    live, worth = {}, {}
    for now in range(400):
        size = rng.randint(1, 600)
        stay = {owner for owner in live if rng.random() < 0.1}
        window = arena.find(size, stay.__contains__)
        rows, place = [], 0
        for owner, piece in sorted(live.items(), key=lambda item: item[1].offset):
            if piece.offset > place:
                rows += gaps(arena, place, piece.offset)
            value = EMPTY if piece.idle else None if owner in stay else worth[owner]
            rows.append((piece.offset, piece.end, value, piece.since))
            place = piece.end
        rows += gaps(arena, place, 4000)
        best = plain_find(rows, size)
        assert (window is None) == (best is None)
        if window is not None:
            assert window.pieces[0].offset == best[3]
            assert len(window.pieces) == best[2]
            for owner in window.victims:
                arena.free(live.pop(owner), now)
            owner = Extent(Kind.P16, next(numbers))
            live[owner], _ = arena.allocate(window, size, owner)
            worth[owner] = rng.choice((None, 1.0, 2.0, 3.0, STALE))
            arena.rate(live[owner], worth[owner], now)
        for owner, piece in live.items():
            chance = rng.random()
            if chance < 0.05:
                arena.abandon(piece, now)
            elif chance < 0.2 and not piece.idle:
                worth[owner] = rng.choice((None, 1.0, 2.0, 3.0))
                arena.rate(piece, worth[owner], now)


def gaps(arena, begin, end):
    """The free pieces of a stretch without owners."""
    return [(piece.offset, piece.end, EMPTY, piece.since) for piece in arena._between(begin, end)]

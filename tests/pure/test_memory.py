"""Arenas: windows, what they are worth, and what their bytes have to wait for."""

from __future__ import annotations

import pytest

from ps_core._memory import Arena
from ps_core._program import Extent, Kind

A, B, C, D = (Extent(Kind.P16, index) for index in range(4))


def fill(arena, *rows):
    """Take a slot for each (owner, size), in order; their pieces."""
    pieces = {}
    for owner, size in rows:
        window = arena.find(size, lambda _: None, lambda _: 0)
        pieces[owner], _ = arena.take(window, size, owner)
    return pieces


def never(_):
    raise AssertionError("nobody should be asked")


def test_a_fresh_arena_is_taken_from_its_start():
    arena = Arena(128, 1024)
    window = arena.find(256, never, never)
    piece, freed = arena.take(window, 256, A)
    assert (piece.offset, piece.end, freed) == (128, 384, ())
    assert [part.owner for part in arena.owned()] == [A]


def test_an_empty_arena_has_nothing():
    assert Arena(128, 128).find(1, never, never) is None
    assert Arena(256, 128).bytes == 0


def test_of_free_windows_the_one_idle_longest_is_taken():
    arena = Arena(0, 384)
    pieces = fill(arena, (A, 128), (B, 128), (C, 128))
    arena.free(pieces[A], 9)
    arena.free(pieces[C], 4)
    window = arena.find(128, never, never)
    piece, freed = arena.take(window, 128, D)
    assert (piece.offset, freed) == (256, (4,))


def test_a_window_over_several_pieces_waits_for_all_of_them_and_leaves_a_rest():
    arena = Arena(0, 512)
    pieces = fill(arena, (A, 128), (B, 256), (C, 128))
    arena.free(pieces[A], 3)
    arena.free(pieces[B], 5)
    piece, freed = arena.take(arena.find(256, never, never), 256, D)
    assert (piece.offset, sorted(freed)) == (128, [5])  # idle since 5 either way: one piece, not two
    arena.free(pieces[C], 7)
    arena.free(piece, 8)
    piece, freed = arena.take(arena.find(450, never, never), 450, A)
    assert (piece.offset, piece.end, sorted(freed)) == (0, 450, [3, 7, 8])
    rest, freed = arena.take(arena.find(62, never, never), 62, B)
    assert (rest.offset, rest.end, freed) == (450, 512, (7,))


@pytest.mark.parametrize(("worth", "victim"), [({A: 3, B: 1, C: 2}, B), ({A: 1, B: 1, C: 1}, C)])
def test_the_least_worthy_leaves_and_of_equals_the_longest_idle(worth, victim):
    arena = Arena(0, 384)
    fill(arena, (A, 128), (B, 128), (C, 128))
    idle = {A: 5, B: 6, C: 4}
    assert arena.find(128, worth.get, idle.get).victims == (victim,)


def test_a_window_is_worth_its_dearest_owner_and_cannot_span_what_must_stay():
    arena = Arena(0, 512)
    fill(arena, (A, 128), (B, 128), (C, 128), (D, 128))
    since = {A: 0, B: 0, C: 0, D: 0}.get
    assert arena.find(256, {A: 9.0, B: 1.0, C: 2.0, D: 8.0}.get, since).victims == (B, C)
    assert arena.find(256, {A: 1.0, B: None, C: 2.0, D: 8.0}.get, since).victims == (C, D)
    assert arena.find(256, {A: 1.0, B: None, C: 2.0, D: None}.get, since) is None


def test_what_is_idle_is_taken_before_anybody_is_asked():
    arena = Arena(0, 256)
    pieces = fill(arena, (A, 128), (B, 128))
    pieces[B].idle = True
    assert arena.find(128, never, never).victims == (B,)
    arena.free(pieces[B], 2)
    assert not pieces[B].idle

"""Suggest the known names that are nearest to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], otherwise: str, most: int = 3, alike: float = 0.65) -> str:
    """Return a question that names the nearest known words; ``otherwise`` if none is near.

    ``alike``: how alike the words' letters must be, from 0 to 1. Hyphens at the beginning do not count.
    """
    bare, words = word.lstrip("-"), {each.lstrip("-"): each for each in known}
    begun = [each for each in words if each.startswith(bare)] if bare else []
    near = [words[each] for each in begun[:most] or get_close_matches(bare, words, n=most, cutoff=alike)]
    return f"did you mean {' or '.join(near)}?" if near else otherwise

"""Suggest the known names that are nearest to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], otherwise: str, most: int = 3) -> str:
    """Return a question that names the nearest known words; ``otherwise`` if none is near."""
    words = list(known)
    begun = [each for each in words if each.startswith(word)] if word.strip("-") else []
    near = begun[:most] or get_close_matches(word, words, n=most, cutoff=0.65)
    return f"did you mean {' or '.join(near)}?" if near else otherwise

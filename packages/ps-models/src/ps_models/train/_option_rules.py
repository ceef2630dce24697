"""Define which values an option may have: how they are read from the command line, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ps_core._errors import InvalidInput
from ps_core._units import meant_as_gib, parse_bytes


@dataclass(frozen=True, kw_only=True)
class OptionRule:
    """The values that an option may have."""

    allowed: str
    """The allowed values in words, for messages."""
    metavar: str
    read: Callable[[str], object]
    """Converts a text of the command line; raises ``ValueError`` if it is not of this kind."""
    good: Callable[[object], bool]
    several: bool = False
    """True if the command line takes several texts."""


_MOST = 2**63 - 1
_MOST_BYTES = 2**60


def whole(least: int, most: int | None = None) -> OptionRule:
    """Return the rule for whole numbers from ``least`` to ``most``; None: to the largest of 64 bits, unsaid."""
    largest = _MOST if most is None else most

    def good(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest

    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    return OptionRule(allowed=f"a whole number {allowed}", metavar="N", read=int, good=good)


SEED = whole(0, _MOST)
"""The seeds of PyTorch's generators. Programs that draw one at random may draw a larger one."""


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> OptionRule:
    """Return the rule for finite numbers from ``low`` to ``high``; ``above`` and ``below`` exclude the ends."""

    def good(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    said = f"above {low:g}" if above else f"of at least {low:g}"
    if high != math.inf:
        said += f" and below {high:g}" if below else f" and at most {high:g}"
    return OptionRule(allowed=f"a number {said}", metavar="X", read=float, good=good)


def one_of(*words: str) -> OptionRule:
    """Return the rule for one of these words."""
    return OptionRule(
        allowed=f"one of {', '.join(words)}",
        metavar="{" + ", ".join(words) + "}",
        read=str,
        good=lambda value: value in words,
    )


def text(metavar: str, *, empty: bool = False) -> OptionRule:
    """Return the rule for texts."""
    return OptionRule(
        allowed="a text" if empty else "a text that is not empty",
        metavar=metavar,
        read=str,
        good=lambda value: _is_text(value) and (empty or bool(value)),
    )


def _is_text(value: object) -> bool:
    """Return True if a value can be a file's name, and be written into a file."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def texts(metavar: str) -> OptionRule:
    """Return the rule for one text or more; the default may be none."""

    def good(value: object) -> bool:
        return isinstance(value, tuple) and all(_is_text(each) and bool(each) for each in value)

    return OptionRule(allowed="one or more texts", metavar=metavar, read=str, good=good, several=True)


def size() -> OptionRule:
    """Return the rule for sizes: bytes, or a text like 20GiB."""

    def good(value: object) -> bool:
        try:
            return isinstance(value, int | str) and 0 < parse_bytes(value) <= _MOST_BYTES and not meant_as_gib(value)
        except InvalidInput:
            return False

    return OptionRule(allowed="a size like 20GiB or 20GB, at least 4096", metavar="SIZE", read=str, good=good)


def flag() -> OptionRule:
    """Return the rule for yes or no; the command line has an option for each."""
    return OptionRule(allowed="true or false", metavar="", read=_not_read, good=lambda value: isinstance(value, bool))


def _not_read(word: str) -> object:
    raise ValueError(word)

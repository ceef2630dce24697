"""Exceptions in one line, as other ranks are told of them."""

from __future__ import annotations

_MOST_CHARACTERS = 300


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or its type where there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def describe_exception(error: BaseException | None) -> str:
    """Return an exception's name and first line; empty for None and for an exit that is no failure."""
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    first = (str(error).splitlines() or [""])[0][:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__

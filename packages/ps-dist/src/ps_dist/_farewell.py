"""Why a process leaves: by itself, or after an exception that the others should hear of."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_MOST_CHARACTERS = 300


def words_of(error: BaseException | None) -> str:
    """An exception's name and first line; nothing where it is none, or an end that is no failure."""
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    first = (str(error).splitlines() or [""])[0][:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class AtExit:
    """Has something done if the interpreter ends before it is cancelled.

    An exception that somebody catches is nobody else's business, and one in a notebook or an interactive session does
    not end the process. So nothing is hooked: at the end of the interpreter it is known by which exception it ends.
    """

    def __init__(self, leave: Callable[[str], None]) -> None:
        """``leave`` is given the `words_of` the exception, if any."""
        self._leave, self._process = leave, os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """It was done."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        if os.getpid() == self._process:  # not in a copy of it, whose threads stayed behind
            self._leave(words_of(getattr(sys, "last_value", None)))

"""Why a process ends its connection: by itself, or by an exception that the other ranks should be told of."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_MOST_CHARACTERS = 300


def describe_exception(error: BaseException | None) -> str:
    """Return an exception's name and first line; empty for None and for an exit that is no failure."""
    if error is None or isinstance(error, GeneratorExit):
        return ""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    first = (str(error).splitlines() or [""])[0][:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class AtExit:
    """Closes a connection if the interpreter ends first.

    An exception that the program catches concerns no other rank. One in a notebook or an interactive session does not
    end the process. So nothing is hooked: when the interpreter ends, it is known by which exception.
    """

    def __init__(self, close: Callable[[str], None]) -> None:
        """``close`` is given the `describe_exception` of the exception, if there is one."""
        self._close, self._process = close, os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """Close nothing when the interpreter ends."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        if os.getpid() == self._process:  # not in a fork, which has none of the threads
            self._close(describe_exception(getattr(sys, "last_value", None)))

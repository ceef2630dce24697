"""A call that may never return, made by a thread that can be left behind."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic
from typing import Any

from ps_dist._error_text import describe_exception

_CHECK_S = 0.1
"""Seconds between two checks whether waiting is in vain."""


class AbandonableCall:
    """One call in progress."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Begin to call ``work``."""
        self._over, self._failure = Event(), ""
        self.error: BaseException | None = None
        """The exception that the call raised; None: none."""
        self.result: Any = None  # any: of whatever type
        """The value that the call returned; None until it is over."""
        try:
            Thread(target=self._run, args=(work,), name="ps_dist abandonable call", daemon=True).start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            self._run(work)

    def wait(self, limit_s: float, why_give_up: Callable[[], str] = str) -> str:
        """Wait for the end; return what went wrong, empty if nothing did.

        ``why_give_up`` is asked again and again; its first answer that is not empty ends the wait.
        """
        deadline = monotonic() + limit_s
        while not self._over.wait(min(_CHECK_S, max(deadline - monotonic(), 0.0))):
            reason = why_give_up()
            if reason or monotonic() >= deadline:
                return reason or f"did not end within {limit_s:g} s"
        return self._failure

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self.result = work()
        except BaseException as error:
            self.error, self._failure = error, describe_exception(error)
        self._over.set()

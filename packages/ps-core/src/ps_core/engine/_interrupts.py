"""Ctrl-C, kept waiting while the engine's books are between two states.

A Python signal handler may run between any two instructions, and that for Ctrl-C raises `KeyboardInterrupt` there. What
the engine does between two of the model's operations is over soon, so it is let finish first.
"""

from __future__ import annotations

import functools
import threading
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]  # `signal` without its enums: a tenth of the time
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Later:
    """Stands in for the handler meanwhile."""

    __slots__ = ("came", "frame")

    def __init__(self) -> None:
        self.came = False
        self.frame: FrameType | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came, self.frame = True, frame


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """A function that an interrupt does not break off; the interrupt comes when it has returned."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        handler = getsignal(SIGINT)
        other_thread = threading.current_thread() is not threading.main_thread()  # there none is ever interrupted
        if not callable(handler) or isinstance(handler, _Later) or other_thread:
            return function(*args, **kwargs)
        later = _Later()
        signal(SIGINT, later)
        try:
            return function(*args, **kwargs)
        finally:
            signal(SIGINT, handler)
            if later.came:
                handler(SIGINT, later.frame)

    return call

"""Ctrl-C, kept waiting while the engine's books are between two states.

A Python signal handler may run between any two instructions, and that for Ctrl-C raises `KeyboardInterrupt` there. What
the engine does between two of the model's operations is over soon, so it is let finish first.

[Note: whose handler]
Ours asks whether an `undisturbed` function runs, and calls the one that was there at once or afterwards. It is put in
when a pass begins (or something rare, as a step), and taken out when that ends: notebooks set theirs anew for every
cell. The state is the process's, as handlers are; only its main thread is ever interrupted.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_MAIN = threading.main_thread().ident


class _State:
    """What the handler has to know."""

    __slots__ = ("before", "came", "depth", "leaving")

    def __init__(self) -> None:
        self.depth = 0
        self.leaving = False
        self.came: list[FrameType | None] = []
        self.before: Callable[[int, FrameType | None], Any] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Called by Python when the signal came."""
        if self.depth:
            self.came.append(frame)
        elif self.before is not None:
            self.before(number, frame)

    def settle(self) -> None:
        """Nothing is undisturbed any more: what came meanwhile comes now, and the handler goes if it was to go."""
        self.depth += 1  # or an interrupt could come between the two lines that belong together
        try:
            if self.leaving and signal.getsignal(signal.SIGINT) is _HANDLER:  # else somebody has put in another since
                signal.signal(signal.SIGINT, self.before)
        finally:
            self.leaving = False
            self.depth -= 1
        if self.came:
            frame = self.came.pop()
            self.came.clear()
            if self.before is not None:
                self.before(signal.SIGINT, frame)


_STATE = _State()
_HANDLER = _STATE.handle


def put_in() -> bool:
    """Have interrupts ask first; whether that was not so before. Only a handler that is Python's can be asked for."""
    if threading.get_ident() != _MAIN:
        return False
    handler, was_leaving, _STATE.leaving = signal.getsignal(signal.SIGINT), _STATE.leaving, False
    if handler is _HANDLER:
        return was_leaving
    if not callable(handler):
        return False
    _STATE.before = handler
    signal.signal(signal.SIGINT, _HANDLER)
    return True


def take_out() -> None:
    """Give the handler back that was there, once nothing is undisturbed."""
    if threading.get_ident() == _MAIN:
        _STATE.leaving = True
        if not _STATE.depth:
            _STATE.settle()


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """A function that an interrupt does not break off; the interrupt comes when it has returned."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        _STATE.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _STATE.depth -= 1
            if not _STATE.depth and (_STATE.came or _STATE.leaving):
                _STATE.settle()

    return call


def alone(function: Callable[P, R]) -> Callable[P, R]:
    """As `undisturbed`, for what is called rarely and perhaps outside of a pass: the handler is put in for it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        ours = False
        _STATE.depth += 1  # before the handler is put in: an interrupt right after that has to wait already
        try:
            ours = put_in()
            return function(*args, **kwargs)
        finally:
            _STATE.leaving |= ours
            _STATE.depth -= 1
            if not _STATE.depth and (_STATE.came or _STATE.leaving):
                _STATE.settle()

    return call

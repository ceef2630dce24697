"""Ctrl-C, kept waiting while the engine's books are between two states.

A Python signal handler may run between any two instructions, and that for Ctrl-C raises `KeyboardInterrupt` there. What
the engine does between two of the model's operations is over soon, so it is let finish first.

[Note: whose handler]
Ours asks whether a `defer_interrupts` function runs, and calls the one that was there at once or afterwards. It is put
in when a pass begins (or something rare, as a step), and taken out when all that it was put in for has ended: notebooks
set theirs anew for every cell. The state is the process's, as handlers are; only its main thread is ever interrupted.

[Note: when it waits]
While a `defer_interrupts` function runs; at its very first instruction, where it does not count as running yet (so that
what tidies up after one interrupt is not broken off by the next); and within a `callback`, whose exceptions Python
prints and forgets: there an interrupt would be lost. It then comes at the end of the next undisturbed function.
"""

from __future__ import annotations

import functools
import signal
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
_MAIN = threading.main_thread().ident
_FIRST: set[CodeType] = set()
"""What begins an undisturbed function, or is about to deliver what came."""
_WITHIN: set[CodeType] = {weakref.finalize.__call__.__code__}
"""Callbacks."""


class _State:
    """What the handler has to know."""

    __slots__ = ("before", "came", "depth", "put", "users")

    def __init__(self) -> None:
        self.depth = 0
        self.users = 0
        """What ours is to be in for."""
        self.put = False
        """Whether ours was put in, and has not been taken out since."""
        self.came: list[FrameType | None] = []
        self.before: Callable[[int, FrameType | None], Any] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Called by Python when the signal came."""
        if self.depth or _has_to_wait(frame):
            self.came.append(frame)
        elif self.before is not None:
            self.before(number, frame)

    def settle(self) -> None:
        """Have what came meanwhile come now, and the handler go if nobody needs it."""
        self.depth += 1  # or an interrupt could come between lines that belong together
        try:
            if self.put and not self.users:
                self.put = False
                if signal.getsignal(signal.SIGINT) is _HANDLER:  # else somebody has put in another since
                    signal.signal(signal.SIGINT, self.before)
        finally:
            self.depth -= 1
        if self.came:
            frame = self.came.pop()
            self.came.clear()
            if self.before is not None:
                self.before(signal.SIGINT, frame)


def _has_to_wait(frame: FrameType | None) -> bool:
    """See [Note: when it waits]."""
    if frame is not None and frame.f_code in _FIRST:
        return True
    while frame is not None:
        if frame.f_code in _WITHIN:
            return True
        frame = frame.f_back
    return False


_STATE = _State()
_HANDLER = _STATE.handle


def install() -> None:
    """Have interrupts ask first, until `uninstall`. Only a handler that is Python's can be asked for."""
    _STATE.users += 1
    try:
        if threading.get_ident() == _MAIN:
            _install()
    except BaseException:  # an interrupt that came before ours was in
        _STATE.users -= 1
        raise


def _install() -> None:
    handler = signal.getsignal(signal.SIGINT)
    if handler is not _HANDLER and callable(handler):
        _STATE.before, _STATE.put = handler, True
        signal.signal(signal.SIGINT, _HANDLER)


def interrupt_waits() -> bool:
    """Whether an interrupt came that is delivered when the running `defer_interrupts` function ends."""
    return bool(_STATE.came)


def uninstall() -> None:
    """One of those it was put in for has ended; with the last, the handler is given back that was there."""
    _STATE.users -= 1
    if threading.get_ident() == _MAIN:
        _settle()


def _begins(function: Any) -> None:  # any: functools' type for what it wraps does not say that it is a function
    _FIRST.add(function.__code__)


def defer_interrupts(function: Callable[P, R]) -> Callable[P, R]:
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
            if not _STATE.depth and (_STATE.came or not _STATE.users):
                _STATE.settle()

    _begins(call)
    return call


def defer_interrupts_installing(function: Callable[P, R]) -> Callable[P, R]:
    """As `defer_interrupts`, for what is called rarely and perhaps outside of a pass: the handler is put in for it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != _MAIN:
            return function(*args, **kwargs)
        _STATE.depth += 1  # before the handler is put in: an interrupt right after that has to wait already
        _STATE.users += 1
        try:  # with no call in between, for at a call an interrupt may come that finds another handler
            _install()
            return function(*args, **kwargs)
        finally:
            _STATE.users -= 1
            _STATE.depth -= 1
            _settle()

    _begins(call)
    return call


def _settle() -> None:
    if not _STATE.depth:
        _STATE.settle()


_FIRST |= {_settle.__code__, _State.settle.__code__}


def callback(function: F) -> F:
    """For what Python calls where an exception goes nowhere, as when an object dies; see [Note: when it waits]."""
    _WITHIN.add(function.__code__)
    return function

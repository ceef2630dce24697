"""Defer signals, such as that of Ctrl-C, while the engine's state is inconsistent.

A Python signal handler may run between any two instructions, and the one for Ctrl-C raises `KeyboardInterrupt` there.
Others raise too, at a time limit or before a cluster takes the computer back. The engine's work between two of the
model's operations is short, so it is finished first.

[Note: whose handler]
The engine's handler calls the earlier one: at once, or after the running `defer_interrupts` function. It is installed
when a pass begins (or something rare, such as a step). It is removed when nothing needs it any more, because notebooks
install their own for every cell. The state is the process's, as handlers are. Python interrupts only the main thread.
Signals without a handler in Python are left alone.

[Note: when it waits]
An interrupt waits while a `defer_interrupts` function runs. It also waits at that function's very first instruction,
before the function counts as running. So code that cleans up after one interrupt is not broken off by the next. It
waits within a `callback` too: Python prints and forgets exceptions there, so an interrupt would be lost. It is then
raised at the end of the next `defer_interrupts` function.

A function that defers interrupts is not compiled, nor what it calls, wherever compiled code reaches it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own
import functools
import signal
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from ps_core.engine._support.not_compiled import not_compiled

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
_SIGNALS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Signals that programs handle in Python: to stop, or to end what takes too long."""
_handler_of: Callable[[int], Any] = _signal.getsignal
"""Return a signal's handler. `signal.getsignal` calls this, and more in Python; a pass asks for six signals."""
_MAIN = threading.main_thread().ident
_ENTRY_CODE: set[CodeType] = set()
"""Code of functions that defer or raise interrupts: at its first instruction such a function does not run yet."""
_CALLBACK_CODE: set[CodeType] = {weakref.finalize.__call__.__code__}
"""Code of callbacks, whose exceptions Python prints and forgets."""


class _State:
    """The state that the signal handler reads."""

    __slots__ = ("before", "came", "depth", "put", "users")

    def __init__(self) -> None:
        self.depth = 0
        self.users = 0
        """Number of passes and functions that need the engine's handler."""
        self.put: set[int] = set()
        """Signals for which the engine's handler is installed."""
        self.came: dict[int, FrameType | None] = {}
        """Deferred signals, each with the frame in which it came."""
        self.before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """The earlier handlers."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: defer it, or pass it on to the earlier handler."""
        if self.depth or _has_to_wait(frame):
            self.came[number] = frame
        elif number in self.before:
            self.came.pop(number, None)  # this one replaces one that waits (see [Note: when it waits])
            self.before[number](number, frame)

    def deliver(self) -> None:
        """Call the handlers of deferred signals; remove the engine's handler if nothing needs it any more."""
        self.depth += 1  # or an interrupt could come between lines that belong together
        try:
            while self.put and not self.users:
                number = self.put.pop()
                if _handler_of(number) is _HANDLER:  # else the user has installed another since
                    signal.signal(number, self.before[number])
        finally:
            self.depth -= 1
        if self.came:
            self._call_deferred()

    def _call_deferred(self) -> None:
        """Call the handlers of all deferred signals, the next one also if one raises."""
        number = next(iter(self.came))
        frame = self.came.pop(number)
        try:
            self.before[number](number, frame)
        finally:
            if self.came:
                self._call_deferred()


def _has_to_wait(frame: FrameType | None) -> bool:
    """Return True if an interrupt must be deferred; see [Note: when it waits]."""
    if frame is not None and frame.f_code in _ENTRY_CODE:
        return True
    while frame is not None:
        if frame.f_code in _CALLBACK_CODE:
            return True
        frame = frame.f_back
    return False


_STATE = _State()
_HANDLER = _STATE.handle


def install() -> None:
    """Install the engine's handler until `uninstall`; only a handler in Python can be replaced."""
    _STATE.users += 1
    try:
        if get_ident() == _MAIN:
            _install()
    except BaseException:  # an interrupt that came before ours was in
        _STATE.users -= 1
        raise


def _install() -> None:
    for number in _SIGNALS:
        handler = _handler_of(number)
        if handler is not _HANDLER and callable(handler):
            _STATE.before[number] = handler
            _STATE.put.add(number)
            signal.signal(number, _HANDLER)


def interrupt_waits() -> bool:
    """Return True if Ctrl-C will be handled when the running `defer_interrupts` function ends."""
    return int(signal.SIGINT) in _STATE.came


def uninstall() -> None:
    """Drop one need of the engine's handler; with the last one, restore the earlier handler."""
    _STATE.users -= 1
    if get_ident() == _MAIN:
        _deliver_outermost()


def _defers_from_entry(
    function: Any,
) -> None:  # any: functools' type for what it wraps does not say that it is a function
    _ENTRY_CODE.add(function.__code__)


def defer_interrupts(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that must not be interrupted: an interrupt is raised after it has returned."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if get_ident() != _MAIN:
            return function(*args, **kwargs)
        _STATE.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _STATE.depth -= 1
            if not _STATE.depth and (_STATE.came or not _STATE.users):
                _STATE.deliver()

    _defers_from_entry(call)
    return not_compiled(call)


def defer_interrupts_installing(function: Callable[P, R]) -> Callable[P, R]:
    """Defer interrupts as `defer_interrupts` does, and install the handler: for rare calls outside of passes."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if get_ident() != _MAIN:
            return function(*args, **kwargs)
        _STATE.depth += 1  # before the handler is installed: a later interrupt must be deferred
        _STATE.users += 1
        try:  # no call may come before: an interrupt there would meet another handler
            _install()
            return function(*args, **kwargs)
        finally:
            _STATE.users -= 1
            _STATE.depth -= 1
            _deliver_outermost()

    _defers_from_entry(call)
    return not_compiled(call)


def _deliver_outermost() -> None:
    if not _STATE.depth:
        _STATE.deliver()


_ENTRY_CODE |= {_deliver_outermost.__code__, _State.deliver.__code__, _State._call_deferred.__code__}


def callback(function: F) -> F:
    """Mark a function whose exceptions Python prints and forgets; see [Note: when it waits]."""
    _CALLBACK_CODE.add(function.__code__)
    return function

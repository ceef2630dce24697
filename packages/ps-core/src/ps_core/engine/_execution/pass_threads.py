"""Admit one thread to a model's pass; autograd may run the backward pass on threads of its own.

[Note: threads of a pass]
For tensors on CUDA autograd runs backward on a thread of the device. Meanwhile the thread that called ``backward()``
waits there. Users call ``backward()`` on threads of their own, too. So a backward pass is known by its number, not by a
thread. Autograd tells this number to every thread that works for the pass. It is over when its end was reported. After
an exception nothing is reported, but autograd frees the callback that would have done so.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from threading import get_ident
from types import FrameType

import torch

from ps_core._errors import InvalidInput

NO_BACKWARD = -1
"""Autograd's number for the backward pass where none runs."""
FORWARD, BACKWARD = "forward", "backward"
_FREED_WITHIN_S = 0.2
"""Seconds to wait after an exception: a device's thread frees the rest of a pass later than the caller continues."""


class PassThreads:
    """Track the threads within forward and backward of one model."""

    def __init__(self) -> None:
        self.inside: dict[str, int] = {}
        """The thread within the root module's forward, under the key `FORWARD`.

        The model's hooks insert it by `setdefault`: no second thread can come between check and change.
        """
        self.backward: dict[int, tuple[int, weakref.ref[object]]] = {}
        """Autograd's number for the running backward pass, and the callback at its end.

        The key is the thread that first worked for that pass.

        `PassTracker` inserts the callback, and removes it when it is called. Empty: no backward pass runs.
        """

    @property
    def _other_backward(self) -> int | None:
        """Return the thread of a running backward pass that this thread does not work for; None: there is none."""
        task = torch._C._current_graph_task_id()
        for thread, (other, reports_end) in list(self.backward.items()):
            if other != task and reports_end() is not None:
                return thread
        return None

    def check(self, what: str) -> None:
        """Raise if another thread is within a pass; ``what`` this thread does. Do not check within backward."""
        if torch._C._current_graph_task_id() != NO_BACKWARD:
            return
        me = get_ident()
        inside = self.inside.get(FORWARD, me)
        if inside != me:
            raise _two_threads(what, FORWARD, inside)
        if me not in self.backward and (other := self._stays_in_backward()) is not None:
            raise _two_threads(what, BACKWARD, other)

    def check_backward(self) -> None:
        """Raise if another thread is within a pass, so that this thread's backward pass may not begin."""
        me = get_ident()
        inside = self.inside.get(FORWARD, me)
        if inside != me and not _calls_backward(sys._current_frames().get(inside)):
            raise _two_threads(BACKWARD, FORWARD, inside)
        other = self._other_backward
        if other is not None and not (other == me and _calls_backward(sys._getframe())):
            raise _two_threads(BACKWARD, BACKWARD, other)

    def _stays_in_backward(self) -> int | None:
        """Return the thread of a backward pass that does not end soon; None: there is none."""
        end = time.monotonic() + _FREED_WITHIN_S
        while (other := self._other_backward) is not None and time.monotonic() <= end:
            time.sleep(0.001)
        return other


def _calls_backward(frame: FrameType | None) -> bool:
    """Return True if a stack of Python's frames is within a call of ``backward`` or ``torch.autograd.grad``."""
    while frame is not None:
        if frame.f_code.co_filename == torch.autograd.__file__:
            return True
        frame = frame.f_back
    return False


def _two_threads(what: str, where: str, other: int) -> InvalidInput:
    return InvalidInput(
        f"{what} in thread {_name(get_ident())} while thread {_name(other)} is in {where} of the same model: one "
        "thread at a time may be in a pass, so hold one lock around forward, backward and step in every thread, or "
        "give each thread a model of its own"
    )


def _name(ident: int) -> str:
    names = [repr(thread.name) for thread in threading.enumerate() if thread.ident == ident]
    return names[0] if names else f"{ident} (autograd's, for a device)"

"""The thread that does all collectives of a process: in the order of submission, one at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

import torch

from ps_core._errors import RanksDiverged
from ps_dist._collective_history import HistoryEntry
from ps_dist._error_text import first_line
from ps_dist._failure_reasons import Failure
from ps_dist._messages import ConnectionBroken
from ps_dist._timeouts import AwakeClock

_CHECK_S = 1.0
"""Seconds between two checks of a thread that waits for a result; a check also reads the clock, see `AwakeClock`."""
_IDLE_END_S = 0.1
"""Seconds in which the thread ends if it waits for no other process."""
_CUT_END_S = 10.0
"""Seconds in which it ends once its connections are cut; the interpreter must not end before it."""


class Pending:
    """A collective, or a job of several, that has been submitted."""

    def __init__(self, thread: CommThread, work: Callable[[], object]) -> None:
        self._thread = thread
        self._work: Callable[[], object] | None = work
        self._threads = torch.get_num_threads()
        """Number of threads that PyTorch's operators use on the thread that submitted."""
        self._over = Event()
        self._error: RanksDiverged | None = None
        self._result: Any = None

    @property
    def done(self) -> bool:
        """Return True once `wait` returns (or raises) at once."""
        return self._over.is_set()

    # Any: what the work returned.
    def wait(self) -> Any:
        """Wait until buffers may be read and reused; raise `RanksDiverged` if that will never be.

        Return what the job returned.
        """
        while not self._over.wait(_CHECK_S):
            self._thread.check_wait()
        if self._error is not None:
            raise RanksDiverged(str(self._error)) from self._error
        return self._result

    def run(self) -> None:
        """Run the work; the thread of collectives calls this."""
        assert self._work is not None, "it runs once"
        if torch.get_num_threads() != self._threads:  # each thread has a number of its own
            torch.set_num_threads(self._threads)
        self._result = self._work()

    def finish(self, error: RanksDiverged | None = None) -> None:
        """End all waits with this result; a second result is ignored."""
        if not self._over.is_set():
            self._error, self._work = error, None  # drops the references to buffers
            self._over.set()


class Mark(Protocol):
    """A place in a device's stream."""

    def query(self) -> bool:
        """Return True if everything launched before it is complete."""


@dataclass(slots=True)
class _Launched:
    """A collective that a device carries out on its stream, between two marks; it may not be complete."""

    entry: HistoryEntry
    begins: Mark
    ends: Mark
    begun_at_s: float | None = None
    """Time since when it waits for other ranks; None: the device still does earlier work of this rank."""


class CommThread:
    """The thread and its queue.

    The first failure ends everything: what is queued and what is submitted later fails with the same error.
    """

    def __init__(self, clock: AwakeClock, *, hopeless_s: float) -> None:
        self.clock, self._hopeless_s = clock, hopeless_s
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._open: dict[Pending, None] = {}
        self._lock = Lock()
        self._current: tuple[HistoryEntry, float] | None = None
        self._launched: deque[_Launched] = deque()
        """Collectives that devices carry out, in order; several threads use this list, under the lock."""
        self.error: RanksDiverged | None = None
        """Why nothing runs any more, in the words that all ranks are told."""
        self.failure: Failure | None = None
        """The transport's error, if it failed; `Watchdog` finds out which rank is to blame."""
        self.check_wait: Callable[[], object] = lambda: None
        """Called once in a while by a thread that waits: `Watchdog` may itself be waiting, for the store."""
        self._thread = Thread(target=self._run, name="ps_dist collectives", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> Pending:
        """Queue ``work``, which calls `enter` for each of its collectives."""
        pending = Pending(self, work)
        with self._lock:
            if self.error is not None:
                pending.finish(self.error)
            else:
                self._open[pending] = None
                self._queue.put(pending)
        return pending

    @property
    def oldest_open(self) -> Pending | None:
        """Return the job that was submitted first of those that are not over; None: all are."""
        with self._lock:
            return next(iter(self._open), None)

    @property
    def current(self) -> tuple[HistoryEntry, float] | None:
        """Return the collective that waits for other ranks, and for how many seconds it has; None between collectives.

        The device carries out what was launched, in order; this thread does the others.
        """
        launched = self._oldest_launched()
        if launched is not None and launched.begun_at_s is not None:
            return launched.entry, self.clock() - launched.begun_at_s
        current = self._current
        return None if current is None else (current[0], self.clock() - current[1])

    @property
    def device_waits(self) -> bool:
        """Return True if a device waits for other ranks.

        Connections that break do not tell then that a rank has ended.
        """
        launched = self._oldest_launched()
        return launched is not None and launched.begun_at_s is not None

    def reached(self, last: HistoryEntry) -> tuple[int, str]:
        """Return the number of the latest collective that this process came to, and its words until it is over.

        ``last``: the latest entry of the history. A device may not have come to what was launched on it.
        """
        launched = self._oldest_launched()
        if launched is not None and launched.begun_at_s is None:
            return launched.entry.number - 1, ""
        current = self.current
        return (last.number, "") if current is None else (current[0].number, current[0].what)

    def enter(self, entry: HistoryEntry) -> None:
        """Set what runs from now on; called by the thread itself."""
        self._current = entry, self.clock()

    def note_launch(self, begins: Mark, ends: Mark) -> None:
        """Note that a device carries out the running collective between these marks; called by the thread itself."""
        assert self._current is not None, "it was entered"
        self._oldest_launched()  # drops what is complete
        with self._lock:
            self._launched.append(_Launched(self._current[0], begins, ends))

    def _oldest_launched(self) -> _Launched | None:
        """Return the first launched collective that is not complete; None: all are."""
        with self._lock:
            while self._launched and _is_over(self._launched[0].ends):
                self._launched.popleft()
            if not self._launched:
                return None
            first = self._launched[0]
            if first.begun_at_s is None and _is_over(first.begins):
                first.begun_at_s = self.clock()
            return first

    def fail(self, error: RanksDiverged) -> None:
        """End every wait, now and later, with this error, unless another one came first."""
        with self._lock:
            if self.error is None:
                self.error = error
            for pending in self._open:
                pending.finish(self.error)
            self._open.clear()

    def close(self, *, waits: bool = True) -> bool:
        """End the thread; False if it is still running, because after a failure it waits for another process."""
        self._queue.put(None)
        deadline_s = self.clock() + self._hopeless_s
        while waits and self.error is None and self._thread.is_alive() and self.clock() < deadline_s:
            self._thread.join(_CHECK_S)
            self.check_wait()
        self._thread.join(_IDLE_END_S)
        return not self._thread.is_alive()

    def wait_cut(self) -> None:
        """Wait for the thread's end after a `close` that returned False, once its connections are cut."""
        self._thread.join(_CUT_END_S)

    @torch.inference_mode()  # else PyTorch writes to no tensor that was made in inference mode
    def _run(self) -> None:
        while (pending := self._next()) is not None:
            if pending.done:
                continue
            try:
                pending.run()
            except BaseException as error:
                peer = error.peer if isinstance(error, ConnectionBroken) else None
                self.failure = Failure(first_line(error), peer)
                return  # `Watchdog` finds the cause, and calls `fail`
            self._current = None
            with self._lock:
                self._open.pop(pending, None)
            pending.finish()

    def _next(self) -> Pending | None:
        """Wait for the next job; None: there are no more."""
        while True:
            try:
                return self._queue.get(timeout=None if self._oldest_launched() is None else _CHECK_S)
            except Empty:  # the training thread may be waiting for the device, so nobody else checks
                self.check_wait()


def _is_over(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:  # the device failed, which raises in the training thread: no rank is to blame
        return True

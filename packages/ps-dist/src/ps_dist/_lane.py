"""The one thread of a process that talks to the others: everything in order, nothing at the same time."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch

from ps_core._errors import RanksDiverged
from ps_dist._journal import Entry
from ps_dist._reasons import Failure
from ps_dist._timeouts import AwakeClock
from ps_dist._wire import ConnectionBroken

_LOOK_S = 1.0
"""How often one who waits looks whether the wait is hopeless; also reads the clock, see `AwakeClock`."""
_MOMENT_S = 0.1
"""In which a thread ends that does not wait for anything."""
_CUT_S = 10.0
"""In which one ends whose connections were cut, however busy the computer is: an interpreter must not end before it."""


class Pending:
    """Something on its way."""

    def __init__(self, lane: Lane, entry: Entry | None, work: Callable[[], None]) -> None:
        self.entry = entry
        self._lane = lane
        self._work: Callable[[], None] | None = work
        self._over = Event()
        self._error: RanksDiverged | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when the result may be read and the buffers reused; `RanksDiverged` if that will never be."""
        while not self._over.wait(_LOOK_S):
            self._lane.check_wait()
        if self._error is not None:
            raise RanksDiverged(str(self._error)) from self._error

    def run(self) -> None:
        """Do it."""
        assert self._work is not None, "it is done once"
        self._work()

    def finish(self, error: RanksDiverged | None = None) -> None:
        """It is over; the first to say so is right."""
        if not self._over.is_set():
            self._error, self._work = error, None  # buffers are let go
            self._over.set()


class Lane:
    """The thread, and what waits for its turn.

    The first failure ends everything: what is on its way and what is submitted later fails with the same error.
    """

    def __init__(self, clock: AwakeClock, *, hopeless_s: float) -> None:
        self.clock, self._hopeless_s = clock, hopeless_s
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._open: dict[Pending, None] = {}
        self._lock = Lock()
        self._flight: tuple[Entry, float] | None = None
        self.error: RanksDiverged | None = None
        """Why nothing goes any more, as told to everyone."""
        self.failure: Failure | None = None
        """What the transport said when it failed; `Watchdog` finds out who is to blame."""
        self.check_wait: Callable[[], None] = _no_check
        """Called once in a while by one who waits: `Watchdog` may itself be waiting, for the store."""
        self._thread = Thread(target=self._run, name="ps_dist lane", daemon=True)
        self._thread.start()

    def submit(self, entry: Entry | None, work: Callable[[], None]) -> Pending:
        """Have something done when its turn comes; None: it says itself, by `enter`, what it does."""
        pending = Pending(self, entry, work)
        with self._lock:
            if self.error is not None:
                pending.finish(self.error)
            else:
                self._open[pending] = None
                self._queue.put(pending)
        return pending

    @property
    def flight(self) -> tuple[Entry, float] | None:
        """What is being done, and for how many seconds."""
        flight = self._flight
        return None if flight is None else (flight[0], self.clock() - flight[1])

    def enter(self, entry: Entry | None) -> None:
        """What is done from now on; by the thread itself."""
        self._flight = None if entry is None else (entry, self.clock())

    def fail(self, error: RanksDiverged) -> None:
        """Nothing more will come of anything."""
        with self._lock:
            if self.error is None:
                self.error = error
            for pending in self._open:
                pending.finish(self.error)
            self._open.clear()

    def close(self, *, waits: bool = True) -> bool:
        """End the thread; whether it has ended (after a failure it may still wait for another process)."""
        self._queue.put(None)
        self._thread.join(self._hopeless_s if waits and self.error is None else _MOMENT_S)
        return not self._thread.is_alive()

    def wait_cut(self) -> None:
        """Let the thread end after a failed `close`, now that nothing it waits for can come."""
        self._thread.join(_CUT_S)

    @torch.no_grad()
    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            if pending.done:
                continue
            self.enter(pending.entry)
            try:
                pending.run()
            except Exception as error:
                self.failure = _failure(error)
                return  # `Watchdog` tells the rest
            self.enter(None)
            with self._lock:
                self._open.pop(pending, None)
            pending.finish()


def _failure(error: Exception) -> Failure:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return Failure(text, error.peer if isinstance(error, ConnectionBroken) else None)


def _no_check() -> None:
    """Do nothing."""

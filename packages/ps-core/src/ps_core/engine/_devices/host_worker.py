"""Run a plan's CPU work (steps, sums, norms) on a thread of its own, while the GPU computes.

[Note: the worker thread]
The host thread launches work here as it launches copies on a stream. The worker does it in order, each piece after the
events that it was told to wait for. The host thread learns that work is over from its event. A stream cannot wait for
the worker, so the host thread waits before it launches what needs the result.

A piece of work touches memory only. At the launch the host thread notes what the work means: which chunk is newest,
which gradient is used up. So a reader first waits for work that may touch the same memory.

If a piece of work fails, those behind it are dropped, since they may need it. The parameters are then a mixture of old
and new. Every later wait of the host thread raises the same error.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from ps_core._errors import InvalidInput
from ps_core._plan import Queue
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.queues import DiskEvent
from ps_core.engine._support.interrupts import defer_interrupts_installing


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work, and the events that it waits for."""

    waits: list[Callable[[], object]]
    work: Callable[[], object]
    threads: int
    """Number of threads that PyTorch's operators use on the thread that launched the work."""
    over: threading.Event = field(default_factory=threading.Event)


class _Failure:
    """The first error of a worker, which its thread and its events share."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise `InvalidInput` in a forked process: the thread does not exist there, so its work would never end."""
        if os.getpid() != self._process:
            raise InvalidInput(
                f"process {os.getpid()} was forked from {self._process} while a step was on its way there: use the "
                "model in the process that trains it, or fork before chunked()"
            )

    def check(self) -> None:
        """Raise the error again, if there was one."""
        if self.error is not None:
            raise RuntimeError(
                "work of the processor failed on its thread, so parameters are a mixture of old and new: load a "
                f"checkpoint into a new model; it failed with {type(self.error).__name__}: {self.error}"
            ) from self.error


class WorkDone:
    """A mark behind a piece of work and all that was launched before it."""

    __slots__ = ("_failure", "_over")

    def __init__(self, over: threading.Event, failure: _Failure) -> None:
        self._over, self._failure = over, failure

    @property
    def queue(self) -> Queue:
        """Return the processor's queue."""
        return Queue.CPU

    @property
    def done(self) -> bool:
        """Return True if the work is over."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the work is over, on any thread."""
        self._over.wait()

    def block(self) -> None:
        """Block the host thread until the work is over, and raise the worker's error if there is one."""
        if not self._over.is_set():
            self._failure.check_process()
        self._over.wait()
        self._failure.check()


class HostWorker:
    """The thread of one device; see [Note: the worker thread]. Called by the host thread only."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        """Make a worker; its thread calls ``prepare`` when it starts."""
        self._prepare = prepare
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._waits: list[Callable[[], object]] = []
        self._failure = _Failure()
        self._last: WorkDone | None = None
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None

    def wait(self, event: Event) -> None:
        """Make the worker's thread wait for an event before it does later work."""
        if isinstance(event, DiskEvent):
            event.block()  # at once: the host thread handles failures of the disk
        else:
            self._waits.append(event.block)

    def wait_for_all(self, events: Sequence[Event]) -> None:
        """Replace the events that later work waits for, so that the list does not grow while no work is launched."""
        self._waits.clear()
        for event in events:
            self.wait(event)

    def launch(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], work: Callable[[], object]
    ) -> WorkDone:
        """Launch work, which may touch these tensors only, behind all that was launched before."""
        if self._thread is None:
            self._start()
        waits, self._waits = self._waits, []
        job = _Job(waits, work, torch.get_num_threads())
        self._jobs.put(job)
        self._last = WorkDone(job.over, self._failure)
        return self._last

    @defer_interrupts_installing
    def _start(self) -> None:
        args = self._jobs, self._failure, self._prepare
        self._thread = threading.Thread(target=_work, args=args, daemon=True, name="ps_core worker")
        self._thread.start()
        # The thread holds no reference to this object, so that this can be freed.
        self._stop = weakref.finalize(self, self._jobs.put, None)

    @property
    def busy(self) -> bool:
        """Return True if something that was launched may not be over, or failed."""
        return self._last is not None and (not self._last.done or self._failure.error is not None)

    def synchronize(self) -> None:
        """Block until everything launched is over."""
        if self._last is not None:
            self._last.block()

    def forget_failure(self) -> BaseException | None:
        """Wait until everything launched is over; return the error that was raised, and raise it no more."""
        if self._last is not None:
            self._last.wait()
        error, self._failure.error = self._failure.error, None
        return error

    @property
    def runs_here(self) -> bool:
        """Return True on the worker's thread: it must not wait for its work, or call `close`."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Finish what was launched, whether it fails or not, and end the thread; a second call does nothing."""
        thread, self._thread = self._thread, None
        self._last = None
        self._stop()
        if thread is not None:
            thread.join()


def _set_threads(count: int) -> None:
    """Set the number of CPU threads for operators and kernels on this thread: PyTorch has a number for each thread."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _work(jobs: SimpleQueue[_Job | None], failure: _Failure, prepare: Callable[[], None]) -> None:
    """Do all work in order, until a None comes."""
    try:
        prepare()
    except BaseException as error:  # the host thread raises it: without this thread it would wait for ever
        failure.error = error
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            try:
                for wait in job.waits:
                    wait()
                if failure.error is None:
                    _set_threads(job.threads)
                    job.work()
            except BaseException as error:  # the host thread raises it
                failure.error = error
            over = job.over
            del job  # free its tensors now, not when the next job comes
            over.set()

"""Run the disk tier's two streams: reads and writes in order, on threads of their own.

[Note: when the disk fails]
The first failure ends both streams: what was launched behind it is dropped. A dropped read fills nothing; its callback
``lost`` is called. A dropped write leaves its source alone. Nothing else has written there: other writes would have
waited for this one and met the failure. So its bytes are kept in memory, and later reads find them there. The host
thread does all this when it first asks for something after the failure.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from ps_core._plan import Queue
from ps_core.engine._devices.disk.file import DiskFile, FileExtent, IoRequest, pieces
from ps_core.engine._support.interrupts import defer_interrupts_installing

DISK_QUEUES = (Queue.DISK_R, Queue.DISK_W)
_WORKERS = 4
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_NOWHERE = FileExtent((), 0)


@dataclass(slots=True, eq=False)
class _Transfer:
    """One read or write, or only its waits."""

    queue: Queue
    place: FileExtent
    start: int
    memory: torch.Tensor
    waits: list[Callable[[], object]]
    lost: Callable[[], None] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    worked: bool = False


@dataclass(frozen=True, slots=True)
class DiskEvent:
    """A mark behind everything launched on one of the two queues so far."""

    queue: Queue
    job: _Transfer | None
    check: Callable[[], None]

    @property
    def done(self) -> bool:
        """Return True if the transfer is over."""
        return self.job is None or self.job.done.is_set()

    def block(self) -> None:
        """Wait until the transfer is over; raise `TierFailure` if it failed."""
        if self.job is not None:
            self.job.done.wait()
            if not self.job.worked:
                self.check()


@dataclass(slots=True, eq=False)
class _IoTask:
    """One piece of a transfer, for a worker thread."""

    call: Callable[[IoRequest], None]
    piece: IoRequest
    finished: SimpleQueue[Exception | None]


class DiskStreams:
    """Read and write one file in two streams. Called by the host thread only."""

    @defer_interrupts_installing
    def __init__(self, file: DiskFile, prepare: Callable[[], object] = lambda: None) -> None:
        """Start the threads; each calls ``prepare`` first."""
        self._file = file
        self._jobs: dict[Queue, SimpleQueue[_Transfer | None]] = {queue: SimpleQueue() for queue in DISK_QUEUES}
        self._waits: dict[Queue, list[Callable[[], object]]] = {queue: [] for queue in DISK_QUEUES}
        self._last: dict[Queue, _Transfer | None] = dict.fromkeys(DISK_QUEUES)
        self._told = False
        """True if the host thread knows of the failure."""
        self._pending: deque[_Transfer] = deque()
        """Transfers that may not be done, in order of launch."""
        tasks: SimpleQueue[_IoTask | None] = SimpleQueue()
        runs = [partial(_run_queue, jobs, file, tasks) for jobs in self._jobs.values()]
        runs += [partial(_run_worker, tasks)] * _WORKERS
        self._threads = [
            threading.Thread(target=_run, args=(prepare, file, run), daemon=True, name=f"ps_core disk {index}")
            for index, run in enumerate(runs)
        ]
        for thread in self._threads:
            thread.start()
        # The threads hold no reference to this object, so that this can be freed.
        self._stop = weakref.finalize(self, _stop, list(self._jobs.values()))

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read; ``lost`` is called if it fails."""
        self._launch(Queue.DISK_R, place, start, target, lost)

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write."""
        self._launch(Queue.DISK_W, place, start, source, None)

    def _launch(
        self, queue: Queue, place: FileExtent, start: int, memory: torch.Tensor, lost: Callable[[], None] | None
    ) -> None:
        self._file.check_process()
        if self._file.failure is not None:
            self._recover()
            if queue is Queue.DISK_R:
                self._file.read(place, start, memory)
                return
            raise self._file.failure
        self._put(_Transfer(queue, place, start, memory, self._waits[queue], lost))

    @defer_interrupts_installing
    def _put(self, job: _Transfer) -> None:
        """Give a job to its thread; an interrupt in between would leave the host thread waiting for it."""
        self._waits[job.queue] = []
        self._last[job.queue] = job
        while self._pending and self._pending[0].worked:
            self._pending.popleft()
        self._pending.append(job)
        self._jobs[job.queue].put(job)

    def record(self, queue: Queue) -> DiskEvent:
        """Return an event behind everything launched on a queue so far, and behind all that the queue waits for."""
        self._file.check_process()
        if self._file.failure is not None and not self._told:
            self._raise()
        if self._waits[queue]:
            self._put(_Transfer(queue, _NOWHERE, 0, _NOTHING, self._waits[queue]))
        return DiskEvent(queue, self._last[queue], self._raise)

    def wait(self, queue: Queue, event: DiskEvent) -> None:
        """Make all work launched on a queue from now on wait for the event."""
        if event.queue is not queue and event.job is not None and not event.job.worked:
            self.wait_for(queue, event.job.done.wait)

    def wait_for(self, queue: Queue, block: Callable[[], object]) -> None:
        """Make all work launched on a queue from now on wait until ``block``, called on the queue's thread, returns."""
        self._waits[queue].append(block)

    def synchronize(self) -> None:
        """Block until both streams are idle, whether they failed or not."""
        for job in list(self._pending):
            job.done.wait()
        if self._file.failure is not None:
            self._recover()

    @property
    def runs_here(self) -> bool:
        """Return True on one of the threads: it must not wait for transfers, and must not close this object."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Finish all transfers, and end the threads; a second call does nothing."""
        self.synchronize()
        self._stop()
        for thread in self._threads:
            thread.join()

    def _raise(self) -> None:
        assert self._file.failure is not None, "nothing is dropped before something failed"
        self._recover()
        raise self._file.failure

    def _recover(self) -> None:
        """Clean up after a failure; see [Note: when the disk fails]."""
        pending, self._pending = self._pending, deque()
        self._last, self._told = dict.fromkeys(DISK_QUEUES), True  # the failure is raised once
        self._waits = {queue: [] for queue in DISK_QUEUES}
        for job in pending:
            job.done.wait()
        for job in pending:
            if job.worked:
                continue
            if job.lost is not None:
                job.lost()
            else:
                self._file.rescue(job.place, job.start, job.memory)


class DiskQueues:
    """Serve a device's two disk queues, once it has a disk tier; the device serves its other queues itself."""

    def __init__(self, prepare: Callable[[], object] = lambda: None) -> None:
        """Make queues without a disk tier; each of its threads will call ``prepare`` first."""
        self._attached: tuple[DiskFile, DiskStreams] | None = None
        self._prepare = prepare

    def attach(self, file: DiskFile) -> None:
        """Read and write this file from now on."""
        self._attached = file, DiskStreams(file, self._prepare)

    @property
    def streams(self) -> DiskStreams:
        """Return the threads that read and write."""
        assert self._attached is not None, "a disk tier is attached before it is used"
        return self._attached[1]

    @property
    def runs_here(self) -> bool:
        """Return True on a thread that reads or writes: it must not wait for these queues."""
        return self._attached is not None and self._attached[1].runs_here

    def serve(self, queue: Queue) -> bool:
        """Return True if a queue is one of these two, and there is a disk tier."""
        return self._attached is not None and queue in DISK_QUEUES

    def await_host_work(self, queue: Queue) -> None:
        """Block until one of these two queues is idle, since the host thread does its next work itself."""
        if self.serve(queue):
            self.streams.record(queue).block()

    def wait(self, queue: Queue, event: DiskEvent) -> None:
        """Make all later work on a queue wait for the event; block if no thread can wait for it."""
        if queue in DISK_QUEUES:
            self.streams.wait(queue, event)
        else:
            event.block()

    def synchronize(self) -> None:
        """Block until everything launched is done."""
        if self._attached is not None:
            self.streams.synchronize()

    def close(self) -> None:
        """End the threads and release the file; a second call does nothing."""
        attached, self._attached = self._attached, None
        if attached is not None:
            file, streams = attached
            streams.close()
            file.close()


def _run(prepare: Callable[[], object], file: DiskFile, run: Callable[[], None]) -> None:
    try:
        prepare()
    except Exception as error:  # without this thread the host thread would wait for ever
        file.broke(error)
    run()


def _run_queue(jobs: SimpleQueue[_Transfer | None], file: DiskFile, tasks: SimpleQueue[_IoTask | None]) -> None:
    """Run one stream: its jobs in order, each cut into pieces for the workers."""
    while (job := jobs.get()) is not None:
        try:
            for wait in job.waits:
                wait()
        except Exception as error:  # a card that failed raises here too
            file.broke(error)
        job.waits.clear()
        if file.failure is None:
            job.worked = _carry_out(job, file, tasks)
        if job.worked:
            job.memory, job.lost = _NOTHING, None
        job.done.set()
        del job  # or this frame would keep the job alive until the next one comes
    for _ in range(_WORKERS // len(DISK_QUEUES)):
        tasks.put(None)


def _carry_out(job: _Transfer, file: DiskFile, tasks: SimpleQueue[_IoTask | None]) -> bool:
    finished: SimpleQueue[Exception | None] = SimpleQueue()
    call = file.read_piece if job.queue is Queue.DISK_R else file.write_piece
    cut = list(pieces(job.place, job.start, job.memory))
    for piece in cut:
        tasks.put(_IoTask(call, piece, finished))
    errors = [error for error in [finished.get() for _ in cut] if error is not None]
    if errors:
        file.broke(errors[0])
    return not errors


def _run_worker(tasks: SimpleQueue[_IoTask | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.call(task.piece)
        except Exception as error:  # every waiting thread must see the failure, whatever it is
            task.finished.put(error)
        else:
            task.finished.put(None)
        del task


def _stop(jobs: list[SimpleQueue[_Transfer | None]]) -> None:
    for each in jobs:
        each.put(None)

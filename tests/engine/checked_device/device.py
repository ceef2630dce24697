"""A device that finds out whether the engine waits for everything that it has to wait for.

The CPU's own device does all work at once, so a wait that the engine forgot would never show. Here there are two lines
of defence: ``check`` compares what is declared by vector clocks (see [Note: clocks] in `race_check`), and ``seed``
delays copies for as long as the waits allow, so that reading without waiting sees old bytes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from threading import RLock

import torch

from checked_device.addresses import AddressNames
from checked_device.faults import InjectedFault
from checked_device.race_check import (
    QUEUES_AND_WORKER,
    START,
    WORKER,
    Clock,
    History,
    QueueOrWorker,
    RaceDetector,
    Range,
)
from checked_device.worker import CheckedWorker, WorkMark
from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.file import DiskFile, FileExtent


@dataclass(frozen=True, slots=True)
class Mark:
    """An event: a place in a queue, for each of those who keep track."""

    queue: Queue
    clock: Clock = START
    position: int = 0
    """How many delayed operations of the queue come before it."""
    perform: Callable[[Queue, int], None] | None = field(default=None, compare=False)
    """Does them now; None: nothing is delayed."""

    def block(self) -> None:
        """For a thread that answers other ranks, of which no order is checked."""
        if self.perform is not None:
            self.perform(self.queue, self.position)


class CheckedDevice(CpuDevice):
    """A `CpuDevice` that checks order, delays copies, or both.

    ``fault`` leaves one kind of wait out, to test that the other two notice. The disk's streams are the host thread's.
    """

    def __init__(
        self,
        *,
        name: str = "emulated",
        check: bool = False,
        seed: int | None = None,
        fault: InjectedFault | None = None,
    ) -> None:
        if not check and seed is None:
            what = "nothing to do" if fault is None else f"fault: {fault.value!r} shows only"
            raise InvalidInput(f"CheckedDevice: {what} without check=True or a seed; found neither")
        super().__init__(name=name)
        self.synchronous = False
        history = History()
        self._places = AddressNames(history.forget)
        self._ordering = RaceDetector(self._places.name, history) if check else None
        self.delays = None if seed is None else _Delays(seed)
        self._worker = CheckedWorker(self)
        self._saboteur = None if fault is None else _Saboteur(fault, seed or 0)
        self._file: DiskFile | None = None

    def _memory(self, kind: str, size_bytes: int) -> torch.Tensor:
        memory = super()._memory(kind, size_bytes)
        self._places.add(memory, kind, weakref.ref(memory))
        return memory

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        self.check_alike(queue, target, source)
        if not (target.is_contiguous() and source.is_contiguous()):
            raise PlanMismatch(
                f"copy on {queue.name}: expected contiguous tensors, found strided ones; copy whole slots"
            )
        self._launch(queue, "copy", (source,), (target,))
        if self.delays is not None and queue is not Queue.CPU:
            target, source = self._places.bytes_of(target), self._places.bytes_of(source)
            self._later(queue, partial(target.copy_, source))
        else:
            super().copy(queue, target, source)

    # The disk, which the host thread reads and writes.

    def attach(self, file: DiskFile) -> None:
        self._file = file

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        assert self._file is not None, "a disk tier is attached before it is used"
        from_disk = self._places.on_disk(place, start, target.numel())
        self._launch(Queue.DISK_R, "disk read", (), (target,), (from_disk, ()))
        self._later(Queue.DISK_R, partial(self._file.read, place, start, self._places.bytes_of(target)))

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        assert self._file is not None, "a disk tier is attached before it is used"
        to_disk = self._places.on_disk(place, start, source.numel())
        self._launch(Queue.DISK_W, "disk write", (source,), (), ((), to_disk))
        self._later(Queue.DISK_W, partial(self._file.write, place, start, self._places.bytes_of(source)))

    def _later(self, queue: QueueOrWorker, work: Callable[[], object]) -> None:
        if self.delays is None:
            work()
        else:
            self.delays.later(queue, work)
            self.delays.stir()

    # Order.

    def declare_access(
        self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        self._launch(queue, what, reads, writes)
        if self.delays is not None:
            self.delays.stir()
            self.delays.perform(queue)  # for the host thread does the work now, and what comes before it is due

    def _launch(
        self,
        queue: QueueOrWorker,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        disk: tuple[Sequence[Range], Sequence[Range]] = ((), ()),
    ) -> None:
        """``disk``: what is read and written of the disk tier's file."""
        if self._ordering is not None:
            self._places.tidy()
            read, written = self._places.ranges(reads), self._places.ranges(writes)
            self._ordering.launch(queue, what, [*read, *disk[0]], [*written, *disk[1]])

    def record(self, queue: Queue) -> Mark:
        mark = Mark(
            queue,
            START if self._ordering is None else self._ordering.record(queue),
            0 if self.delays is None else self.delays.position(queue),
            None if self.delays is None else self.delays.perform,
        )
        if self.delays is not None:
            self.delays.stir()
        return mark if self._saboteur is None else self._saboteur.record(mark)

    # The worker.

    @property
    def worker(self) -> CheckedWorker | None:  # type: ignore[override]  # tests change the name
        """Return it, unless the processor computes: there is no accelerator to work beside."""
        return self._worker if self.name != "cpu" else None

    def worker_works(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], work: Callable[[], object]
    ) -> tuple[Clock, int]:
        """Launch work; return the clock behind it, and how much of the worker's comes before that."""
        self._launch(WORKER, what, reads, writes)
        clock = START if self._ordering is None else self._ordering.record(WORKER)
        self._later(WORKER, work)
        return clock, 0 if self.delays is None else self.delays.position(WORKER)

    def worker_waits_for(self, event: Event) -> None:
        """Make what the worker does from here on come after an event."""
        assert isinstance(event, Mark), "an event of a stream"
        if self._saboteur is not None and self._saboteur.ignores(Queue.CPU, event):
            return
        if self._ordering is not None:
            self._ordering.wait(WORKER, event.clock)
        if self.delays is not None:
            self.delays.wait(WORKER, event)

    def host_waits_for(self, mark: WorkMark) -> None:
        """Have the worker's work done up to a mark."""
        if self._ordering is not None:
            self._ordering.wait(Queue.CPU, mark.clock)
        if self.delays is not None:
            self.delays.perform(WORKER, mark.position)

    def wait(self, queue: Queue, event: Event) -> None:
        if isinstance(event, WorkMark):
            if self._saboteur is None or not self._saboteur.ignores(queue, event):
                event.block()
            return
        if not isinstance(event, Mark):
            raise InvalidInput(f"wait: expected an event of this device, found {type(event).__name__}")
        if self._saboteur is not None and self._saboteur.ignores(queue, event):
            return
        if self._ordering is not None:
            self._ordering.wait(queue, event.clock)
        if self.delays is not None:
            self.delays.stir()
            self.delays.wait(queue, event)

    def synchronize(self) -> None:
        if self._ordering is not None:
            self._ordering.synchronize()
        if self.delays is not None:
            for queue in QUEUES_AND_WORKER:
                self.delays.perform(queue)
        self._worker.synchronize()

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()


class _Saboteur:
    """Carry out an `InjectedFault`."""

    def __init__(self, fault: InjectedFault, seed: int) -> None:
        self._fault = fault
        self._random = Random(seed)
        self._last = [Mark(queue) for queue in Queue]

    def ignores(self, queue: Queue, event: Mark | WorkMark) -> bool:
        return queue is self._fault.waiting and event.queue is self._fault.recorded

    def record(self, mark: Mark) -> Mark:
        if self._fault is InjectedFault.LOST_EVENT and self._random.random() < 0.25:
            return Mark(mark.queue)
        if self._fault is InjectedFault.STALE_EVENT:
            self._last[mark.queue], mark = mark, self._last[mark.queue]
        return mark


class _Delays:
    """Copies (reads and writes of the disk, and the worker's work too) that are launched but not done yet.

    Each is done at a random later call, in its queue's order, or when something needs it done.
    """

    def __init__(self, seed: int) -> None:
        self._performing = RLock()
        """For threads that answer other ranks wait for operations too."""
        self._random = Random(seed)
        self._eagerness = [self._random.choice((0.0, 0.1, 0.7)) for _ in Queue]  # one may be quick, another slow
        self._eagerness.append(Random(-seed).choice((0.0, 0.1, 0.7)))
        self._todo: list[deque[Mark | Callable[[], object]]] = [deque() for _ in QUEUES_AND_WORKER]
        self._begun = [
            0 for _ in QUEUES_AND_WORKER
        ]  # Invariant: position(queue) operations launched, of which todo are left

    def position(self, queue: QueueOrWorker) -> int:
        """How many operations were launched on a queue."""
        return self._begun[queue] + len(self._todo[queue])

    def begun(self, queue: QueueOrWorker) -> int:
        """How many of them are done."""
        return self._begun[queue]

    def later(self, queue: QueueOrWorker, work: Callable[[], object]) -> None:
        """To be done later."""
        self._todo[queue].append(work)

    def wait(self, queue: QueueOrWorker, event: Mark) -> None:
        """What follows is to be done after an event."""
        if queue is Queue.CPU:
            self.perform(event.queue, event.position)
        else:
            self._todo[queue].append(event)

    def stir(self) -> None:
        """Perhaps do a thing or two."""
        for queue, eagerness in zip(QUEUES_AND_WORKER, self._eagerness, strict=True):
            if self._todo[queue] and self._random.random() < eagerness:
                self.perform(queue, self._begun[queue] + 1)

    def perform(self, queue: QueueOrWorker, position: int | None = None) -> None:
        """Do a queue's operations up to a position (None: all), each after what it waits for."""
        with self._performing:
            self._perform([(queue, self.position(queue) if position is None else position)])

    def _perform(self, goals: list[tuple[QueueOrWorker, int]]) -> None:
        while goals:
            queue, position = goals[-1]
            if self._begun[queue] >= position:
                goals.pop()
                continue
            first = self._todo[queue][0]
            if isinstance(first, Mark) and self._begun[first.queue] < first.position:
                goals.append((first.queue, first.position))
                continue
            self._todo[queue].popleft()
            self._begun[queue] += 1
            if not isinstance(first, Mark):
                first()

"""A stand-in for an accelerator on the CPU: the streams and events of one, and a check that they are used rightly.

Work is really done by the host thread, at once, so a wait that the engine forgot would never show. Hence two lines of
defence, for tests: ``check`` compares what is declared by vector clocks (see [Note: clocks] in `ordering`), and
``seed`` delays copies for as long as the waits allow, so that reading without waiting sees old bytes. And
``link_bytes_per_s`` holds copies to and from tier 0 to a rate, for benchmarks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.cpu.addresses import AddressNames
from ps_core.engine._devices.cpu.faults import InjectedFault
from ps_core.engine._devices.cpu.race_check import START, Clock, History, RaceDetector, Range
from ps_core.engine._devices.cpu.slow_links import ThrottledLinks
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.file import DiskFile, FileExtent
from ps_core.engine._devices.disk.pages import give_back_pages
from ps_core.engine._devices.disk.streams import DISK_QUEUES, DiskEvent, DiskQueues
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_kernels import PinnedArena


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event: a place in a queue, for each of those who keep track."""

    queue: Queue
    clock: Clock = START
    position: int = 0
    """How many delayed operations of the queue come before it."""
    ready_s: float = 0.0
    """When the links will have carried what comes before it."""


class CpuDevice:
    """A `Device` whose tier 0 is host memory.

    With neither ``check``, ``seed`` nor ``link_bytes_per_s``, a copy is a copy and events cost nothing. ``fault``
    leaves one kind of wait out, to test that the other two notice. The disk's streams run on threads, but with
    ``check`` or ``seed`` they are the host thread's too.
    """

    def __init__(
        self,
        *,
        name: str = "emulated",
        check: bool = False,
        seed: int | None = None,
        fault: InjectedFault | None = None,
        link_bytes_per_s: float | None = None,
    ) -> None:
        if fault is not None and not check and seed is None:
            raise InvalidInput(f"fault: {fault.value!r} shows only with check=True or a seed; found neither")
        if link_bytes_per_s is not None and not link_bytes_per_s > 0:
            raise InvalidInput(f"link_bytes_per_s: expected a rate above 0, found {link_bytes_per_s!r}")
        self.name = name
        self.torch_device = torch.device("cpu")
        self.lazy, self.beside = True, False
        self.machine = None
        history = History()
        self._places = AddressNames(history.forget)
        self._ordering = RaceDetector(self._places.name, history) if check else None
        self._delays = None if seed is None else _Delays(seed)
        self._links = None if link_bytes_per_s is None else ThrottledLinks(link_bytes_per_s)
        self._saboteur = None if fault is None else _Saboteur(fault, seed or 0)
        self._plain = not check and seed is None and link_bytes_per_s is None
        self._done = [_Mark(queue) for queue in Queue]
        self._file: DiskFile | None = None
        self._disk = DiskQueues()
        """Without a file where order is checked or copies are delayed: the host thread reads and writes then."""

    def tide(self) -> TensorBytesTracker:
        """A count of the tensors on the CPU."""
        return TensorBytesTracker()

    def memory_bytes(self) -> None:
        """A budget says how much it has."""

    def short_bytes(self) -> int:
        """The system would have ended the process."""
        return 0

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Memory of tier 0."""
        return self._memory("arena", size_bytes)

    def host(self, size_bytes: int) -> torch.Tensor:
        """Host memory."""
        return self._memory("host", size_bytes)

    def _memory(self, kind: str, size_bytes: int) -> torch.Tensor:
        if size_bytes < 1:
            raise InvalidInput(f"{kind}: expected a size of at least 1 byte, found {size_bytes!r}")
        memory = PinnedArena(size_bytes, pin=False).tensor(0, size_bytes, torch.uint8)
        if not self._plain:
            self._places.add(memory, kind, weakref.ref(memory))
        return memory

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy."""
        if target.numel() != source.numel() or target.dtype != source.dtype:
            raise PlanMismatch(
                f"copy on {queue.name}: expected the same shape and dtype on both sides, found {source.dtype} "
                f"{tuple(source.shape)} to {target.dtype} {tuple(target.shape)}; view both as bytes"
            )
        if self._plain:
            target.copy_(source)
            return
        if not (target.is_contiguous() and source.is_contiguous()):
            raise PlanMismatch(
                f"copy on {queue.name}: expected contiguous tensors, found strided ones; copy whole slots"
            )
        self._launch(queue, "copy", (source,), (target,))
        if self._links is not None:
            self._links.copy(queue, target.nbytes)
        if self._delays is not None and queue is not Queue.CPU:
            target, source = self._places.bytes_of(target), self._places.bytes_of(source)
            self._delays.later(queue, partial(target.copy_, source))
            self._delays.stir()
        else:
            target.copy_(source)

    # The disk.

    def attach(self, file: DiskFile) -> None:
        """Have a disk tier."""
        self._file = file
        if self._ordering is None and self._delays is None:
            self._disk.attach(file)

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read from the disk tier."""
        assert self._file is not None, "a disk tier is attached before it is used"
        if self._disk.serve(Queue.DISK_R):
            self._disk.streams.read(target, place, start, lost)
            return
        from_disk = self._places.on_disk(place, start, target.numel())
        self._launch(Queue.DISK_R, "disk read", (), (target,), (from_disk, ()))
        self._later(Queue.DISK_R, partial(self._file.read, place, start, self._places.bytes_of(target)))

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write to the disk tier."""
        assert self._file is not None, "a disk tier is attached before it is used"
        if self._disk.serve(Queue.DISK_W):
            self._disk.streams.write(place, start, source)
            return
        to_disk = self._places.on_disk(place, start, source.numel())
        self._launch(Queue.DISK_W, "disk write", (source,), (), ((), to_disk))
        self._later(Queue.DISK_W, partial(self._file.write, place, start, self._places.bytes_of(source)))

    def _later(self, queue: Queue, work: Callable[[], object]) -> None:
        if self._delays is None:
            work()
        else:
            self._delays.later(queue, work)
            self._delays.stir()

    def trim(self, memory: torch.Tensor) -> None:
        """Let the system have these pages."""
        give_back_pages(memory)

    def work(self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Declare what the work launched from here on touches."""
        if queue in DISK_QUEUES:
            self._disk.await_host_work(queue)
        if self._plain:
            return
        self._launch(queue, what, reads, writes)
        if self._delays is not None:
            self._delays.stir()
            self._delays.perform(queue)  # for the host thread does the work now, and what comes before it is due

    def _launch(
        self,
        queue: Queue,
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

    def adopt(self) -> None:
        """Threads are alike."""

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """All work is the host thread's."""
        return nullcontext()

    def record(self, queue: Queue) -> _Mark | DiskEvent:
        """An event behind everything launched on a queue so far."""
        if self._disk.serve(queue):
            return self._disk.streams.record(queue)
        if self._plain:
            return self._done[queue]
        mark = _Mark(
            queue,
            START if self._ordering is None else self._ordering.record(queue),
            0 if self._delays is None else self._delays.position(queue),
            0.0 if self._links is None else self._links.ready_s(queue),
        )
        if self._delays is not None:
            self._delays.stir()
        return mark if self._saboteur is None else self._saboteur.record(mark)

    def wait(self, queue: Queue, event: Event) -> None:
        """What is launched on a queue from here on comes after the event."""
        if isinstance(event, DiskEvent):
            self._disk.wait(queue, event)  # which blocks for all other queues: the host thread does their work
            return
        if self._plain:
            return
        if not isinstance(event, _Mark):
            raise InvalidInput(f"wait: expected an event of this device, found {type(event).__name__}")
        if self._saboteur is not None and self._saboteur.ignores(queue, event):
            return
        if self._ordering is not None:
            self._ordering.wait(queue, event.clock)
        if self._delays is not None:
            self._delays.stir()
            self._delays.wait(queue, event)
        if self._links is not None:
            self._links.wait(queue, event.ready_s)

    def synchronize(self) -> None:
        """Block until everything launched is done."""
        if self._ordering is not None:
            self._ordering.synchronize()
        if self._delays is not None:
            for queue in Queue:
                self._delays.perform(queue)
        if self._links is not None:
            self._links.synchronize()
        self._disk.synchronize()

    def close(self) -> None:
        """Finish what was launched; memory goes back with the tensors, and the disk's at once."""
        self.synchronize()
        self._disk.close()
        if self._file is not None:
            self._file.close()


class _Saboteur:
    """Carry out an `InjectedFault`."""

    def __init__(self, fault: InjectedFault, seed: int) -> None:
        self._fault = fault
        self._random = Random(seed)
        self._last = [_Mark(queue) for queue in Queue]

    def ignores(self, queue: Queue, event: _Mark) -> bool:
        return queue is self._fault.waiting and event.queue is self._fault.recorded

    def record(self, mark: _Mark) -> _Mark:
        if self._fault is InjectedFault.LOST_EVENT and self._random.random() < 0.25:
            return _Mark(mark.queue)
        if self._fault is InjectedFault.STALE_EVENT:
            self._last[mark.queue], mark = mark, self._last[mark.queue]
        return mark


class _Delays:
    """Copies (reads and writes of the disk too) that are launched but not done yet.

    Each is done at a random later call, in its queue's order, or when something needs it done.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._eagerness = [self._random.choice((0.0, 0.1, 0.7)) for _ in Queue]  # one may be quick, another slow
        self._todo: list[deque[_Mark | Callable[[], object]]] = [deque() for _ in Queue]
        self._begun = [0 for _ in Queue]  # Invariant: position(queue) operations launched, of which todo are left

    def position(self, queue: Queue) -> int:
        """How many operations were launched on a queue."""
        return self._begun[queue] + len(self._todo[queue])

    def later(self, queue: Queue, work: Callable[[], object]) -> None:
        """To be done later."""
        self._todo[queue].append(work)

    def wait(self, queue: Queue, event: _Mark) -> None:
        """What follows is to be done after an event."""
        if queue is Queue.CPU:
            self.perform(event.queue, event.position)
        else:
            self._todo[queue].append(event)

    def stir(self) -> None:
        """Perhaps do a thing or two."""
        for queue, eagerness in zip(Queue, self._eagerness, strict=True):
            if self._todo[queue] and self._random.random() < eagerness:
                self.perform(queue, self._begun[queue] + 1)

    def perform(self, queue: Queue, position: int | None = None) -> None:
        """Do a queue's operations up to a position (None: all), each after what it waits for."""
        goals = [(queue, self.position(queue) if position is None else position)]
        while goals:
            queue, position = goals[-1]
            if self._begun[queue] >= position:
                goals.pop()
                continue
            first = self._todo[queue][0]
            if isinstance(first, _Mark) and self._begun[first.queue] < first.position:
                goals.append((first.queue, first.position))
                continue
            self._todo[queue].popleft()
            self._begun[queue] += 1
            if not isinstance(first, _Mark):
                first()

"""Implement `Device` for CUDA: memory, streams and events.

[Note: CUDA streams]
The compute queue is the stream that PyTorch works on when the engine is called. That stream may change. Then the new
one is made to wait for the old one, and recorded as a user of the engine's blocks. Copies in each direction have a
stream of their own, made once. The host thread knows of their work only after it has waited for an event. An event is
reused when no reference to it is left: waiting streams remember its recording.

The stream of collectives belongs to a thread of its own (see [Note: two threads] in `_sharding.collective_streams`). So
nothing is remembered of that stream between two calls. Both threads use the unused events and the figures about memory.
These change only in steps that no other thread can interrupt.

[Note: memory on a CUDA device]
The arena is one allocation. It takes all bytes that the peak of non-model bytes leaves free. It is made once that peak
is known, and made anew only when a plan wants another length. A slot that does not fit into it is an allocation of its
own. Such are slots reserved before there is a plan, and those kept in fp32. So are slots of a step, when there are few
non-model bytes. All these allocations come from PyTorch's allocator, so that it can use its cached memory for either. A
block belongs to the stream that was current when the block was made. So the copy streams wait for that stream before
they use a block, and are recorded as its users, once. A freed block is not reused before they are done. Within a block,
slots follow each other by the engine's own events. A tensor of the user's is recorded at each copy: nobody knows when
it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from ps_core._errors import InvalidInput
from ps_core._plan import Queue
from ps_core._simulate.machine import Machine, default_machine
from ps_core.engine._devices.cuda.allocator_cap import AllocatorCap
from ps_core.engine._devices.cuda.memory import AllocatorBytesTracker, EngineAllocations
from ps_core.engine._devices.cuda.out_of_memory import OutOfMemoryObserver
from ps_core.engine._devices.cuda.runtime import CudaRuntime, RawEvent, Stream, torch_runtime
from ps_core.engine._devices.cuda.timer import CudaTimer
from ps_core.engine._devices.device import Event, Worker
from ps_core.engine._devices.disk.file import DiskFile, FileExtent
from ps_core.engine._devices.disk.queues import DISK_QUEUES, DiskEvent, DiskQueues
from ps_core.engine._devices.host_pool import HostPool
from ps_core.engine._devices.host_worker import HostWorker, WorkDone


class CudaEvent:
    """One recording of a CUDA event, and the event itself."""

    __slots__ = ("_pool", "_queue", "raw")

    def __init__(self, queue: Queue, raw: RawEvent | None, pool: list[RawEvent]) -> None:
        self._queue, self._pool = queue, pool
        self.raw = raw
        """The CUDA event; None: there is nothing to wait for."""

    @property
    def queue(self) -> Queue:
        """Return the queue that the event was recorded on."""
        return self._queue

    def block(self) -> None:
        """Wait until the event is over."""
        if self.raw is not None:
            self.raw.synchronize()

    def __del__(self) -> None:
        if self.raw is not None:
            self._pool.append(self.raw)


class CudaDevice:
    """The `Device` for CUDA; see [Note: CUDA streams] and [Note: memory on a CUDA device]."""

    def __init__(self, runtime: CudaRuntime, *, pin: bool = True) -> None:
        self.name = "cuda"
        self.torch_device = runtime.torch_device
        self.overcommits = self.shares_memory = False
        self.has_collective_stream = True
        self.synchronous = False
        self._worker = HostWorker(runtime.bind_thread)
        self._runtime = runtime
        self._streams: dict[Queue, Stream] = {queue: runtime.stream() for queue in (Queue.H2D, Queue.D2H, Queue.COLL)}
        self._last: dict[Queue, CudaEvent | None] = dict.fromkeys((Queue.H2D, Queue.D2H))
        """The last event of each queue; None: work was launched behind it."""
        self._compute: Stream | None = None
        self._pool: list[RawEvent] = []
        self._timing_events: list[RawEvent] = []
        self._owned = EngineAllocations.of(runtime)
        self._host = HostPool(partial(runtime.host, pin=pin), self._after_copies)
        self._disk = DiskQueues(runtime.bind_thread)
        self._failures = runtime.allocated().failures
        self._cap = AllocatorCap.of(runtime)
        weakref.finalize(self, self._cap.remove, runtime, id(self)).atexit = False
        self._observer = OutOfMemoryObserver(self, self._owned, partial(self._cap.lift, runtime))
        runtime.watch_failures(self._observer)

    @property
    def runs_here(self) -> bool:
        """Return True on the worker's thread, or one of the disk: it must not wait for these, or close the device."""
        return self._worker.runs_here or self._disk.runs_here

    @property
    def worker(self) -> Worker:
        """Return the thread that steps while the device computes."""
        return self._worker

    def timer(self) -> CudaTimer:
        """Return a timer for this device's queues."""
        return CudaTimer(self._runtime, self._stream, self._timing_events, self._disk, self._worker)

    # Memory.

    def nonmodel_bytes(self) -> AllocatorBytesTracker:
        """Return a counter that reads PyTorch's allocator."""
        return AllocatorBytesTracker(self._runtime, self._owned)

    @property
    def machine(self) -> Machine:
        """Return the built-in machine that is most like this one."""
        return default_machine(self._runtime.free_bytes()[1], self._runtime.name)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the bytes that could be allocated now, and those of the device; a cap of other code counts."""
        free, whole = self._runtime.free_bytes()
        allowed = self._cap.foreign_bytes(self._runtime)
        if allowed is None:
            return free, whole
        return max(0, min(free, allowed - self._runtime.allocated().now)), min(whole, allowed)

    def cap_allocator(self, budget_bytes: int | None) -> None:
        """Cap PyTorch's allocator at the budgets of the models on this device, where all have plans."""
        self._cap.put(self._runtime, id(self), budget_bytes)

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory."""
        before = self._runtime.allocated().now
        try:
            memory = self._runtime.empty(size_bytes)
        except torch.OutOfMemoryError as error:
            self.raise_out_of_memory(error)
            raise
        taken = max(size_bytes, self._runtime.allocated().now - before)
        self._owned.add(memory, taken)
        ready = self._recorded(Queue.COMPUTE)
        for queue, stream in self._streams.items():
            self.wait(queue, ready)
            self._runtime.used_by(memory, stream)
        return memory

    @contextmanager
    def changing_memory(self) -> Iterator[None]:
        """Read the allocator's peak for all models before, and reset it behind."""
        self._owned.before_reset()
        try:
            yield
        finally:
            self._runtime.reset_peak()

    def release_freed(self) -> None:
        """Return the allocator's cached memory to the device."""
        self._runtime.release_cached()

    def host(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory, pinned unless pinning was refused."""
        return self._host.allocate(size_bytes)

    def kept_host(self, size_bytes: int) -> torch.Tensor | None:
        """Return a registered block that is free; None: there is none of this size."""
        return self._host.allocate_kept(size_bytes)

    def prepare_host(self, sizes: Iterable[int]) -> None:
        """Register and pin memory for all of these blocks at once."""
        self._host.prepare(sizes)

    def trim_host(self) -> None:
        """Unpin what no block lies in; that waits for the whole device."""
        self._host.trim()

    def take_failed_bytes(self) -> int:
        """Return how many bytes could not be allocated since the last call; at least 1 if memory ran out."""
        failures = self._runtime.allocated().failures
        missing = self._observer.take_missing_bytes()
        if failures == self._failures:
            return missing
        self._failures = failures
        self._runtime.release_cached()  # cached memory in small pieces may have been unusable
        return max(1, missing)

    def raise_out_of_memory(self, error: BaseException) -> None:
        """Raise the engine's own error in place of PyTorch's."""
        self._observer.raise_named(error)

    # The disk.

    def attach(self, file: DiskFile) -> None:
        """Add a disk tier; its threads read into pinned memory and write from it."""
        self._disk.attach(file)

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read from the disk tier."""
        self._disk.streams.read(target, place, start, lost)

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write to the disk tier."""
        self._disk.streams.write(place, start, source)

    def trim(self, memory: torch.Tensor) -> None:
        """Do nothing: the arena has no pages of the system."""

    # Work.

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy."""
        stream = self._streams.get(queue)
        if stream is None:
            target.copy_(source)
            return
        self._runtime.copy(stream, target, source)
        for tensor in (target, source):
            if not self._owned.has(tensor):
                self._runtime.used_by(tensor, stream)
        self._given(queue)

    def declare_access(
        self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Check nothing; but notice here if PyTorch's current stream changed."""
        if queue is Queue.COMPUTE:
            self._stream(queue)
        else:
            self._disk.await_host_work(queue)

    def bind_thread(self) -> None:
        """Make this device current for the calling thread, which would use the first device otherwise."""
        self._runtime.bind_thread()

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Launch PyTorch's work on a queue's stream, within the context."""
        stream = self._streams.get(queue)
        if stream is None:
            return nullcontext()
        self._given(queue)
        return self._runtime.using(stream)

    def _given(self, queue: Queue) -> None:
        if queue in self._last:
            self._last[queue] = None

    def _stream(self, queue: Queue) -> Stream:
        if queue is not Queue.COMPUTE:
            return self._streams[queue]
        stream = self._runtime.current()
        last, self._compute = self._compute, stream
        if last is not None and last != stream:
            raw = self._event()
            raw.record(last)
            stream.wait_event(raw)
            self._pool.append(raw)
            for block in self._owned.blocks():
                self._runtime.used_by(block, stream)
        return stream

    # Events.

    def record(self, queue: Queue) -> CudaEvent | DiskEvent:
        """Record an event behind everything launched on a queue so far."""
        if self._disk.serve(queue):
            return self._disk.streams.record(queue)
        return self._recorded(queue)

    def _recorded(self, queue: Queue) -> CudaEvent:
        if queue is Queue.CPU or queue in DISK_QUEUES:
            return CudaEvent(queue, None, self._pool)  # there is nothing to wait for
        known = self._last.get(queue)
        if known is not None:
            return known
        made = CudaEvent(queue, self._event(), self._pool)
        assert made.raw is not None, "it has just been made"
        made.raw.record(self._stream(queue))
        if queue in self._last:
            self._last[queue] = made
        return made

    def _event(self) -> RawEvent:
        try:
            return self._pool.pop()
        except IndexError:
            return self._runtime.event()

    def wait(self, queue: Queue, event: Event) -> None:
        """Run what is launched on a queue from here on after the event."""
        if isinstance(event, DiskEvent):
            self._disk.wait(queue, event)  # blocks this thread: no stream can wait for a thread
            return
        if isinstance(event, WorkDone):
            if queue in DISK_QUEUES:
                self._disk.streams.wait_for(queue, event.wait)
            else:
                event.block()  # no stream can wait for a thread
            return
        if not isinstance(event, CudaEvent):
            raise InvalidInput(f"wait: expected an event of this device, found {type(event).__name__}")
        if event.raw is None:
            return
        if queue in DISK_QUEUES:
            self._disk.streams.wait_for(queue, event.block)  # the queue's own thread waits
            return
        if queue is Queue.CPU:
            event.block()
            return
        stream = self._stream(queue)
        if event.queue is queue:
            return
        stream.wait_event(event.raw)
        self._given(queue)

    def _after_copies(self) -> Callable[[], None]:
        """Return a call, for any thread, that blocks until the copies launched so far are done."""
        events = []
        for queue, stream in self._streams.items():
            raw = self._event()
            raw.record(stream)
            events.append(CudaEvent(queue, raw, self._pool))

        def wait() -> None:
            for event in events:
                self.wait(Queue.CPU, event)

        return wait

    def synchronize(self) -> None:
        """Block until everything launched is done."""
        self._runtime.synchronize()
        self._worker.synchronize()
        self._disk.synchronize()

    def close(self) -> None:
        """Finish what was launched; free memory kept for later, and close the disk."""
        self._runtime.synchronize()
        self._worker.close()
        self._disk.synchronize()
        self._host.close()
        self._disk.close()
        self._cap.remove(self._runtime, id(self))


def cuda_device(name: str, *, pin: bool) -> CudaDevice:
    """Return the device of a name: ``"cuda"`` (PyTorch's current device) or ``"cuda:1"``."""
    try:
        where = torch.device(name)
    except RuntimeError:
        raise InvalidInput(f"device must be 'cuda' or like 'cuda:1', found {name!r}") from None
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"device={name!r}: torch finds no CUDA device here (`pstar doctor` says what there is); "
            "device='emulated' runs the same engine on the CPU"
        )
    index = torch.cuda.current_device() if where.index is None else where.index
    if index >= torch.cuda.device_count():
        raise InvalidInput(f"device={name!r}: this computer has {torch.cuda.device_count()} CUDA devices, from cuda:0")
    return CudaDevice(torch_runtime(index), pin=pin)

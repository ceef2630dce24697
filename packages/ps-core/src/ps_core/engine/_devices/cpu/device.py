"""Implement the device of "cpu" and "emulated": the host thread does all work at once, except the disk's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.device import Event, Worker
from ps_core.engine._devices.disk.file import DiskFile, FileExtent
from ps_core.engine._devices.disk.pages import give_back_pages
from ps_core.engine._devices.disk.queues import DISK_QUEUES, DiskEvent, DiskQueues
from ps_core.engine._devices.host_pool import HostPool
from ps_core.engine._devices.tensor_bytes import TensorBytesTracker
from ps_core.engine._devices.timer import HostTimer
from ps_kernels import InvalidArgument, PinnedArena


@dataclass(frozen=True, slots=True)
class CpuEvent:
    """An event that is always complete."""

    queue: Queue

    def block(self) -> None:
        """Return at once."""


def _nothing() -> None:
    """Wait for nothing: copies are done when they are launched."""


def private_memory(size_bytes: int) -> torch.Tensor:
    """Return memory of this process alone, as bytes."""
    return PinnedArena(size_bytes, pin=False).tensor(0, size_bytes, torch.uint8)


class CpuDevice:
    """A `Device` whose tier 0 is host memory. Copies are done when they are launched, and events cost nothing."""

    def __init__(self, *, name: str = "emulated", keeps_host_memory: bool = False) -> None:
        """``keeps_host_memory``: host memory that is released is kept for the next use, as pinned memory is."""
        self.name = name
        self.torch_device = torch.device("cpu")
        self.overcommits, self.has_collective_stream, self.shares_memory = True, False, False
        self.machine = None
        self.synchronous = True
        """True until there is a disk."""
        self._events = [CpuEvent(queue) for queue in Queue]
        self._disk = DiskQueues()
        self._allocate: Callable[[int], torch.Tensor] = private_memory
        self._kept = HostPool(partial(PinnedArena, pin=False), lambda: _nothing) if keeps_host_memory else None

    @property
    def runs_here(self) -> bool:
        """Return True on a thread of the disk: it must not wait for that, or close the device."""
        return self._disk.runs_here

    @property
    def worker(self) -> Worker | None:
        """Return None: there is nothing to work beside."""
        return None

    def timer(self) -> HostTimer:
        """Return a timer for this device's queues."""
        return HostTimer(self._disk, self.worker)

    def nonmodel_bytes(self) -> TensorBytesTracker:
        """Return a tracker of the tensors on the CPU."""
        return TensorBytesTracker()

    def memory_bytes(self) -> None:
        """Return None: a budget says how much memory there is."""

    def cap_allocator(self, budget_bytes: int | None) -> None:
        """Do nothing: the system's allocator has no cap."""

    def take_failed_bytes(self) -> int:
        """Return 0: where memory runs out, the system ends the process."""
        return 0

    def raise_out_of_memory(self, error: BaseException) -> None:
        """Do nothing: memory of the CPU has no error of its own."""

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Allocate memory of tier 0."""
        return self._memory("arena", size_bytes)

    def changing_memory(self) -> AbstractContextManager[None]:
        """Do nothing: other models' tensors are counted one by one."""
        return nullcontext()

    def release_freed(self) -> None:
        """Do nothing: the system has it."""

    def host(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory."""
        if self._kept is not None and size_bytes > 0 and not self.shares_memory:
            return self._kept.allocate(size_bytes)
        return self._memory("host", size_bytes)

    def kept_host(self, size_bytes: int) -> torch.Tensor | None:
        """Return a block that is free; None: there is none of this size."""
        return None if self._kept is None else self._kept.allocate_kept(size_bytes)

    def prepare_host(self, sizes: Iterable[int]) -> None:
        """Allocate memory for all of these blocks at once, if memory is kept."""
        if self._kept is not None and not self.shares_memory:
            self._kept.prepare(sizes)

    def trim_host(self) -> None:
        """Give back what no block lies in, if memory is kept."""
        if self._kept is not None:
            self._kept.trim()

    def use_memory(self, allocate: Callable[[int], torch.Tensor]) -> None:
        """Take all memory from ``allocate`` from now on; while that raises `MemoryError`, from the system."""
        self._allocate, self.shares_memory = allocate, True

    def _memory(self, kind: str, size_bytes: int) -> torch.Tensor:
        if size_bytes < 1:
            raise InvalidInput(f"{kind}: expected a size of at least 1 byte, found {size_bytes!r}")
        try:
            return self._allocate(size_bytes)
        except MemoryError:
            return private_memory(size_bytes)
        except InvalidArgument as error:
            reason = error.__cause__ or error
            raise InvalidInput(
                f"{kind}: cannot allocate {size_bytes:,} bytes ({reason}); expected a smaller Budget"
            ) from None

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, at once."""
        self.check_alike(queue, target, source)
        target.copy_(source)

    @staticmethod
    def check_alike(queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Raise `PlanMismatch` if the two sides of a copy differ in shape or dtype."""
        if target.numel() != source.numel() or target.dtype != source.dtype:
            raise PlanMismatch(
                f"copy on {queue.name}: expected the same shape and dtype on both sides, found {source.dtype} "
                f"{tuple(source.shape)} to {target.dtype} {tuple(target.shape)}; view both as bytes"
            )

    # The disk.

    def attach(self, file: DiskFile) -> None:
        """Add a disk tier; threads of its own read and write it."""
        self.synchronous = False
        self._disk.attach(file)

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read from the disk tier."""
        self._disk.streams.read(target, place, start, lost)

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write to the disk tier."""
        self._disk.streams.write(place, start, source)

    def trim(self, memory: torch.Tensor) -> None:
        """Return these pages to the system."""
        give_back_pages(memory)

    # Order.

    def declare_access(
        self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Check nothing; but wait for a disk queue that the host thread is about to work on."""
        if queue in DISK_QUEUES:
            self._disk.await_host_work(queue)

    def bind_thread(self) -> None:
        """Do nothing: threads are alike."""

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Change nothing: all work is the host thread's."""
        return nullcontext()

    def record(self, queue: Queue) -> Event:
        """Record an event behind everything launched on a queue so far."""
        if self._disk.serve(queue):
            return self._disk.streams.record(queue)
        return self._events[queue]

    def wait(self, queue: Queue, event: Event) -> None:
        """Launch what comes next on a queue after the event."""
        if isinstance(event, DiskEvent):
            self._disk.wait(queue, event)  # blocks for all but disk queues, whose work the host thread does

    def synchronize(self) -> None:
        """Block until the disk is idle."""
        self._disk.synchronize()

    def close(self) -> None:
        """Finish what was launched; memory is freed with the tensors, and the disk's file at once."""
        self.synchronize()
        self._disk.close()
        if self._kept is not None:
            self._kept.close()

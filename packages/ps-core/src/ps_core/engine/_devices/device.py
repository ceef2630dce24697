"""What the engine asks of a device: memory, streams, events.

[Note: streams]
Every `Queue` but ``CPU`` is a stream: what is launched on it runs in order, and some time after everything the host
thread had done when it launched it. ``Queue.CPU`` is the host thread itself; it knows of a stream's work only after
it has waited for an event recorded behind that work, or after `Device.synchronize`. One stream knows of another's
work in the same way, by `Device.wait`. Nothing else orders anything.

A device whose streams run by themselves has a worker thread too. It does the processor's part of a plan, and is a
stream as well, but one that no other stream can wait for: the host thread does, and then launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch

from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine._devices.disk.file import DiskFile, FileExtent


class Event(Protocol):
    """Marks a place in a queue: all that was launched there before, and all that this had waited for."""

    @property
    def queue(self) -> Queue:
        """The queue that the event was recorded on."""

    def block(self) -> None:
        """Block the calling thread until everything before it is over."""


class WorkEvent(Event, Protocol):
    """Marks a place in a worker's queue."""

    @property
    def done(self) -> bool:
        """True if everything before it is over; it must be waited for all the same."""


class Worker(Protocol):
    """A thread that works on host memory, in order."""

    @property
    def busy(self) -> bool:
        """True if something that was launched may not be over."""

    def wait(self, event: Event) -> None:
        """Make all work launched from now on wait for an event of a stream."""

    def wait_for_all(self, events: Sequence[Event]) -> None:
        """Make all work launched from now on wait for events that come behind every event that it waits for so far."""

    def launch(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], work: Callable[[], object]
    ) -> WorkEvent:
        """Launch work that may touch these tensors only; ``what`` names it in messages."""

    def synchronize(self) -> None:
        """Block the host thread until everything launched is over."""

    def close(self) -> None:
        """Finish what was launched, whether it fails or not: nothing is wanted of it any more."""


Mark: TypeAlias = Callable[[], float]
"""Returns the seconds at which a queue came to a place; to be called after `Timer.finish`. NaN: it never came there."""


class Timer(Protocol):
    """Notes times on one device, for a profile; all are seconds of one clock."""

    def mark(self, queue: Queue) -> Mark:
        """Note when a queue has done all that was launched on it so far, and has waited for what it was told to."""

    def mark_worker(self) -> Mark:
        """Note the same of the worker's thread."""

    def finish(self) -> None:
        """Read the device's times, once the device is idle."""


class NonModelBytes(Protocol):
    """Counts non-model bytes: those of tier 0 that are not the engine's."""

    @property
    def current_bytes(self) -> int:
        """The bytes alive now."""

    def start(self) -> None:
        """Start, or start again, to count."""

    def stop(self) -> bool:
        """Stop counting; a second call does nothing. Return True if nothing is left that another call could undo."""

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that may have been made while nothing was counted."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor, where tensors are counted one by one."""

    def paused(self) -> AbstractContextManager[None]:
        """Leave out what the engine makes meanwhile."""

    def take_peak(self) -> int:
        """Return the most bytes alive at once since the last call, and start anew."""


class Device(Protocol):
    """A tier 0 with its streams, and the host memory that it copies from and to. See [Note: streams]."""

    name: str
    """``emulated``, ``cpu``, ``cuda``."""
    torch_device: torch.device
    """Where tensors of tier 0 live."""
    overcommits: bool
    """True if an arena takes memory only where it is touched; then it is made as large as the budget."""

    has_collective_stream: bool
    """True if ``Queue.COLL`` is a stream that another thread launches on; else the CPU does collectives."""

    synchronous: bool
    """True if all work is done when its call returns, so that nothing has to be waited for, or declared."""

    @property
    def worker(self) -> Worker | None:
        """The thread that does the processor's part of a plan; None: the host thread does it itself."""

    @property
    def machine(self) -> Machine | None:
        """The rates to plan with by default; None: those of a small computer."""

    def timer(self) -> Timer:
        """Return what notes times on this device's queues, for one profile."""

    def nonmodel_bytes(self) -> NonModelBytes:
        """Make a counter of this device's non-model bytes."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the free bytes of tier 0, and all of them; None: as many as the budget says."""

    def cap_allocator(self, budget_bytes: int | None) -> None:
        """Keep the allocator of tier 0 within a model's budget, blocks that it keeps for later included, until `close`.

        None: the model has no plan for now, and there is no cap; call it so before the model allocates anything.
        """

    def take_failed_bytes(self) -> int:
        """Return how many bytes could not be allocated since the last call; 0: memory did not run out."""

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Allocate memory of tier 0: uint8, 128-byte aligned; it is freed with its last view."""

    def host(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory of the same kind, pinned where that exists."""

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy: the same shape and dtype, contiguous, no overlap. On ``Queue.CPU`` it is done on return."""

    def attach(self, file: DiskFile) -> None:
        """Add a disk tier: the file that `read` and `write` use."""

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read on ``Queue.DISK_R``: bytes of host memory from a slot's bytes behind ``start``.

        ``lost`` is called, by the host thread, if it turns out that they never come.
        """

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write on ``Queue.DISK_W``: bytes of host memory to a slot's bytes behind ``start``."""

    def trim(self, memory: torch.Tensor) -> None:
        """Return the pages of an arena's unused bytes to the system, if the arena is host memory."""

    def declare_access(
        self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Declare which memory is touched by the work that is launched on a queue from here to its next event.

        ``what`` names it in messages ("forward of layer 3"). On return the host thread may launch it.
        """

    def bind_thread(self) -> None:
        """Prepare the calling thread to launch on `Queue.COLL`."""

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """Launch PyTorch's work of this thread on a queue, within the context."""

    def record(self, queue: Queue) -> Event:
        """Record an event behind everything launched on a queue so far."""

    def wait(self, queue: Queue, event: Event) -> None:
        """Run what is launched on a queue from here on after the event; on ``Queue.CPU``, block this thread."""

    def synchronize(self) -> None:
        """Block until everything launched on any queue is done."""

    def close(self) -> None:
        """Finish what was launched, and release all but the tensors handed out; a second call does nothing."""

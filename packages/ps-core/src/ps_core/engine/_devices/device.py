"""Define what the engine asks of a device: memory, streams, events.

[Note: streams]
Every `Queue` but ``CPU`` is a stream. Work launched on it runs in order, after everything that the host thread had done
before the launch. ``Queue.CPU`` is the host thread itself. It knows of a stream's work only after waiting for an event
recorded behind that work, or after `Device.synchronize`. One stream knows of another's work in the same way, by
`Device.wait`. Nothing else orders anything.

A device whose streams run by themselves has a worker thread too. The worker does the processor's part of a plan. It is
a stream as well, but no other stream can wait for it. The host thread waits, and then launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch

from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine._devices.disk.file import DiskFile, FileExtent


class Event(Protocol):
    """A mark in a queue, behind all that was launched there before and all that the queue had waited for."""

    @property
    def queue(self) -> Queue:
        """Return the queue that the event was recorded on."""

    def block(self) -> None:
        """Block the calling thread until everything before it is over."""


class WorkEvent(Event, Protocol):
    """A mark in a worker's queue."""

    @property
    def done(self) -> bool:
        """Return True if everything before the mark is over; the caller waits for it all the same."""


class Worker(Protocol):
    """A thread that works on host memory, in order."""

    @property
    def busy(self) -> bool:
        """Return True if something that was launched may not be over."""

    def wait(self, event: Event) -> None:
        """Make all work launched from now on wait for an event of a stream."""

    def wait_for_all(self, events: Sequence[Event]) -> None:
        """Make all later work wait for these events, in place of those that it waits for so far."""

    def launch(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], work: Callable[[], object]
    ) -> WorkEvent:
        """Launch work that may touch these tensors only; ``what`` names the work in messages."""

    def synchronize(self) -> None:
        """Block the host thread until everything launched is over."""

    def forget_failure(self) -> BaseException | None:
        """Wait until everything launched is over; return the error that was raised, and raise it no more."""

    def close(self) -> None:
        """Finish what was launched, whether it fails or not; its results are not used."""


Mark: TypeAlias = Callable[[], float]
"""Return the seconds at which a queue reached a place; call this after `Timer.finish`. NaN: never reached."""


class Timer(Protocol):
    """Note times on one device, for a profile; all are seconds of one clock."""

    def mark(self, queue: Queue) -> Mark:
        """Note when a queue has done all that was launched on it so far, including its waits."""

    def mark_worker(self) -> Mark:
        """Note when the worker's thread has done all that was launched on it so far."""

    def finish(self) -> None:
        """Read the device's times, once the device is idle."""


class NonModelBytes(Protocol):
    """Count non-model bytes: those of tier 0 that are not the engine's."""

    @property
    def current_bytes(self) -> int:
        """Return the bytes alive now."""

    def start(self) -> None:
        """Start, or start again, to count."""

    def stop(self) -> bool:
        """Stop counting; a second call does nothing. Return True if another call could undo nothing more."""

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that may have been made while nothing was counted."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor, where tensors are counted one by one."""

    def paused(self) -> AbstractContextManager[object]:
        """Leave out the tensors that the engine makes meanwhile."""

    def take_peak(self) -> int:
        """Return the most bytes alive at once since the last call, and start anew; call this outside of pauses."""


class Device(Protocol):
    """Protocol of a tier 0 with its streams, and of the host memory that it copies from and to. See [Note: streams]."""

    name: str
    """``emulated``, ``cpu``, ``cuda``."""
    torch_device: torch.device
    """The device of tier 0's tensors."""
    overcommits: bool
    """True if an arena takes memory only where it is touched; then it is made as large as the budget."""

    shares_memory: bool
    """True if other processes read the host memory that the device allocates, so a forked process has no copy of it."""

    has_collective_stream: bool
    """True if ``Queue.COLL`` is a stream that another thread launches on; else the CPU does collectives."""

    synchronous: bool
    """True if all work is done when its call returns, so that nothing has to be waited for, or declared."""

    @property
    def runs_here(self) -> bool:
        """Return True on a thread that does the device's work: it must not wait for that, or close the device."""

    @property
    def worker(self) -> Worker | None:
        """Return the thread that does the processor's part of a plan; None: the host thread does that itself."""

    @property
    def machine(self) -> Machine | None:
        """Return the rates to plan with by default; None: those of a small computer."""

    def timer(self) -> Timer:
        """Return a timer for this device's queues, for one profile."""

    def nonmodel_bytes(self) -> NonModelBytes:
        """Make a counter of this device's non-model bytes."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return the free bytes of tier 0 and its total bytes; None: the budget alone says how many there are."""

    def cap_allocator(self, budget_bytes: int | None) -> None:
        """Keep the allocator of tier 0 within a model's budget, blocks that it keeps for later included, until `close`.

        None: the model has no plan for now, and there is no cap; call it so before the model allocates anything.
        """

    def take_failed_bytes(self) -> int:
        """Return how many bytes could not be allocated since the last call; 0: memory did not run out."""

    def raise_out_of_memory(self, error: BaseException) -> None:
        """Raise `DeviceOutOfMemory` if ``error`` says that PyTorch could not allocate on tier 0; else return."""

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Allocate memory of tier 0: uint8, 128-byte aligned; it is freed with its last view."""

    def changing_memory(self) -> AbstractContextManager[None]:
        """Leave the memory that is freed and allocated meanwhile out of every model's `nonmodel_bytes`."""

    def release_freed(self) -> None:
        """Return freed memory to the device, so that a block of another size has room; call it between passes."""

    def host(self, size_bytes: int) -> torch.Tensor:
        """Allocate host memory of the same kind, pinned where that exists."""

    def kept_host(self, size_bytes: int) -> torch.Tensor | None:
        """Return memory that is kept for `host`; None: none has this size, and new memory would have to be pinned."""

    def prepare_host(self, sizes: Iterable[int]) -> None:
        """Make memory for blocks of these sizes, which `host` is asked for next."""

    def trim_host(self) -> None:
        """Give host memory back to the system that was kept for blocks; call it when home slots have moved."""

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy: the same shape and dtype, contiguous, no overlap. On ``Queue.CPU`` it is done on return."""

    def attach(self, file: DiskFile) -> None:
        """Add a disk tier: the file that `read` and `write` use."""

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read on ``Queue.DISK_R``: fill host memory from a slot's bytes behind ``start``.

        The host thread calls ``lost`` if the read fails.
        """

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write on ``Queue.DISK_W``: bytes of host memory to a slot's bytes behind ``start``."""

    def trim(self, memory: torch.Tensor) -> None:
        """Return the pages of an arena's unused bytes to the system, if the arena is host memory."""

    def declare_access(
        self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Declare which memory is touched by work that is launched on a queue from here to its next event.

        ``what`` names the work in messages ("forward of layer 3"). On return the host thread may launch it.
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
        """Finish what was launched, and release all memory but the tensors handed out; a second call does nothing."""

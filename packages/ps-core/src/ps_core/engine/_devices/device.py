"""What the engine asks of a device: memory, streams, events.

[Note: streams]
Every `Queue` but ``CPU`` is a stream: what is launched on it runs in order, and some time after everything the host
thread had done when it launched it. ``Queue.CPU`` is the host thread itself; it knows of a stream's work only after
it has waited for an event recorded behind that work, or after `Device.synchronize`. One stream knows of another's
work in the same way, by `Device.wait`. Nothing else orders anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine._devices.disk.file import DiskFile, FileExtent


class Event(Protocol):
    """Everything that had been launched on a queue when the event was recorded, and all that this had waited for."""

    @property
    def queue(self) -> Queue:
        """The queue it was recorded on."""


class NonModelBytes(Protocol):
    """Counts the bytes of tier 0 that are not the engine's: the tide."""

    @property
    def current_bytes(self) -> int:
        """What is alive now."""

    def start(self) -> None:
        """Begin to count (again)."""

    def stop(self) -> bool:
        """Count no more; as often as you like. Return True if nothing is left that another call could undo."""

    def count(self, tensor: torch.Tensor) -> None:
        """Count this tensor too, which it may not have seen being made."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Stop counting this tensor, where tensors are counted one by one."""

    def paused(self) -> AbstractContextManager[None]:
        """Leave out what the engine makes meanwhile."""

    def take_peak(self) -> int:
        """The most at once since the last call."""


class Device(Protocol):
    """A tier 0 with its streams, and the host memory that it copies from and to. See [Note: streams]."""

    name: str
    """``emulated``, ``cpu``, ``cuda``."""
    torch_device: torch.device
    """Where tensors of tier 0 live."""
    overcommits: bool
    """Whether an arena takes memory only where it is touched, so that it may be as large as the budget."""

    has_collective_stream: bool
    """Whether ``Queue.COLL`` is a stream of its own, for another thread to launch on; else collectives are the
    processor's work."""

    synchronous: bool
    """True if all work is done when its call returns, so that nothing has to be waited for, or declared."""

    @property
    def machine(self) -> Machine | None:
        """The rates to plan with, where nobody gives others; None: those of a small computer."""

    def nonmodel_bytes(self) -> NonModelBytes:
        """A gauge of this device."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """What is free of tier 0, and all of it; None: as much as a budget says."""

    def take_failed_bytes(self) -> int:
        """By how much memory fell short since the last call; 0: it did not."""

    def arena(self, size_bytes: int) -> torch.Tensor:
        """Memory of tier 0: uint8, 128-byte aligned, placed when first touched, given back with its last view."""

    def host(self, size_bytes: int) -> torch.Tensor:
        """Host memory of the same kind, pinned where that exists."""

    def copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy: the same shape and dtype, contiguous, no overlap. On ``Queue.CPU`` it is done on return."""

    def attach(self, file: DiskFile) -> None:
        """Have a disk tier: what `read` and `write` are about from now on."""

    def read(self, target: torch.Tensor, place: FileExtent, start: int, lost: Callable[[], None]) -> None:
        """Launch a read on ``Queue.DISK_R``: bytes of host memory from a slot's bytes behind ``start``.

        ``lost`` is called, by the host thread, if it turns out that they never come.
        """

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Launch a write on ``Queue.DISK_W``, the other way."""

    def trim(self, memory: torch.Tensor) -> None:
        """Nobody wants these bytes of an arena any more: where it is host memory, let others have the pages."""

    def work(self, queue: Queue, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Declare which memory is touched by the work that is launched on a queue from here to its next event.

        ``what`` names it in messages ("forward of layer 3"). On return the host thread may launch it.
        """

    def bind_thread(self) -> None:
        """This thread will launch on `Queue.COLL`."""

    def on(self, queue: Queue) -> AbstractContextManager[object]:
        """PyTorch's work of the host thread goes on that queue meanwhile."""

    def record(self, queue: Queue) -> Event:
        """An event behind everything launched on a queue so far."""

    def wait(self, queue: Queue, event: Event) -> None:
        """What is launched on a queue from here on runs after the event; on ``Queue.CPU`` the host thread blocks."""

    def synchronize(self) -> None:
        """Block until everything launched on any queue is done."""

    def close(self) -> None:
        """Finish what was launched and let go of all resources but the tensors handed out; twice does nothing."""

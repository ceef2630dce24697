"""Gather what the engine uses of ``torch.cuda`` behind one protocol, which tests can replace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from ps_kernels import PinnedArena


class Stream(Protocol):
    """A stream. Two streams are equal if their work runs in one order."""

    def wait_event(self, event: Any) -> None:
        """Make all work launched on this stream from now on wait for the event (any: the runtime's own class)."""


class RawEvent(Protocol):
    """An event that can be recorded again and again."""

    def record(self, stream: Any) -> None:
        """Record the event behind everything launched on a stream so far."""

    def synchronize(self) -> None:
        """Block until everything before the event is done."""


class Allocated(NamedTuple):
    """Bytes that PyTorch's allocator has in use."""

    now: int
    peak: int
    """The most bytes since the peak was last reset."""
    failures: int
    """How often memory ran out."""
    reserved: int
    """What the allocator has taken from the device: bytes in use, gaps, and blocks that it keeps for later."""


Failure = Callable[[int, int, int, int], None]
"""A function that is called with the device's index and bytes: requested, of the device or allowed, free.

It must not raise: see [Note: failed allocations] in `out_of_memory`.
"""


class CudaRuntime(Protocol):
    """The calls that the engine makes to one device."""

    torch_device: torch.device
    """The device with its index."""

    @property
    def name(self) -> str:
        """Return the device's name."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def current(self) -> Stream:
        """Return the stream on which this thread launches PyTorch's work now."""

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Launch this thread's work on a stream within the block."""

    def bind_thread(self) -> None:
        """Make this device the calling thread's current device."""

    def event(self) -> RawEvent:
        """Return a new event."""

    @property
    def now_s(self) -> float:
        """Return the host's clock, in seconds."""

    def timing_event(self) -> RawEvent:
        """Return a new event that also notes when it is reached."""

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Return the seconds between two timing events that were reached (any: the runtime's own class)."""

    def synchronize(self) -> None:
        """Wait for everything on the device."""

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory from PyTorch's allocator, in the order of the current stream."""

    def host(self, size_bytes: int, *, pin: bool) -> PinnedArena:
        """Allocate host memory."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy on a stream; the host thread does not wait if its memory is pinned."""

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the allocator from reusing the tensor's memory, once it is freed, before the stream has got that far."""

    def allocated(self) -> Allocated:
        """Return the allocator's current bytes, its peak, and how often memory ran out."""

    def reset_peak(self) -> None:
        """Reset the allocator's peak to the bytes that are allocated now."""

    def free_bytes(self) -> tuple[int, int]:
        """Return the bytes that could be allocated now, and those of the whole device."""

    @property
    def cap_bytes(self) -> int | None:
        """Return the most bytes that the allocator may take from the device; None: all of it."""

    def set_cap(self, size_bytes: int | None) -> None:
        """Set the most that the allocator may take from the device; None: all of it."""

    def release_cached(self) -> None:
        """Return the allocator's cached memory to the device."""

    def watch_failures(self, told: Failure) -> None:
        """Call ``told`` whenever device memory runs out, for as long as the process lives."""


class TorchRuntime:
    """Implement `CudaRuntime` with PyTorch."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._last_current: tuple[tuple[int, int, int], Stream] | None = None
        """The stream that `current` returned last, after its id, device and kind as PyTorch numbers them."""

    @property
    def name(self) -> str:
        """Return the device's name, such as NVIDIA H100 80GB HBM3."""
        return torch.cuda.get_device_name(self.torch_device)

    def stream(self) -> Stream:
        """Return a new stream, which does not wait for the default one by itself."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def current(self) -> Stream:
        """Return the stream on which this thread launches work now."""
        known = self._last_current  # read once: other threads may replace it
        numbers = torch._C._cuda_getCurrentStream(self.torch_device.index)
        if known is None or known[0] != numbers:
            known = self._last_current = numbers, torch.cuda.current_stream(self.torch_device)
        return known[1]

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Launch this thread's work on a stream within the block."""
        return torch.cuda.stream(stream)

    def bind_thread(self) -> None:
        """Make this device the calling thread's current device."""
        torch.cuda.set_device(self.torch_device)

    def event(self) -> RawEvent:
        """Return a new event; it does not measure time, so it costs little."""
        made: RawEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return made

    @property
    def now_s(self) -> float:
        """Return the host's clock, in seconds."""
        return time.perf_counter()

    def timing_event(self) -> RawEvent:
        """Return a new event that also notes when it is reached."""
        made: RawEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return made

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Return the seconds between two timing events."""
        return float(first.elapsed_time(second)) / 1e3

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        torch.cuda.synchronize(self.torch_device)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def host(self, size_bytes: int, *, pin: bool) -> PinnedArena:
        """Allocate host memory, near the device if it is pinned."""
        with torch.cuda.device(self.torch_device):
            return PinnedArena(size_bytes, pin=pin)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy on a stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        """Record the stream as a user of the tensor's memory; do nothing for memory that is not the allocator's."""
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def allocated(self) -> Allocated:
        """Return the allocator's figures; the device is not asked, so the call does not wait."""
        found = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        if not found:
            return Allocated(0, 0, 0, 0)  # CUDA has not begun
        row = found["allocated_bytes"]["all"]
        return Allocated(row["current"], row["peak"], found["num_ooms"], found["reserved_bytes"]["all"]["current"])

    def reset_peak(self) -> None:
        """Reset the allocator's peak, which ``torch.cuda.max_memory_allocated`` returns too."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def free_bytes(self) -> tuple[int, int]:
        """Return the device's free bytes plus the allocator's unused ones, and those of the whole device."""
        free, whole = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + kept, whole

    @property
    def cap_bytes(self) -> int | None:
        """Return the bytes that PyTorch lets this process take of the device; None: all of it."""
        part = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        return None if part >= 1 else round(part * self._whole_bytes)

    def set_cap(self, size_bytes: int | None) -> None:
        """Set what PyTorch lets this process take of the device."""
        part = 1.0 if size_bytes is None else min(1.0, size_bytes / self._whole_bytes)
        torch.cuda.set_per_process_memory_fraction(part, self.torch_device)

    @property
    def _whole_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def release_cached(self) -> None:
        """Return the allocator's cached memory to the device."""
        torch.cuda.empty_cache()

    def watch_failures(self, told: Failure) -> None:
        """Register ``told`` with the allocator's observer, which PyTorch documents under a private name."""
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(told)


@cache
def torch_runtime(index: int) -> TorchRuntime:
    """Return the runtime of a device, which all models there share."""
    return TorchRuntime(index)

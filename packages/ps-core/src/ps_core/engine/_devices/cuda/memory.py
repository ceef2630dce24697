"""Memory outside of the arena on a CUDA machine: pinned host memory, and the counter of all other tensors."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch

from ps_core.engine._devices.cuda.runtime import Allocated, CudaRuntime
from ps_kernels import PinnedArena

_SPARES, _SPARE_BYTES = 8, 1 << 31
"""Blocks of host memory that are kept for another of their size: so many of any size, and as many as are so large."""


class EngineAllocations:
    """Counts the device memory that is the engine's. Tensors end on any thread, so each has an entry of its own."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._count = itertools.count()

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(list(self._sizes.values()))

    def add(self, memory: torch.Tensor, size_bytes: int) -> None:
        """Count so many bytes until a tensor's memory ends."""
        key = next(self._count)
        self._sizes[key] = size_bytes
        weakref.finalize(memory.untyped_storage(), self._sizes.pop, key).atexit = False


class PinnedBlockCache:
    """Host memory of exact sizes.

    Pinning takes as long as many copies, and undoing it waits for the whole device; a plan takes and gives back the
    same few sizes in every step. So a released block is kept for the next of its size. ``mark`` says what must have
    ended before a block that is released now may be written: copies from it may still be on their way.
    """

    def __init__(self, runtime: CudaRuntime, mark: Callable[[], Callable[[], None]], *, pin: bool) -> None:
        self._runtime, self._mark, self._pin = runtime, mark, pin
        self._spares: deque[tuple[PinnedArena, Callable[[], None]]] = deque()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return a block; it comes back by itself with the last tensor on it."""
        arena = self._spare(size_bytes) or self._runtime.host(size_bytes, pin=self._pin)
        memory = arena.tensor(0, size_bytes, torch.uint8)
        weakref.finalize(memory.untyped_storage(), self._keep, arena).atexit = False
        return memory

    def _spare(self, size_bytes: int) -> PinnedArena | None:
        for spare in list(self._spares):  # others may come back meanwhile, on any thread
            arena, wait_for_copies = spare
            if arena.bytes == size_bytes:
                try:
                    self._spares.remove(spare)
                except ValueError:
                    continue  # another thread freed it in between
                wait_for_copies()
                return arena
        return None

    def _keep(self, arena: PinnedArena) -> None:
        self._spares.append((arena, self._mark()))
        spares = list(self._spares)  # others may come back meanwhile, on any thread
        if len(spares) > _SPARES and sum([spare.bytes for spare, _ in spares]) > _SPARE_BYTES:
            _, wait_for_copies = self._spares.popleft()
            wait_for_copies()

    def close(self) -> None:
        """Free all blocks that are kept for later."""
        with suppress(IndexError):
            while True:
                self._spares.popleft()[1]()


class AllocatorBytesTracker:
    """Counts non-model bytes by PyTorch's allocator: whatever it has allocated besides the engine's own.

    What was allocated before the engine came does not count; if some of that goes, as a model that is packed does, the
    mark below which nothing counts goes down with it. Everything is known on the host: reading waits for nothing.
    """

    def __init__(self, runtime: CudaRuntime, owned_bytes: Callable[[], int]) -> None:
        self._runtime, self._owned_bytes = runtime, owned_bytes
        self._base_bytes = self._others(runtime.allocated().now)
        self._peak_bytes = 0
        self._on = False
        self._depth = 0

    @property
    def current_bytes(self) -> int:
        """What is alive now."""
        return self._above(self._runtime.allocated().now)

    def start(self) -> None:
        """Start, or start again, to count."""
        if not self._on:
            self._on = True
            self._base_bytes = min(self._base_bytes, self._others(self._runtime.allocated().now))
            self._runtime.reset_peak()

    def stop(self) -> bool:
        """Stop counting."""
        self._on = False
        return True

    def count(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator has counted it."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator counts every tensor, whenever it was made."""

    def take_peak(self) -> int:
        """Return the most bytes alive at once since the last call, and start anew."""
        found = self._note()
        peak, self._peak_bytes = self._peak_bytes, self._above(found.now)
        self._runtime.reset_peak()
        return peak

    def paused(self) -> AllocatorBytesTracker:
        """Leave out what the engine does meanwhile: its memory comes and goes, and is known."""
        return self

    def __enter__(self) -> None:
        if not self._depth and self._on:
            self._note()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth and self._on:
            self._runtime.reset_peak()

    def _note(self) -> Allocated:
        found = self._runtime.allocated()
        self._peak_bytes = max(self._peak_bytes, self._above(found.peak))
        return found

    def _others(self, allocated_bytes: int) -> int:
        return allocated_bytes - self._owned_bytes()

    def _above(self, allocated_bytes: int) -> int:
        return max(0, self._others(allocated_bytes) - self._base_bytes)

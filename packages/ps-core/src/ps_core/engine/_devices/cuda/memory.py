"""Memory outside of the arena on a CUDA machine: pinned host memory, and the counter of all other tensors."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch

from ps_core.engine._devices.cuda.runtime import CudaRuntime
from ps_kernels import PinnedArena

_SPARES, _SPARE_BYTES = 8, 1 << 31
"""Blocks of host memory that are kept for another of their size: so many of any size, and as many as are so large."""


_SHARED: weakref.WeakKeyDictionary[CudaRuntime, EngineAllocations] = weakref.WeakKeyDictionary()


class EngineAllocations:
    """Counts the memory of one device that is the engine's, for all models there; and resets the allocator's peak.

    Tensors end on any thread, so each has an entry of its own.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._count = itertools.count()
        self._trackers: dict[int, weakref.ref[AllocatorBytesTracker]] = {}

    @staticmethod
    def of(runtime: CudaRuntime) -> EngineAllocations:
        """Return the device's."""
        return _SHARED.setdefault(runtime, EngineAllocations())

    def watch(self, tracker: AllocatorBytesTracker) -> None:
        """Let a tracker note the peak whenever it is reset, also for another model."""
        key = next(self._count)
        self._trackers[key] = weakref.ref(tracker)
        weakref.finalize(tracker, self._trackers.pop, key).atexit = False

    def before_reset(self) -> None:
        """Let all models note the allocator's peak, which is reset next."""
        for known in list(self._trackers.values()):  # another thread may put a model on the device meanwhile
            tracker = known()
            if tracker is not None:
                tracker.note()

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

    def __init__(self, runtime: CudaRuntime, owned: EngineAllocations) -> None:
        self._runtime, self._owned = runtime, owned
        self._base_bytes = self._others(runtime.allocated().now)
        self._peak_bytes = 0
        self._on = False
        self._depth = 0
        owned.watch(self)

    @property
    def current_bytes(self) -> int:
        """What is alive now."""
        return self._above(self._runtime.allocated().now)

    def start(self) -> None:
        """Start, or start again, to count."""
        if not self._on:
            self._base_bytes = min(self._base_bytes, self._others(self._runtime.allocated().now))
            self._reset()  # what came before does not count
            self._on = True

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
        found = self._runtime.allocated()
        peak = max(self._peak_bytes, self._above(found.peak))
        self._reset()
        self._peak_bytes = self._above(found.now)
        return peak

    def paused(self) -> AllocatorBytesTracker:
        """Leave out what the engine does meanwhile: its memory comes and goes, and is known."""
        return self

    def __enter__(self) -> None:
        self.note()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth == 1 and self._on:
            self._reset()  # what came meanwhile does not count
        self._depth -= 1

    def note(self) -> None:
        """Take the allocator's peak, if it is one of a time that counts."""
        if self._on and not self._depth:
            self._peak_bytes = max(self._peak_bytes, self._above(self._runtime.allocated().peak))

    def _reset(self) -> None:
        self._owned.before_reset()
        self._runtime.reset_peak()

    def _others(self, allocated_bytes: int) -> int:
        return allocated_bytes - self._owned.bytes

    def _above(self, allocated_bytes: int) -> int:
        return max(0, self._others(allocated_bytes) - self._base_bytes)

"""Allocate pinned host memory, and count the bytes of all tensors that are not the engine's."""

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
"""Limits on kept blocks of host memory: how many of one size, and how many bytes in all."""


_SHARED: weakref.WeakKeyDictionary[CudaRuntime, EngineAllocations] = weakref.WeakKeyDictionary()


class EngineAllocations:
    """Count the engine's bytes on one device, for all models there, and reset the allocator's peak.

    Tensors end on any thread, so each has an entry of its own.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._count = itertools.count()
        self._trackers: dict[int, weakref.ref[AllocatorBytesTracker]] = {}

    @staticmethod
    def of(runtime: CudaRuntime) -> EngineAllocations:
        """Return the counter of a device."""
        return _SHARED.setdefault(runtime, EngineAllocations())

    def watch(self, tracker: AllocatorBytesTracker) -> None:
        """Register a tracker that notes the peak whenever it is reset, also for another model."""
        key = next(self._count)
        self._trackers[key] = weakref.ref(tracker)
        weakref.finalize(tracker, self._trackers.pop, key).atexit = False

    def before_reset(self) -> None:
        """Note the allocator's peak for all models, before it is reset."""
        for known in list(self._trackers.values()):  # another thread may put a model on the device meanwhile
            tracker = known()
            if tracker is not None:
                tracker.note()

    @property
    def bytes(self) -> int:
        """Return the bytes of all models together."""
        return sum(list(self._sizes.values()))

    def add(self, memory: torch.Tensor, size_bytes: int) -> None:
        """Count so many bytes until a tensor's memory ends."""
        key = next(self._count)
        self._sizes[key] = size_bytes
        weakref.finalize(memory.untyped_storage(), self._sizes.pop, key).atexit = False


class PinnedBlockCache:
    """Allocate host memory of exact sizes, and keep released blocks for reuse.

    Pinning a block takes as long as many copies, and unpinning waits for the whole device. A plan takes and returns the
    same few sizes in every step. So a released block is kept for the next request of its size. Copies from it may still
    run: ``mark`` returns what must end before the block is written again.
    """

    def __init__(self, runtime: CudaRuntime, mark: Callable[[], Callable[[], None]], *, pin: bool) -> None:
        self._runtime, self._mark, self._pin = runtime, mark, pin
        self._spares: deque[tuple[PinnedArena, Callable[[], None]]] = deque()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return a block of memory, which is released with the last tensor on it."""
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
    """Count non-model bytes: what PyTorch's allocator has allocated, less the engine's own bytes.

    Bytes that were allocated before the engine began do not count. If some of these are freed, as a packed model's are,
    the base that is subtracted shrinks with them. All figures are known on the host: reading one waits for nothing.
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
        """Return the non-model bytes that are alive now."""
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
        """Leave out the engine's own allocations meanwhile; these are counted by themselves."""
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
        """Read the allocator's peak, if it belongs to a time that counts."""
        if self._on and not self._depth:
            self._peak_bytes = max(self._peak_bytes, self._above(self._runtime.allocated().peak))

    def _reset(self) -> None:
        self._owned.before_reset()
        self._runtime.reset_peak()

    def _others(self, allocated_bytes: int) -> int:
        return allocated_bytes - self._owned.bytes

    def _above(self, allocated_bytes: int) -> int:
        return max(0, self._others(allocated_bytes) - self._base_bytes)

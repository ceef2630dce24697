"""Count memory on a CUDA device: the engine's own, and all other tensors."""

from __future__ import annotations

import itertools
import weakref
from types import TracebackType

import torch

from ps_core.engine._devices.cuda.runtime import CudaRuntime

_SHARED: weakref.WeakKeyDictionary[CudaRuntime, EngineAllocations] = weakref.WeakKeyDictionary()


class EngineAllocations:
    """Count the engine's bytes on one device, for all models there, and reset the allocator's peak.

    Tensors end on any thread, so each has an entry of its own.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """The bytes of each storage, and the storage, by its address."""
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
        return sum(size for size, _ in list(self._blocks.values()))

    def add(self, memory: torch.Tensor, size_bytes: int) -> None:
        """Count so many bytes until a tensor's memory ends."""
        storage = memory.untyped_storage()
        self._blocks[storage._cdata] = size_bytes, weakref.ref(storage)
        weakref.finalize(storage, self._blocks.pop, storage._cdata).atexit = False

    def blocks(self) -> list[torch.Tensor]:
        """Return a tensor on each block of the engine's memory, of all models."""
        storages = [storage() for _, storage in list(self._blocks.values())]
        return [
            torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in storages if each is not None
        ]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor lies in the engine's memory."""
        return tensor.untyped_storage()._cdata in self._blocks


class AllocatorBytesTracker:
    """Count non-model bytes: what PyTorch's allocator has allocated, less the engine's own bytes.

    Bytes that were allocated before the engine began do not count. If some of these are freed, as a packed model's are,
    the base that is subtracted shrinks with them. All figures are known on the host: reading one waits for nothing.
    """

    def __init__(self, runtime: CudaRuntime, owned: EngineAllocations) -> None:
        self._runtime, self._owned = runtime, owned
        self._base_bytes = self._others(runtime.allocated().now)
        self._peak_bytes = 0
        self._counting = False
        self._depth = 0
        owned.watch(self)

    @property
    def current_bytes(self) -> int:
        """Return the non-model bytes that are alive now."""
        return self._above(self._runtime.allocated().now)

    def start(self) -> None:
        """Start, or start again, to count."""
        if not self._counting:
            self._base_bytes = min(self._base_bytes, self._others(self._runtime.allocated().now))
            self._reset()  # what came before does not count
            self._counting = True

    def stop(self) -> bool:
        """Stop counting."""
        self._counting = False
        return True

    def count(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator has counted it."""

    def forget(self, tensor: torch.Tensor) -> None:
        """Do nothing: the allocator counts every tensor, whenever it was made."""

    def take_peak(self) -> int:
        """Return the most bytes alive at once since the last call, and start anew."""
        self._depth = 0  # an interrupt (Ctrl-C) may have skipped the end of a pause
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
        if self._depth == 1 and self._counting:
            self._reset()  # what came meanwhile does not count
        self._depth -= 1

    def note(self) -> None:
        """Read the allocator's peak, if it belongs to a time that counts."""
        if self._counting and not self._depth:
            self._peak_bytes = max(self._peak_bytes, self._above(self._runtime.allocated().peak))

    def _reset(self) -> None:
        self._owned.before_reset()
        self._runtime.reset_peak()

    def _others(self, allocated_bytes: int) -> int:
        return allocated_bytes - self._owned.bytes

    def _above(self, allocated_bytes: int) -> int:
        return max(0, self._others(allocated_bytes) - self._base_bytes)

"""Which memory an address belongs to: for messages, and so that nothing is remembered of memory that was given back."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from checked_device.race_check import Range
from ps_core.engine._devices.disk.file import FileExtent

_DISK = 1 << 62
"""The disk's first byte among the addresses: beyond all memory."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A storage."""

    end: int
    name: str
    memory: Callable[[], torch.Tensor | None]
    """Its bytes, where this device made it; while they are in use."""


class AddressNames:
    """The storages that were seen: their names, what is touched of them, and which were given back."""

    def __init__(self, forget: Callable[[int, int], None]) -> None:
        """``forget`` is called with each range that was given back."""
        self._starts: list[int] = []
        self._known: dict[int, _Place] = {}  # by first address
        self._gone: deque[int] = deque()
        self._count = 0
        self._forget = forget

    def add(self, tensor: torch.Tensor, kind: str, memory: Callable[[], torch.Tensor | None] = lambda: None) -> None:
        """Name a tensor's storage, and hear of its end."""
        self.tidy()
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        known = start in self._known  # by a shorter alias; the two then end as one
        self._known[start] = _Place(start + storage.nbytes(), f"{kind} {self._count}", memory)
        self._count += 1
        if known:
            return
        self._starts.insert(bisect_right(self._starts, start), start)
        # It may end at any instant, within a change to the history too: so it is only noted here.
        weakref.finalize(storage, self._gone.append, start).atexit = False

    def tidy(self) -> None:
        """Let go of the storages that ended since the last call, before others are seen at their addresses."""
        while self._gone:
            start = self._gone.popleft()
            self._starts.remove(start)
            self._forget(start, self._known.pop(start).end)

    def ranges(self, tensors: Sequence[torch.Tensor]) -> list[Range]:
        """What tensors touch; for strided ones, from their first byte to their last."""
        ranges = []
        for tensor in tensors:
            if not tensor.numel():
                continue
            start = tensor.data_ptr()
            if self._find(start) is None:
                self.add(tensor, "tensor")
            steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((start, start + (steps + 1) * tensor.element_size()))
        return ranges

    def on_disk(self, place: FileExtent, start: int, count: int) -> list[Range]:
        """What is touched of the disk tier's file, as addresses."""
        ranges, at, end = [], 0, start + count
        for offset, size in place.ranges:
            first, stop = max(start, at), min(end, at + size)
            if first < stop:
                ranges.append((_DISK + offset + first - at, _DISK + offset + stop - at))
            at += size
        return ranges

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's bytes, where possible as a view of the memory that they were cut from.

        A real device's copy in flight holds no reference to a tensor, so one that is only delayed may not show in the
        use count of its storage either.
        """
        start = self._find(tensor.data_ptr())
        memory = None if start is None else self._known[start].memory()
        if start is None or memory is None:
            return tensor.view(-1).view(torch.uint8)
        return memory.narrow(0, tensor.data_ptr() - start, tensor.nbytes)

    def _find(self, address: int) -> int | None:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._known[self._starts[index]].end:
            return None
        return self._starts[index]

    def name(self, start: int, end: int) -> str:
        """A range for people: ``arena 0 [128:256]``."""
        if start >= _DISK:
            return f"disk [{start - _DISK}:{end - _DISK}]"
        first = self._find(start)
        if first is None:
            return f"memory [{start:#x}:{end:#x}]"
        return f"{self._known[first].name} [{start - first}:{end - first}]"

"""Host memory that all ranks of one computer read and write.

[Note: common memory]
An anonymous file of the kernel belongs to all ranks alike: each writes its part, and all compute from the whole. What a
rank computes from is a *private mapping* (``MAP_PRIVATE``). It shows what the ranks write to the file. But a page that
this rank itself writes to becomes its own copy. So a program that changes a weight in place changes nothing for the
others.
"""

from __future__ import annotations

import mmap
import os
from weakref import WeakSet, finalize

import torch


class CommonMemory:
    """Bytes that all ranks of the computer map; each rank writes its part. See [Note: common memory]."""

    def __init__(self, file: int, size_bytes: int) -> None:
        """Map the file, which every rank makes as large, and close its descriptor with this object."""
        self.file = file
        finalize(self, os.close, file)
        os.ftruncate(file, size_bytes)
        self.mapped = mmap.mmap(file, size_bytes)
        """The bytes themselves: the other ranks see what is written here."""


class CommonWeights:
    """One group's fp32 weights in common memory: each rank steps its shard, and all compute from the whole."""

    def __init__(self, memory: CommonMemory, start: int, size_bytes: int, shard: slice) -> None:
        """``start``: the group's first byte, a multiple of the page size. ``shard``: this rank's bytes of the group."""
        self._memory, self._start, self._size_bytes = memory, start, size_bytes
        whole = memoryview(memory.mapped)[start : start + size_bytes]
        self.shard = torch.frombuffer(whole[shard], dtype=torch.uint8)
        """The bytes of this rank's shard."""
        self._private = WeakSet[mmap.mmap]()
        """Mappings that a tensor of this rank still uses."""

    def map_whole(self) -> torch.Tensor:
        """Return a new private mapping of the whole group's bytes, for this rank alone to compute from."""
        mapped = mmap.mmap(self._memory.file, self._size_bytes, flags=mmap.MAP_PRIVATE, offset=self._start)
        self._private.add(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def is_mapped(self) -> bool:
        """Return True if a tensor of this rank still uses such a mapping: then do not `free`."""
        return bool(self._private)

    def free(self) -> None:
        """Return the group's pages to the system; no rank reads or writes these bytes any more."""
        self._memory.mapped.madvise(mmap.MADV_REMOVE, self._start, self._size_bytes)

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
        self._file = file
        finalize(self, os.close, file)
        os.ftruncate(file, size_bytes)
        self._shared = mmap.mmap(file, size_bytes)
        self.memory = torch.frombuffer(self._shared, dtype=torch.uint8)
        """The bytes themselves: the other ranks see what is written here."""
        self._private: dict[int, WeakSet[mmap.mmap]] = {}
        """Private mappings that a tensor still uses, by their first byte."""

    def map_privately(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return a new private mapping of some bytes; ``start`` is a multiple of the page size."""
        mapped = mmap.mmap(self._file, size_bytes, flags=mmap.MAP_PRIVATE, offset=start)
        self._private.setdefault(start, WeakSet()).add(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def is_mapped(self, start: int) -> bool:
        """Return True if a tensor still uses a private mapping from this byte on: then do not `free`."""
        return bool(self._private.get(start))

    def free(self, start: int, size_bytes: int) -> None:
        """Return the pages of some bytes to the system; no rank reads or writes these bytes any more."""
        self._shared.madvise(mmap.MADV_REMOVE, start, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)

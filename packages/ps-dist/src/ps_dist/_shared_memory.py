"""Host memory that all processes of one computer can read and write.

[Note: shared memory]
Each process has a *heap*: one anonymous file of the kernel (``memfd``). All processes of the computer map the whole of
it. It has no name in any folder and is not limited by the size of ``/dev/shm``. The kernel frees it with the last
process that maps it, however that process ends. The file is larger than the computer's memory. But a page takes memory
only once it is written to, and is counted once. Memory that its owner has released is returned to the system at once.
"""

from __future__ import annotations

import mmap
import os
from bisect import insort
from collections import deque
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

_TIMES_MEMORY = 2
"""Bytes of a heap over those of the computer: enough for what fits, cut into pieces."""


class SharedHeap:
    """This process's heap. A tensor's memory is returned with its last view. See [Note: shared memory]."""

    def __init__(self, size_bytes: int | None = None) -> None:
        """Make the file; None: as large as is useful. Raises `OSError` or `AttributeError` where that is impossible."""
        wanted = size_bytes or _TIMES_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.size_bytes = _whole_pages(wanted)
        self.file = os.memfd_create("ps_dist")
        """The descriptor by which other processes map the heap."""
        self._close = finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.size_bytes)
        self._memory = mmap.mmap(self.file, self.size_bytes)
        self._first = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._free = [(0, self.size_bytes)]
        """Spans of bytes that no tensor has, in order of address."""
        self._returned: deque[tuple[int, int]] = deque()
        """Spans whose tensors are gone, and that are not in ``_free`` yet."""
        self._lock, self._process = Lock(), os.getpid()

    def allocate(self, size_bytes: int) -> Tensor:
        """Return bytes of the heap, which begin a page and read as zero; raise `MemoryError` if no span is free.

        A fork has none: what is free here may have an owner there by now.
        """
        if os.getpid() != self._process:
            raise MemoryError(f"this is a copy (fork) of process {self._process}, whose heap it is")
        wanted = _whole_pages(max(1, size_bytes))
        with self._lock:
            self._collect()
            place = next((place for place, (start, end) in enumerate(self._free) if end - start >= wanted), None)
            if place is None:
                raise MemoryError(f"the heap of {self.size_bytes} shared bytes has no {wanted} in one piece")
            start, end = self._free.pop(place)
            if start + wanted < end:
                self._free.insert(place, (start + wanted, end))
        window = memoryview(self._memory)[start : start + max(1, size_bytes)]
        finalize(window, self._give_back, (start, start + wanted)).atexit = False
        return torch.frombuffer(window, dtype=torch.uint8)[:size_bytes]

    def offset(self, memory: Tensor) -> int | None:
        """Return the first byte of contiguous memory within the heap; None if the memory lies elsewhere."""
        offset = memory.data_ptr() - self._first
        return offset if offset >= 0 and offset + memory.nbytes <= self.size_bytes else None

    def close_file(self) -> None:
        """Close the descriptor; mapped memory stays."""
        self._close()

    def _give_back(self, span: tuple[int, int]) -> None:
        """Free a span; any thread may call this at any time, also one that has the lock.

        A fork drops its references only: the bytes are this process's, and it still uses them.
        """
        if os.getpid() != self._process:
            return
        self._returned.append(span)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Return the pages of released spans to the system, and join the spans with their free neighbours."""
        while self._returned:
            start, end = self._returned.popleft()
            self._memory.madvise(mmap.MADV_REMOVE, start, end - start)
            insort(self._free, (start, end))
            joined: list[tuple[int, int]] = []
            for first, last in self._free:
                if joined and joined[-1][1] == first:
                    joined[-1] = (joined[-1][0], last)
                else:
                    joined.append((first, last))
            self._free = joined


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

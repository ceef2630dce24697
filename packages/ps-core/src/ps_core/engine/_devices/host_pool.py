"""Blocks of host memory that are kept for the next use of their size, cut out of few large arenas.

[Note: kept blocks]
On CUDA an arena is pinned. Pinning memory takes as long as many copies of it. Undoing that waits for the whole device.
So home slots are cut out of arenas that are made for all of them at once. A released block is kept for the next one of
its size. A plan reserves and releases the same sizes in every step. So nothing is pinned from its second step on, and
nothing is ever unpinned. Where nothing is pinned, a kept block spares the system new pages, which it fills with zeros.
Only where no block of a size is left are neighbours joined and cut anew. What no block lies in is given back then, and
when a plan has moved the home slots.
"""

from __future__ import annotations

import mmap
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import RLock
from typing import NamedTuple

import torch

from ps_core._errors import InvalidInput
from ps_core._units import align_up
from ps_kernels import InvalidArgument, PinnedArena

_MOST_BYTES = 1 << 32
"""Blocks share a registration up to this size; a larger block has one of its own.

CUDA refuses some registrations of 512 GiB. Far smaller ones are as fast, and can be given back one by one when a plan
moves home slots to the device.
"""
_LEAST_BYTES = 1 << 22
"""A block that is smaller than this, and comes alone, leaves the rest of its registration to others."""


class _Block(NamedTuple):
    """Free bytes of a registration."""

    arena: PinnedArena
    start: int
    bytes: int
    waits: tuple[Callable[[], None], ...]
    """Each blocks until copies from and to these bytes are done."""


class HostPool:
    """The host memory of one device; see [Note: kept blocks]."""

    def __init__(self, make: Callable[[int], PinnedArena], mark: Callable[[], Callable[[], None]]) -> None:
        """``make`` makes an arena of so many bytes.

        ``mark`` returns a call that blocks until every copy is done that was launched before ``mark``.
        """
        self._make, self._mark = make, mark
        self._free: dict[int, deque[_Block]] = {}
        """By size."""
        self._returned: deque[_Block] = deque()
        """Free blocks too. Tensors end on any thread and at any instant, so nothing else is changed then."""
        self._lock = RLock()

    def prepare(self, sizes: Iterable[int]) -> None:
        """Register memory for blocks of these sizes, as far as no free blocks have them."""
        with self._lock:
            self._take_back()
            free = Counter({size: len(blocks) for size, blocks in self._free.items()})
            together: list[int] = []
            for size in map(_pages, sizes):
                free[size] -= 1
                if free[size] >= 0:
                    continue
                if together and sum(together) + size > _MOST_BYTES:
                    self._register(together)
                    together = []
                together.append(size)
            if together:
                self._register(together)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return a block; it comes back by itself with the last tensor on it."""
        with self._lock:
            block = self._take(_pages(size_bytes))
            memory = block.arena.tensor(block.start, size_bytes, torch.uint8)
        for wait_for_copies in block.waits:
            wait_for_copies()
        weakref.finalize(memory.untyped_storage(), self._keep, block).atexit = False
        return memory

    def allocate_kept(self, size_bytes: int) -> torch.Tensor | None:
        """Return a free block as `allocate` does; None: memory would have to be registered."""
        with self._lock:
            return self.allocate(size_bytes) if self._has(_pages(size_bytes)) else None

    def trim(self) -> None:
        """Give back the registrations that no block lies in."""
        with self._lock:
            self._join()
            self._drop_idle()

    def close(self) -> None:
        """Give back all free memory. A destructor may call this within any other call, so it takes no lock."""
        self._free = {}
        self._returned.clear()

    def _keep(self, block: _Block) -> None:
        self._returned.append(block._replace(waits=(self._mark(),)))

    def _take_back(self) -> None:
        with suppress(IndexError):  # the last one may go meanwhile, as `close` takes no lock
            while True:
                self._put(self._returned.popleft())

    def _put(self, block: _Block) -> None:
        self._free.setdefault(block.bytes, deque()).append(block)

    def _take(self, size: int) -> _Block:
        """Return a free block of this size, of a new registration if need be."""
        if not self._has(size):
            self._drop_idle()  # or memory would grow beyond what is in use at once
            self._register([size, max(0, _LEAST_BYTES - size)])
        return self._free[size].popleft()

    def _has(self, size: int) -> bool:
        """Return True if there is a free block of this size: one as it is, or cut now out of a larger one."""
        self._take_back()
        if not self._free.get(size):
            self._join()
            larger = min((each for each, blocks in self._free.items() if blocks and each >= size), default=0)
            if larger:
                self._cut(self._free[larger].popleft(), size)
        return bool(self._free.get(size))

    def _cut(self, block: _Block, size: int) -> None:
        for wait_for_copies in block.waits:
            wait_for_copies()
        for start, end in ((0, size), (size, block.bytes)):
            if start < end:
                self._put(_Block(block.arena, block.start + start, end - start, ()))

    def _register(self, sizes: list[int]) -> None:
        start, arena = 0, self._arena(sum(sizes))
        for size in filter(None, sizes):
            self._put(_Block(arena, start, size, ()))
            start += size

    def _arena(self, size: int) -> PinnedArena:
        try:
            return self._make(size)
        except InvalidArgument as error:
            raise InvalidInput(
                f"Budget.host: cannot allocate {size:,} bytes of host memory ({error.__cause__ or error}); "
                "expected a smaller Budget(host=...)"
            ) from None

    def _join(self) -> None:
        """Join free blocks that are neighbours."""
        self._take_back()
        blocks = [block for each in self._free.values() for block in each]
        self._free, last = {}, None
        for block in sorted(blocks, key=lambda block: (id(block.arena), block.start)):
            if last is not None and last.arena is block.arena and last.start + last.bytes == block.start:
                last = last._replace(bytes=last.bytes + block.bytes, waits=last.waits + block.waits)
                continue
            if last is not None:
                self._put(last)
            last = block
        if last is not None:
            self._put(last)

    def _drop_idle(self) -> None:
        """Give up the registrations that are one free block; each is unpinned with the last reference to it."""
        for size, blocks in self._free.items():
            self._free[size] = deque(block for block in blocks if block.bytes < block.arena.bytes)


def _pages(size_bytes: int) -> int:
    return align_up(size_bytes, mmap.PAGESIZE)  # which a file that is read past the page cache wants

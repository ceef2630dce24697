"""Read and write the file behind the disk tier, and choose where slots lie in it.

[Note: blocks]
O_DIRECT bypasses the page cache. Then positions, sizes and addresses must be multiples of a block. A slot begins on a
block and owns whole blocks. What is not aligned in memory goes through an aligned buffer, one for each thread. A write
that ends within a block of a slot first reads the rest of that block. A slot may consist of several ranges, so every
free block of the file can be used.

The file has no name from the moment it is open, so nothing is left behind however the process ends. Its blocks are
allocated before use: a full disk shows when a slot is reserved, not when it is written.

[Note: a file cut short]
Anyone with the right to may truncate the file, by way of ``/proc``. A later write behind the cut makes the file longer
again, with a hole that reads as zeros. So the file ends with a guard, which is allocated and never written. After a cut
no write brings the file back to its full size. Every read and write looks at that size when it is done. A file that was
cut and then lengthened has lost the guard's blocks. Where the file system counts blocks, their number is looked at too.
(The file system counts its own blocks with them, so a small hole within the file may go unnoticed.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ps_core._errors import InvalidInput, TierFailure
from ps_core._units import align_up
from ps_core.engine._support.interrupts import defer_interrupts_installing

BLOCK_BYTES = 4096
_GUARD_BYTES = 2**20
"""More than a file system adds to the count for its own tables. In ext4 that is 4 KiB for some 340 fragments."""
_PIECE_BYTES = 2**21
"""Bytes that one system call reads or writes; the buffers are as large."""

Call: TypeAlias = Callable[[int, list[Any], int], int]
"""``os.preadv`` or ``os.pwritev`` (buffers have no common type)."""


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Offsets and sizes of a slot's ranges in the file: whole blocks, in order."""

    ranges: tuple[tuple[int, int], ...]
    bytes: int
    """Bytes of the slot's contents; the last block may be longer."""


def blocks(size: int) -> int:
    """Return the bytes of the file that a slot of this size takes: whole blocks."""
    return align_up(size, BLOCK_BYTES)


class IoRequest(NamedTuple):
    """One system call: its position in the file, its size, and the address in memory."""

    offset: int
    address: int
    bytes: int
    last: bool
    """True if no contents follow in the last block: the write need not keep them."""


class DiskFile:
    """A file of slots. Any thread may call its methods, except `reserve` and `free`."""

    @defer_interrupts_installing
    def __init__(self, directory: str) -> None:
        self.name, self._file, self.direct = _open(directory)
        self._close = weakref.finalize(self, os.close, self._file)
        self._process = os.getpid()
        self.bytes = 0
        """Bytes allocated for slots so far."""
        self._size = 0
        """The file's least size in bytes; see [Note: a file cut short]."""
        self._counted = True
        """True if the file system counts allocated blocks at once."""
        self.failure: TierFailure | None = None
        """The first failure; nothing is written after it."""
        self._rescued: list[tuple[int, torch.Tensor]] = []
        """Bytes that could not be written, with their positions, in the order of the writes."""
        self._free: list[tuple[int, int]] = []  # Invariant: ascending, apart
        self._buffers = threading.local()

    # Room.

    def prepare(self, size: int) -> None:
        """Allocate this many bytes more at once."""
        if size < 1:
            return
        self.check_process()
        start, more = self.bytes, blocks(size)
        self._check_whole("before an allocation", start, more)
        try:
            os.posix_fallocate(self._file, start, more + _GUARD_BYTES)
        except OSError as error:
            raise self._described(f"cannot allocate {size:,} bytes more than the {start:,} it has", error) from None
        size = start + more + _GUARD_BYTES
        self._counted = self._counted and _allocated_bytes(os.fstat(self._file)) >= size
        self.bytes, self._size = start + more, size
        self._give((start, more))

    def reserve(self, size: int) -> FileExtent:
        """Reserve space for a slot, in one range of the file if possible."""
        missing = blocks(size)
        self.prepare(missing - sum(free for _, free in self._free))
        whole = next((each for each in self._free if each[1] >= missing), None)
        ranges = []
        for offset, free in [whole] if whole is not None else list(self._free):
            taken = min(free, missing)
            if not taken:
                break
            self._free.remove((offset, free))
            if free > taken:
                self._give((offset + taken, free - taken))
            ranges.append((offset, taken))
            missing -= taken
        return FileExtent(tuple(ranges), size)

    def free(self, place: FileExtent) -> None:
        """Return a slot's space to the file."""
        for each in place.ranges:
            self._give(each)

    def _give(self, row: tuple[int, int]) -> None:
        rows: list[tuple[int, int]] = []
        for offset, size in sorted([*self._free, row]):
            if rows and sum(rows[-1]) == offset:
                rows[-1] = (rows[-1][0], rows[-1][1] + size)
            else:
                rows.append((offset, size))
        self._free = rows

    # Contents.

    def read(self, place: FileExtent, start: int, target: torch.Tensor) -> None:
        """Fill host memory from a slot's bytes behind ``start``."""
        self.check_process()
        try:
            for piece in pieces(place, start, target):
                self.read_piece(piece)
        except TierFailure:
            if not self._covered(place, start, target):
                raise
        for offset, memory in self._rescued:
            for piece in pieces(place, start, target):
                _overlay(piece, offset, memory)

    def write(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Write host memory to a slot behind ``start``."""
        self.check_process()
        if self.failure is not None:
            raise self.failure
        for piece in pieces(place, start, source):
            self.write_piece(piece)

    def broke(self, error: Exception) -> None:
        """Note an error other than one of reading and writing."""
        self._failed(error if isinstance(error, TierFailure) else self._described(f"{type(error).__name__}: {error}"))

    def rescue(self, place: FileExtent, start: int, source: torch.Tensor) -> None:
        """Keep in memory what could not be written."""
        source = source.clone()
        for piece in pieces(place, start, source):
            first = piece.address - source.data_ptr()
            self._rescued.append((piece.offset, source[first : first + piece.bytes]))

    def _covered(self, place: FileExtent, start: int, target: torch.Tensor) -> bool:
        """Return True if all bytes to be read are in rescued memory; the caller then ignores the failed read."""
        kept = [(offset, offset + memory.numel()) for offset, memory in self._rescued]
        wanted = [(piece.offset, piece.offset + piece.bytes) for piece in pieces(place, start, target)]
        return all(any(first <= a and b <= end for first, end in kept) for a, b in wanted)

    def read_piece(self, piece: IoRequest) -> None:
        """Read one piece."""
        if self._straight(piece):
            self._all(os.preadv, "read", piece.offset, piece.address, piece.bytes)
            return
        first, size = _blocks(piece)
        buffer = self._buffer()
        self._all(os.preadv, "read", first, buffer, size)
        ctypes.memmove(piece.address, buffer + piece.offset - first, piece.bytes)

    def write_piece(self, piece: IoRequest) -> None:
        """Write one piece, and keep the other bytes of its blocks."""
        if self._straight(piece):
            self._all(os.pwritev, "write", piece.offset, piece.address, piece.bytes)
            return
        first, size = _blocks(piece)
        end, buffer = first + size, self._buffer()
        if piece.offset > first:
            self._all(os.preadv, "read", first, buffer, BLOCK_BYTES)
        if piece.offset + piece.bytes < end and not piece.last:
            self._all(os.preadv, "read", end - BLOCK_BYTES, buffer + size - BLOCK_BYTES, BLOCK_BYTES)
        ctypes.memmove(buffer + piece.offset - first, piece.address, piece.bytes)
        self._all(os.pwritev, "write", first, buffer, size)

    def _straight(self, piece: IoRequest) -> bool:
        """Return True if a request is aligned for the file; the caller then transfers it without a buffer."""
        return not self.direct or not (piece.offset | piece.address | piece.bytes) % BLOCK_BYTES

    def _buffer(self) -> int:
        """Return the address of this thread's buffer."""
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = mmap.mmap(-1, _PIECE_BYTES)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._buffers.memory))

    def _all(self, call: Call, what: str, offset: int, address: int, size: int) -> None:
        """Repeat a system call until every byte is transferred."""
        done = 0
        while done < size:
            memory = (ctypes.c_char * (size - done)).from_address(address + done)
            where = f"cannot {what} {size - done:,} bytes at byte {offset + done:,}"
            try:
                count = call(self._file, [memory], offset + done)
            except OSError as error:
                raise self._failed(self._described(where, error)) from None
            done += count
            if done < size and (not count or (self.direct and count % BLOCK_BYTES)):
                self._check_whole(f"after a {what}", offset, size)
                raise self._failed(self._described(f"{where}: a short {what}, of {count:,} bytes"))
        self._check_whole(f"after a {what}", offset, size)

    def _check_whole(self, when: str, offset: int, size: int) -> None:
        """Raise `TierFailure` if a part of the file is gone; see [Note: a file cut short]."""
        expected = self._size  # before the file is looked at: the host thread may be making it longer
        try:
            found = os.fstat(self._file)
        except OSError as error:
            raise self._failed(self._described("cannot look at its size", error)) from None
        allocated = _allocated_bytes(found) if self._counted else expected
        if found.st_size >= expected <= allocated:
            return
        if found.st_size < expected:
            lost = f"the file has {found.st_size:,} bytes, expected {expected:,}: it was truncated"
        else:
            lost = f"the file has {allocated:,} bytes on the disk, expected {expected:,}: a part of it was cut out"
        raise self._failed(
            TierFailure(
                f"the disk tier failed: {self.name}: {when} of {size:,} bytes at byte {offset:,} {lost}\n"
                "  what was in it is lost, what is in memory is intact: try model.state_dict(), which needs only\n"
                "  the weights, or go on from the last checkpoint; and find out what shortens files in that folder"
            )
        )

    @property
    def forked(self) -> bool:
        """Return True in a forked copy of the process that opened the file: its threads stayed there."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise `InvalidInput` in a forked copy of the process."""
        if self.forked:
            raise InvalidInput(
                f"this is process {os.getpid()}, a copy (fork) of process {self._process}, whose model has a disk tier "
                f"({self.name}): only process {self._process} can use that model. Start workers with "
                'multiprocessing.get_context("spawn"), or hand them what they need as plain tensors'
            )

    def _failed(self, failure: TierFailure) -> TierFailure:
        self.failure = self.failure or failure
        return failure

    def _described(self, what: str, error: OSError | None = None) -> TierFailure:
        reason = what if error is None else f"{what}: {error.strerror} (errno {error.errno})"
        return TierFailure(
            f"the disk tier failed: {self.name}: {reason}\n"
            "  what is in memory is intact, and can be saved: model.state_dict(), optimizer.state_dict()\n"
            "  try: another Budget(disk_dir=...), in a process of its own"
        )

    def close(self) -> None:
        """Close the file, which frees its blocks; a second call does nothing."""
        self._close()


def _open(directory: str) -> tuple[str, int, bool]:
    """Create a file that only its owner can read, and unlink it; True if it bypasses the page cache."""
    try:
        plain, name = tempfile.mkstemp(prefix="patrickstar-", suffix=".tier", dir=directory)
    except OSError as error:
        raise InvalidInput(
            f"Budget.disk_dir: cannot make a file in {directory!r}: {error.strerror}; expected a directory that exists "
            "and may be written to"
        ) from None
    try:
        direct = _reopened(name)
    finally:
        os.unlink(name)
    if direct is None:
        return name, plain, False
    os.close(plain)
    return name, direct, True


def _reopened(name: str) -> int | None:
    """Open the file again with ``O_DIRECT``; None where the file system refuses that, or refuses such blocks."""
    try:
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):
        return None
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            worked = os.pwrite(file, block, 0) == os.preadv(file, [block], 0) == BLOCK_BYTES
    except OSError:
        worked = False
    if not worked:
        os.close(file)
    return file if worked else None


def pieces(place: FileExtent, start: int, memory: torch.Tensor) -> Iterator[IoRequest]:
    """Yield the requests that read or write ``memory``, which holds a slot's bytes from ``start`` on."""
    assert memory.dtype is torch.uint8, "memory is taken as bytes"
    assert memory.is_contiguous(), "memory is one stretch of bytes"
    end, address, at = start + memory.numel(), memory.data_ptr() - start, 0
    for offset, size in place.ranges:
        first, stop = max(start, at), min(end, at + size)
        while first < stop:
            here = offset + first - at
            count = min(stop - first, _PIECE_BYTES - here % _PIECE_BYTES)
            yield IoRequest(here, address + first, count, first + count == place.bytes)
            first += count
        at += size


def _blocks(piece: IoRequest) -> tuple[int, int]:
    """Return where the blocks that a request touches begin, and their size."""
    first = piece.offset - piece.offset % BLOCK_BYTES
    return first, align_up(piece.offset + piece.bytes - first, BLOCK_BYTES)


def _overlay(piece: IoRequest, offset: int, memory: torch.Tensor) -> None:
    """Copy a request's bytes over what was read from their position of the file."""
    first, end = max(piece.offset, offset), min(piece.offset + piece.bytes, offset + memory.numel())
    if first < end:
        ctypes.memmove(piece.address + first - piece.offset, memory.data_ptr() + first - offset, end - first)


def _allocated_bytes(found: os.stat_result) -> int:
    """Return the bytes that a file takes on the disk; ``st_blocks`` counts 512 bytes each on any file system."""
    return found.st_blocks * 512

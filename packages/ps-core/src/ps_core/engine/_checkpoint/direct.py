"""Bytes to a file and back in order, past the page cache: one buffer is filled while the other is on its way.

[Note: past the page cache]
A checkpoint is larger than what it should push out of memory, and is wanted on the disk, not near it; besides, direct
transfers were several times as fast as buffered ones with an fsync. File systems without them get ordinary calls.

[Note: the checksum]
CRC-32, of zlib, which is in the standard library: it has to find damage, not forgery, and to be faster than a disk. It
finds every change within 32 bits in a row; of others one in four billion escapes it. SHA-256 took three to four times
as long, and halved the rate of a save. One thread takes it of each buffer while another has that written, or the next
one read. `cksfv` and `rhash` check the list of them.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ps_core.engine._checkpoint.safetensors import damaged

BUFFER_BYTES = 8 * 2**20
"""Of each of the two, where chunks are not smaller."""
PAGE_BYTES = mmap.PAGESIZE


class Buffers:
    """Two buffers for one file at a time, and two threads, one for the disk and one for the checksum."""

    def __init__(self, size: int, helpers: ThreadPoolExecutor) -> None:
        self.pair = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]
        self.helpers = helpers

    def start(self, *calls: Callable[[], object]) -> list[Future[object]]:
        """Have these done meanwhile."""
        return [self.helpers.submit(call) for call in calls]


@contextmanager
def buffers(largest_chunk_bytes: int) -> Iterator[Buffers]:
    """Together not more than half a chunk (or two pages)."""
    size = min(BUFFER_BYTES, max(PAGE_BYTES, largest_chunk_bytes // 4 // PAGE_BYTES * PAGE_BYTES))
    with ThreadPoolExecutor(2) as helpers:
        yield Buffers(size, helpers)


def wait(going: list[Future[Any]]) -> list[Any]:
    """Until all are done, though one fails; then the first failure, or what they gave."""
    for each in going:
        each.exception()
    return [each.result() for each in going]


def set_direct(file: int, on: bool) -> bool:
    """Have a file's transfers go past the page cache, or not; whether that could be done."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _was_direct(file: int, error: OSError) -> bool:
    """Whether a transfer failed for going past the page cache, as a file's end does; it will not from here on."""
    direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    return error.errno == errno.EINVAL and direct and set_direct(file, False)


class Checksum:
    """Of bytes as they come; see [Note: the checksum]."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take in more."""
        self._value = zlib.crc32(data, self._value)

    @property
    def text(self) -> str:
        """As it is written down."""
        return f"{self._value:08X}"


class Outlet:
    """A new file, written from its beginning to its end."""

    def __init__(self, path: Path, pair: Buffers) -> None:
        self._buffers = pair
        self._checksum = Checksum()
        self._filled = 0
        self._going: list[Future[object]] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        set_direct(self._file, True)

    def write(self, data: memoryview) -> None:
        """More bytes; they are copied."""
        while data:
            buffer = self._buffers.pair[0]
            count = min(len(data), len(buffer) - self._filled)
            buffer[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(buffer):
                self._flush()

    def _flush(self) -> None:
        wait(self._going)
        pair = self._buffers.pair
        full, self._filled = pair[0][: self._filled], 0
        self._going = self._buffers.start(lambda: self._put(full), lambda: self._checksum.update(full))
        pair.reverse()

    def _put(self, data: memoryview) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError as error:
                if not _was_direct(self._file, error):
                    raise

    def finish(self) -> str:
        """Have everything on the disk; the checksum."""
        self._flush()
        wait(self._going)
        os.fsync(self._file)
        return self._checksum.text

    def close(self) -> None:
        """Let go of the file."""
        wait_quietly(self._going)
        os.close(self._file)


def wait_quietly(going: list[Future[Any]]) -> None:
    """Until all are done, whatever became of them."""
    for each in going:
        each.exception()


class Inlet:
    """A file, read from its beginning to its end."""

    def __init__(self, path: Path, pair: Buffers) -> None:
        self._path, self._buffers = path, pair
        self._checksum = Checksum()
        self._file = os.open(path, os.O_RDONLY)
        set_direct(self._file, True)
        self._current = memoryview(b"")
        self._position = 0
        self._summing: list[Future[object]] = []
        self._reading = self._buffers.start(self._get)

    def _get(self) -> memoryview:
        """The next buffer's worth."""
        buffer, filled = self._buffers.pair[1], 0
        while filled < len(buffer):
            try:
                count = os.readv(self._file, [buffer[filled:]])
            except OSError as error:
                if not _was_direct(self._file, error):
                    raise
                continue
            if not count:
                break
            filled += count
        return buffer[:filled]

    def read(self, target: memoryview) -> None:
        """The next bytes; `CheckpointDamaged` if there are none left."""
        while target:
            if not self._current:
                self._advance()
            if not self._current:
                raise damaged(self._path, f"it ends after {self._position:,} bytes, in the midst of a tensor")
            count = min(len(target), len(self._current))
            target[:count] = self._current[:count]
            target, self._current = target[count:], self._current[count:]
            self._position += count

    def _advance(self) -> None:
        wait(self._summing)
        (found,) = wait(self._reading)
        self._current = found
        self._buffers.pair.reverse()
        self._summing = self._buffers.start(lambda: self._checksum.update(found))
        self._reading = self._buffers.start(self._get)

    def checksum(self) -> str:
        """Of the whole file."""
        while True:
            self._advance()
            if not self._current:
                wait(self._summing)
                return self._checksum.text

    def close(self) -> None:
        """Let go of the file."""
        wait_quietly(self._summing)
        wait_quietly(self._reading)
        os.close(self._file)

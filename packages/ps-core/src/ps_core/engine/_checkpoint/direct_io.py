"""Write and read files in order, past the page cache: one buffer is filled while the disk uses the other.

[Note: past the page cache]
A checkpoint should push nothing else out of memory. It also has to reach the disk. Besides, direct transfers were
several times as fast as buffered ones with an fsync. File systems without them get ordinary calls.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ps_core.engine._checkpoint.crc32 import Checksum
from ps_core.engine._checkpoint.dense_memory import is_plain, plain_copy
from ps_core.engine._checkpoint.safetensors_format import by_rows, bytes_of, damaged

BUFFER_BYTES = 8 * 2**20
"""The size of each of the two buffers, where chunks are not smaller."""
PAGE_BYTES = mmap.PAGESIZE


class DoubleBuffer:
    """Two buffers for one file at a time, and two threads: one for the disk, one for the checksum."""

    def __init__(self, size: int, helpers: ThreadPoolExecutor) -> None:
        self.pair = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]
        self.helpers = helpers

    def start(self, *calls: Callable[[], object]) -> list[Future[object]]:
        """Start these calls in the two threads."""
        return [self.helpers.submit(call) for call in calls]


@contextmanager
def buffers(largest_chunk_bytes: int) -> Iterator[DoubleBuffer]:
    """Make two buffers of together at most half a chunk (or two pages)."""
    size = min(BUFFER_BYTES, max(PAGE_BYTES, largest_chunk_bytes // 4 // PAGE_BYTES * PAGE_BYTES))
    with ThreadPoolExecutor(2) as helpers:
        yield DoubleBuffer(size, helpers)


def wait(going: list[Future[Any]]) -> list[Any]:
    """Wait until all have ended; then raise the first error, or return the results."""
    for each in going:
        each.exception()
    return [each.result() for each in going]


def open_new(path: Path, folder: int | None = None) -> int:
    """Open a new file to write to; ``folder``: an open folder that it is made in."""
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.open(path, how, 0o666) if folder is None else os.open(path.name, how, 0o666, dir_fd=folder)


def set_direct(file: int, on: bool) -> bool:
    """Set whether transfers of a file bypass the page cache; return False if the file system cannot."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _was_direct(file: int, error: OSError) -> bool:
    """Return True if a transfer failed because it was direct, as at a file's end; then switch direct transfers off."""
    direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
    return error.errno == errno.EINVAL and direct and set_direct(file, False)


class DirectWriter:
    """Write a new file from its beginning to its end."""

    def __init__(self, path: Path, pair: DoubleBuffer, folder: int | None = None) -> None:
        """Create the file; ``folder``: an open folder to create it in, even if that folder is renamed."""
        self._buffers = pair
        self._checksum = Checksum()
        self._filled = 0
        self._going: list[Future[object]] = []
        self._file = open_new(path, folder)
        set_direct(self._file, True)

    def write(self, data: memoryview) -> None:
        """Append bytes; they are copied."""
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

    def finish(self) -> int:
        """Sync the file to the disk; return its checksum."""
        self._flush()
        wait(self._going)
        os.fsync(self._file)
        return self._checksum.value

    def close(self) -> None:
        """Close the file."""
        wait_quietly(self._going)
        os.close(self._file)


def wait_quietly(going: list[Future[Any]]) -> None:
    """Wait until all have ended, with or without an error."""
    for each in going:
        each.exception()


class DirectReader:
    """Read runs of bytes of a file, one after another."""

    def __init__(self, path: Path, pair: DoubleBuffer, runs: Sequence[tuple[int, int]]) -> None:
        """Open the file; ``runs``: first bytes and ends, ascending."""
        self._path, self._buffers = path, pair
        self._checksums = [Checksum() for _ in runs]
        self._windows = _windows(runs, len(pair.pair[0]))
        self._file = os.open(path, os.O_RDONLY)
        set_direct(self._file, True)
        self._current = memoryview(b"")
        self._summing: list[Future[object]] = []
        self._reading = self._buffers.start(self._get)

    def _get(self) -> tuple[int, memoryview] | None:
        """Read the next buffer; return the index of its run and the bytes, or None at the end."""
        window = next(self._windows, None)
        if window is None:
            return None
        buffer, filled = self._buffers.pair[1], 0
        room = -(-window.end // PAGE_BYTES) * PAGE_BYTES
        while filled < window.end:
            try:
                count = os.preadv(self._file, [buffer[filled:room]], window.at + filled)
            except OSError as error:
                if not _was_direct(self._file, error):
                    raise
                continue
            if not count:
                raise damaged(self._path, f"it ends after {window.at + filled:,} bytes, in the midst of a tensor")
            filled += count
        return window.run, buffer[window.begin : window.end]

    def read(self, target: memoryview) -> None:
        """Read the next bytes into ``target``."""
        while target:
            if not self._current:
                self._advance()
            count = min(len(target), len(self._current))
            target[:count] = self._current[:count]
            target, self._current = target[count:], self._current[count:]

    def _advance(self) -> None:
        wait(self._summing)
        (found,) = wait(self._reading)
        assert found is not None, "a reader asks for no more bytes than were announced"
        run, self._current = found
        data, checksum = self._current, self._checksums[run]
        self._buffers.pair.reverse()
        self._summing = self._buffers.start(lambda: checksum.update(data))
        self._reading = self._buffers.start(self._get)

    def sums(self) -> list[int]:
        """Return the checksum of each run, once all was read."""
        wait(self._summing)
        return [each.value for each in self._checksums]

    def close(self) -> None:
        """Close the file."""
        wait_quietly(self._summing)
        wait_quietly(self._reading)
        os.close(self._file)


class _Window(NamedTuple):
    """One read of a buffer from ``at`` on; the bytes from ``begin`` to ``end`` are used."""

    run: int
    at: int
    begin: int
    end: int


def _windows(runs: Iterable[tuple[int, int]], size: int) -> Iterator[_Window]:
    """Cut runs into windows that begin on whole pages, as direct transfers must."""
    for run, (start, stop) in enumerate(runs):
        for at in range(start - start % PAGE_BYTES, stop, size):
            yield _Window(run, at, max(start - at, 0), min(stop - at, size))


PIECE_BYTES = 4 * 2**20


class TensorWriter:
    """Write a file: the table, then one tensor after another."""

    def __init__(self, path: Path, table: bytes, pair: DoubleBuffer, folder: int | None = None) -> None:
        """Create the file and write its table; ``folder``: see `DirectWriter`."""
        self._out = DirectWriter(path, pair, folder)
        try:
            self._out.write(memoryview(table))
        except BaseException:
            self._out.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """Append a tensor's values."""
        if is_plain(tensor):
            self._out.write(bytes_of(tensor))
            return
        for piece in by_rows(tensor, PIECE_BYTES):
            plain = plain_copy(piece)
            self._out.write(bytes_of(plain))

    def finish(self) -> int:
        """Sync the file to the disk; return its checksum."""
        return self._out.finish()

    def close(self) -> None:
        """Close the file."""
        self._out.close()


class TensorReader:
    """Read tensors from runs of a file, one after another."""

    def __init__(self, path: Path, runs: Sequence[tuple[int, int]], pair: DoubleBuffer) -> None:
        self._in = DirectReader(path, pair, runs)

    def read(self, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Read the next values, of type ``dtype``, and round them to the target's type."""
        if is_plain(target) and target.dtype == dtype:
            self._in.read(bytes_of(target))
            return
        # Read into a buffer, and copy that to the target's strides, type and device.
        for piece in by_rows(target, PIECE_BYTES * target.itemsize // max(dtype.itemsize, target.itemsize)):
            staged = torch.empty(piece.shape, dtype=dtype, device="cpu")
            self._in.read(bytes_of(staged))
            with torch.inference_mode(target.is_inference()):  # else PyTorch writes to no inference tensor
                piece.copy_(staged)

    def skip(self, left: int) -> None:
        """Read the next bytes for the checksum only."""
        while left:
            staged = bytearray(min(left, PIECE_BYTES))
            self._in.read(memoryview(staged))
            left -= len(staged)

    def sums(self) -> list[int]:
        """Return the checksum of each run, once all was read."""
        return self._in.sums()

    def close(self) -> None:
        """Close the file."""
        self._in.close()

"""Tensors into files and back, in pieces: no more memory than a piece, none where a tensor's own bytes will do.

[Note: the checksum]
SHA-256, which `sha256sum -c` checks anywhere, and which processors of the last years have instructions for. It is taken
of every byte by a second thread while the first writes or reads, so that what it costs is hidden behind the disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ps_core.engine._safetensors import (
    Entry,
    by_rows,
    bytes_of,
    damaged,
    is_plain,
    read_all,
    table_of,
    write_all,
)

PIECE_BYTES = 8 * 2**20
SMALL_BYTES = 2**16
"""Less is not worth another thread's while."""


class Digest:
    """A checksum that is taken aside; what it is fed must stay as it is until the next piece but one, or `settle`."""

    def __init__(self, helper: ThreadPoolExecutor) -> None:
        self._helper = helper
        self._hash = hashlib.sha256()
        self._going: Future[None] | None = None
        self._held: torch.Tensor | None = None

    def feed(self, piece: memoryview, owner: torch.Tensor | None = None) -> None:
        """Take in more bytes; ``owner`` has them."""
        self.settle()
        if len(piece) <= SMALL_BYTES:
            self._hash.update(piece)
        else:
            self._held = owner
            self._going = self._helper.submit(self._hash.update, piece)

    def settle(self) -> None:
        """Have taken in everything."""
        going, self._going = self._going, None
        if going is not None:
            going.result()
        self._held = None

    def text(self) -> str:
        """Of everything so far."""
        self.settle()
        return self._hash.hexdigest()


class Sink:
    """A file being written: the table, then each tensor as it comes."""

    def __init__(self, path: Path, entries: Sequence[Entry], helper: ThreadPoolExecutor) -> None:
        self._digest = Digest(helper)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(table_of(entries)))

    def put(self, tensor: torch.Tensor) -> None:
        """The next one's values. They may change as soon as this has returned."""
        for piece in by_rows(tensor, PIECE_BYTES):
            plain = piece if is_plain(piece) else piece.to("cpu").contiguous()
            self._write(bytes_of(plain), plain)

    def _write(self, data: memoryview, owner: torch.Tensor | None = None) -> None:
        self._digest.feed(data, owner)
        write_all(self._file, data)
        self._digest.settle()

    def finish(self) -> str:
        """Have it on the disk; the checksum."""
        os.fsync(self._file)
        return self._digest.text()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


class Source:
    """A file being read, from its beginning to its end."""

    def __init__(self, path: Path, start: int, digest: Digest | None) -> None:
        self._path = path
        self._digest = digest
        self._position = 0
        self._file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._read(bytearray(start))

    def take(self, entry: Entry, target: torch.Tensor) -> None:
        """The next tensor's values, rounded to the target's type where that is another."""
        if is_plain(target) and target.dtype == entry.dtype:
            for piece in by_rows(target, PIECE_BYTES):
                self._read(bytes_of(piece))
            self.settle()
            return
        # A copy of about a piece: by rows, so that it may go to other strides, types and devices.
        for piece in by_rows(target, PIECE_BYTES * target.itemsize // max(entry.dtype.itemsize, target.itemsize)):
            staged = torch.empty(piece.shape, dtype=entry.dtype)
            self._read(bytes_of(staged), staged)
            piece.copy_(staged)

    def skip(self, entry: Entry) -> None:
        """Pass over the next tensor."""
        if self._digest is None:
            self._position += entry.nbytes
            return
        left = entry.nbytes
        while left:
            staged = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
            self._read(bytes_of(staged), staged)
            left -= staged.nbytes

    def _read(self, target: bytearray | memoryview, owner: torch.Tensor | None = None) -> None:
        view = memoryview(target)
        count = read_all(self._file, view, self._position)
        if count < len(view):
            raise damaged(self._path, f"it ends after {self._position + count:,} bytes, in the midst of a tensor")
        self._position += count
        if self._digest is not None:
            self._digest.feed(view, owner)

    def settle(self) -> None:
        """What was taken may be changed from here on."""
        if self._digest is not None:
            self._digest.settle()

    def check(self, expected: str) -> None:
        """`CheckpointDamaged` unless every byte of the file has been as it was written."""
        assert self._digest is not None, "made to be checked"
        found = self._digest.text()
        if found != expected:
            raise damaged(self._path, f"its checksum is {found}, expected {expected}: bytes have changed")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

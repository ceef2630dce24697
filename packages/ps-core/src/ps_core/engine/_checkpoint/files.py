"""Tensors into files and back, in pieces: never more of a tensor at a time than `PIECE_BYTES`, or a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ps_core.engine._checkpoint.direct import Buffers, Inlet, Outlet
from ps_core.engine._checkpoint.safetensors import Entry, by_rows, bytes_of, damaged, is_plain, table_of

PIECE_BYTES = 4 * 2**20


class Sink:
    """A file being written: the table, then each tensor as it comes."""

    def __init__(self, path: Path, entries: Sequence[Entry], pair: Buffers) -> None:
        table = table_of(entries)
        self._out = Outlet(path, pair)
        try:
            self._out.write(memoryview(table))
        except BaseException:
            self._out.close()
            raise

    def put(self, tensor: torch.Tensor) -> None:
        """The next one's values."""
        if is_plain(tensor):
            self._out.write(bytes_of(tensor))
            return
        for piece in by_rows(tensor, PIECE_BYTES):
            plain = piece.to("cpu").contiguous()
            self._out.write(bytes_of(plain))

    def finish(self) -> str:
        """Have it on the disk; the checksum."""
        return self._out.finish()

    def close(self) -> None:
        """Let go of the file."""
        self._out.close()


class Source:
    """A file being read, from its beginning to its end."""

    def __init__(self, path: Path, start: int, pair: Buffers) -> None:
        self._path = path
        self._in = Inlet(path, pair)
        try:
            self._in.read(memoryview(bytearray(start)))
        except BaseException:
            self._in.close()
            raise

    def take(self, entry: Entry, target: torch.Tensor) -> None:
        """The next tensor's values, rounded to the target's type where that is another."""
        if is_plain(target) and target.dtype == entry.dtype:
            self._in.read(bytes_of(target))
            return
        # By way of a piece, which may go to other strides, types and devices.
        for piece in by_rows(target, PIECE_BYTES * target.itemsize // max(entry.dtype.itemsize, target.itemsize)):
            staged = torch.empty(piece.shape, dtype=entry.dtype)
            self._in.read(bytes_of(staged))
            piece.copy_(staged)

    def skip(self, entry: Entry) -> None:
        """Pass over the next tensor."""
        left = entry.nbytes
        while left:
            staged = bytearray(min(left, PIECE_BYTES))
            self._in.read(memoryview(staged))
            left -= len(staged)

    def check(self, expected: str) -> None:
        """`CheckpointDamaged` unless every byte of the file has been as it was written."""
        found = self._in.checksum()
        if found != expected:
            raise damaged(self._path, f"its checksum is {found}, expected {expected}: bytes have changed")

    def close(self) -> None:
        """Let go of the file."""
        self._in.close()

"""Tensors into files and back, in pieces: never more of a tensor at a time than `PIECE_BYTES`, or a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ps_core.engine._checkpoint.direct_io import DirectReader, DirectWriter, DoubleBuffer
from ps_core.engine._checkpoint.safetensors_format import by_rows, bytes_of, is_plain

PIECE_BYTES = 4 * 2**20


class TensorWriter:
    """A file being written: the table, then each tensor as it comes."""

    def __init__(self, path: Path, table: bytes, pair: DoubleBuffer, folder: int | None = None) -> None:
        """``folder``: see `DirectWriter`."""
        self._out = DirectWriter(path, pair, folder)
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

    def finish(self) -> int:
        """Have it on the disk; the checksum."""
        return self._out.finish()

    def close(self) -> None:
        """Let go of the file."""
        self._out.close()


class TensorReader:
    """Runs of a file being read, one after another."""

    def __init__(self, path: Path, runs: Sequence[tuple[int, int]], pair: DoubleBuffer) -> None:
        self._in = DirectReader(path, pair, runs)

    def take(self, dtype: torch.dtype, target: torch.Tensor) -> None:
        """The next values, of a type, rounded to the target's where that is another."""
        if is_plain(target) and target.dtype == dtype:
            self._in.read(bytes_of(target))
            return
        # By way of a piece, which may go to other strides, types and devices.
        for piece in by_rows(target, PIECE_BYTES * target.itemsize // max(dtype.itemsize, target.itemsize)):
            staged = torch.empty(piece.shape, dtype=dtype)
            self._in.read(bytes_of(staged))
            piece.copy_(staged)

    def skip(self, left: int) -> None:
        """Pass over the next bytes."""
        while left:
            staged = bytearray(min(left, PIECE_BYTES))
            self._in.read(memoryview(staged))
            left -= len(staged)

    def sums(self) -> list[int]:
        """The checksum of each run, once all was read."""
        return self._in.sums()

    def close(self) -> None:
        """Let go of the file."""
        self._in.close()

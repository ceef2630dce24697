"""Read files of token numbers: a sequence at a time, never as a whole.

They are not mapped into memory. When a mapped file is cut short, the process ends (SIGBUS), or reads zeros to a page's
end. Ordinary reads notice that.
"""

from __future__ import annotations

import ast
import hashlib
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ps_core._errors import InvalidInput

_TYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i2": torch.int16, "<u4": torch.uint32, "<i4": torch.int32}
_TYPES |= {"<i8": torch.int64}
_PIECE_BYTES = 2**20


class _Opened:
    """A file that is read at positions, open for as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.bytes = os.fstat(self._file).st_size

    def read(self, start: int, size: int) -> bytearray:
        """Return these bytes; raise `InvalidInput` if the file is shorter than when it was opened."""
        data, done = bytearray(size), 0
        while done < size:
            count = os.preadv(self._file, [memoryview(data)[done:]], start + done)
            if not count:
                break
            done += count
        found = os.fstat(self._file).st_size
        if done < size or found < self.bytes:
            raise InvalidInput(
                f"--data: {str(self.path)!r} has {found:,} bytes, expected {self.bytes:,}: it was cut short during the "
                "run; allowed is the file as it was, to go on from the last checkpoint"
            )
        return data


class TokenFile:
    """A run of tokens in a file; a slice is read when it is used."""

    def __init__(self, file: _Opened, dtype: torch.dtype, start: int, count: int) -> None:
        """Describe the run; ``start``: the position of the first token, in bytes."""
        self._file, self.dtype, self._start, self._count = file, dtype, start, count

    def __len__(self) -> int:
        return self._count

    def part(self, first: int, end: int) -> TokenFile:
        """Return the run from token ``first`` up to ``end``, without reading it."""
        return TokenFile(self._file, self.dtype, self._start + first * self.dtype.itemsize, end - first)

    def __getitem__(self, which: slice) -> Tensor:
        """Read a slice."""
        first, end, _ = which.indices(self._count)
        if end <= first:
            return torch.empty(0, dtype=self.dtype)
        size = self.dtype.itemsize
        return torch.frombuffer(self._file.read(self._start + first * size, (end - first) * size), dtype=self.dtype)


def open_token_file(path: Path) -> TokenFile:
    """Open a ``.bin`` file (16-bit numbers, little-endian, nothing else) or a flat ``.npy`` file."""
    try:
        file = _Opened(path)
        kind, start, told = _npy(path) if path.suffix == ".npy" else (torch.uint16, 0, None)
    except OSError as error:
        raise InvalidInput(
            f"--data: cannot read {str(path)!r}: {error.strerror}; allowed is a file that you may read"
        ) from error
    size = file.bytes - start
    if size % kind.itemsize or size < 1:
        raise InvalidInput(
            f"--data: {str(path)!r} has {size} bytes of tokens; allowed is a multiple of {kind.itemsize}"
        )
    count = size // kind.itemsize
    if told not in (None, count):
        raise InvalidInput(
            f"--data: {str(path)!r} has {count:,} tokens, its header says {told:,}; allowed is a whole file"
        )
    return TokenFile(file, kind, start, count)


def _npy(path: Path) -> tuple[torch.dtype, int, int]:
    """Read a ``.npy`` file's header: the type of its numbers, where they start, and how many they are."""
    with path.open("rb") as file:
        magic, version = file.read(6), file.read(2)
        width = 2 if version[:1] == b"\x01" else 4
        length = int.from_bytes(file.read(width), "little")
        header = file.read(min(length, 2**16))
    try:
        told = ast.literal_eval(header.decode("latin-1").strip())
        kind, shape = _TYPES[told["descr"]], told["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        kind, shape = torch.uint8, ()  # refused below
    if magic != b"\x93NUMPY" or len(shape) != 1:
        raise InvalidInput(
            f"--data: {str(path)!r} is not a .npy file of tokens; allowed is one dimension of {', '.join(_TYPES)}"
        )
    return kind, 8 + width + length, shape[0]


def digest_of(path: Path) -> bytes:
    """Return a hash of the size, the first and the last piece: quick for large files, and different for others."""
    size, found = path.stat().st_size, hashlib.sha256()
    found.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        found.update(file.read(_PIECE_BYTES))
        file.seek(max(0, size - _PIECE_BYTES))
        found.update(file.read(_PIECE_BYTES))
    return found.digest()

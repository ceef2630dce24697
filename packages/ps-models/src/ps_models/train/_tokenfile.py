"""Files of token numbers, mapped into memory: never read as a whole, whatever their size."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import torch
from torch import Tensor

from ps_core._errors import InvalidInput

_TYPES = {"|u1": torch.uint8, "<u2": torch.uint16, "<i2": torch.int16, "<u4": torch.uint32, "<i4": torch.int32}
_TYPES |= {"<i8": torch.int64}
_PIECE_BYTES = 2**20


def token_file(path: Path) -> Tensor:
    """The tokens of a ``.bin`` file (16-bit numbers, little-endian, nothing else) or a flat ``.npy`` file."""
    try:
        size = path.stat().st_size
        kind, start = _npy(path) if path.suffix == ".npy" else (torch.uint16, 0)
    except OSError as error:
        raise InvalidInput(f"--data: cannot read {str(path)!r}: {error.strerror}; allowed is what can be") from error
    if start % kind.itemsize or (size - start) % kind.itemsize or size == start:
        raise InvalidInput(
            f"--data: {str(path)!r} has {size - start} bytes of tokens; allowed is a multiple of {kind.itemsize}"
        )
    return torch.from_file(str(path), shared=False, size=size // kind.itemsize, dtype=kind)[start // kind.itemsize :]


def _npy(path: Path) -> tuple[torch.dtype, int]:
    """The type of a ``.npy`` file's numbers, and where they start."""
    with path.open("rb") as file:
        magic, version = file.read(6), file.read(2)
        width = 2 if version[:1] == b"\x01" else 4
        length = int.from_bytes(file.read(width), "little")
        header = file.read(min(length, 2**16))
    try:
        told = ast.literal_eval(header.decode("latin-1").strip())
        kind, shape = _TYPES[told["descr"]], told["shape"]
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        kind, shape = torch.uint8, ()
    if magic != b"\x93NUMPY" or len(shape) != 1:
        raise InvalidInput(
            f"--data: {str(path)!r} is not a .npy file of tokens; allowed is one dimension of {', '.join(_TYPES)}"
        )
    return kind, 8 + width + length


def digest_of(path: Path) -> bytes:
    """Of the size, the first and the last piece: enough to notice another file, quick on a large one."""
    size, found = path.stat().st_size, hashlib.sha256()
    found.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        found.update(file.read(_PIECE_BYTES))
        file.seek(max(0, size - _PIECE_BYTES))
        found.update(file.read(_PIECE_BYTES))
    return found.digest()

"""Read and write the safetensors format: eight bytes of length, a JSON table, the tensors' bytes without gaps.

The format is implemented here, so that checkpoints need no other package. Every program that knows the format reads
them. The table of a written file follows from names, types and shapes alone. So a reader who knows those can tell a
damaged table from another model's.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ps_core._errors import CheckpointDamaged, InvalidInput
from ps_core.engine._checkpoint.dense_memory import is_plain

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of types."""
_NAMES = {dtype: name for name, dtype in TYPES.items()}
LENGTH_BYTES, LARGEST_TABLE, _ALIGNED = 8, 100_000_000, 8
"""The format's constants: bytes of the table's length, the longest table that is read, and a table's alignment."""
_PICKLED = (b"PK\x03\x04", b"\x80\x02")
"""The first bytes of files of ``torch.save``."""
METADATA = {"format": "pt"}
"""Metadata that readers of model files look for."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensor: str = ""
    """The whole tensor, of which these are some elements in memory order; empty: these are all, row by row."""
    first: int = 0
    """The index of the first of these elements."""

    @property
    def owner(self) -> str:
        """Return the tensor's name, or the name of the tensor that this is a part of."""
        return self.tensor or self.name

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.numel * self.dtype.itemsize


def type_name(what: str, dtype: torch.dtype) -> str:
    """Return the format's name of a type; ``what`` names the tensor in messages."""
    name = _NAMES.get(dtype)
    if name is None:
        known = ", ".join(str(each).removeprefix("torch.") for each in _NAMES)
        raise InvalidInput(
            f"{what} is {dtype}, which the safetensors format does not have: convert it to one of {known}"
        )
    return name


def table_of(entries: Iterable[TensorEntry], save: str = "") -> bytes:
    """Return the first bytes of a file with these tensors; ``save``: the mark of the save."""
    table: dict[str, Any] = {"__metadata__": {**METADATA, "save": save} if save else METADATA}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        kind = type_name(repr(entry.name), entry.dtype)
        table[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def in_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort tensors by element size, largest first, so that every tensor is aligned to its own elements."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def read_table(path: Path) -> tuple[int, list[TensorEntry]]:
    """Return where a file's tensors begin, and the tensors in their order; raise `CheckpointDamaged`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            if not 2 <= length <= min(LARGEST_TABLE, size - LENGTH_BYTES):
                if first.startswith(_PICKLED):
                    raise InvalidInput(
                        f"{path} is of torch.save, expected safetensors: pickled weights are not read; save them anew, "
                        "safetensors.torch.save_file(torch.load(open(path, 'rb'), weights_only=True), "
                        "'model.safetensors')"
                    )
                raise damaged(path, f"its table would have {length:,} bytes, the file has {size:,}: it is cut short")
            text = file.read(length)
    except OSError as error:
        raise damaged(path, str(error.strerror)) from error
    try:
        table = json.loads(text, object_pairs_hook=no_key_twice)
        rows = [_row(name, row) for name, row in table.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"its table cannot be read ({error})") from None
    rows.sort(key=lambda row: row[:2])
    ends = [0, *(end for _, end, _ in rows)]
    for (start, end, entry), before in zip(rows, ends, strict=False):
        if start != before or end - start != entry.nbytes:
            raise damaged(path, f"{entry.name!r} would lie from byte {start} to {end}, expected {entry.nbytes} bytes")
    if LENGTH_BYTES + length + ends[-1] != size:
        raise damaged(path, f"it has {size:,} bytes, expected {LENGTH_BYTES + length + ends[-1]:,}")
    return LENGTH_BYTES + length, [entry for _, _, entry in rows]


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dictionary of a JSON object; raise `ValueError` for a duplicate key (JSON uses the last)."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"it has {twice!r} more than once")
    return found


def keeps_values(given: torch.dtype, kept: torch.dtype) -> bool:
    """Return True if values of one type can be stored in another: floating-point ones are rounded, integers must
    fit.
    """
    if given == kept or (given.is_floating_point and kept.is_floating_point):
        return True
    if any(dtype.is_floating_point or dtype.is_complex for dtype in (given, kept)):
        return False
    (low, high), (least, most) = _limits(given), _limits(kept)
    return least <= low and high <= most


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _row(name: str, row: dict[str, Any]) -> tuple[int, int, TensorEntry]:
    shape, (start, end) = tuple(row["shape"]), row["data_offsets"]
    if not all(isinstance(each, int) and each >= 0 for each in (*shape, start, end)):
        raise ValueError(f"{name!r} has shape {shape}")
    if row["dtype"] not in TYPES:
        raise ValueError(f"{name!r} has type {row['dtype']!r}, expected one of {', '.join(TYPES)}")
    return start, end, TensorEntry(name, TYPES[row["dtype"]], shape)


def damaged(path: Path, what: str) -> CheckpointDamaged:
    """Return the error for a damaged file."""
    return CheckpointDamaged(f"{path}: {what}; take another checkpoint, or copy this file anew from where it is whole")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_plain` is true; the caller keeps the tensor alive."""
    assert is_plain(tensor), "its bytes are here, in a row"
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr() if tensor.nbytes else 0)
    return memoryview(array).cast("B")


def by_rows(tensor: torch.Tensor, piece_bytes: int) -> Iterable[torch.Tensor]:
    """Return a tensor in pieces of whole rows, of about ``piece_bytes``, at least one row each."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return (tensor,)
    count = max(1, piece_bytes * tensor.shape[0] // max(1, tensor.nbytes))
    stops = [*range(0, tensor.shape[0], count), tensor.shape[0]]
    return (tensor[start:stop] for start, stop in pairwise(stops))


def write_all(file: int, data: memoryview) -> None:
    """Write all bytes, in as many calls as it takes."""
    while data:
        data = data[os.write(file, data) :]

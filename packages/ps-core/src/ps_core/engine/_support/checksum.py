"""Checksums of tensors, which ranks compare."""

from __future__ import annotations

import ctypes
from zlib import crc32

import torch


def checksum(value: torch.Tensor) -> str:
    """Return the CRC-32 of a tensor's elements, row by row; NumPy need not be installed."""
    rows = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    found = crc32((ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr())) if rows.nbytes else crc32(b"")
    return f"{found:08x}"

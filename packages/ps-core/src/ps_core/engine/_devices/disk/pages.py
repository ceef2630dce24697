"""Giving pages of private memory back to the system while the memory stays mapped."""

from __future__ import annotations

import ctypes
import mmap

import torch

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def give_back_pages(memory: torch.Tensor) -> None:
    """Let go of the whole pages among these bytes, which read as zero from now on; nothing where that is unknown."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _DONTNEED is not None and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)

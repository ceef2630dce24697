"""Giving pages of memory back to the system while the memory stays mapped."""

from __future__ import annotations

import ctypes
import mmap

import torch

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)
_REMOVE = getattr(mmap, "MADV_REMOVE", None)


def give_back_pages(memory: torch.Tensor) -> None:
    """Return whole pages of this memory to the system; they read as zero. Do nothing where that is unsupported."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _DONTNEED is None or first >= end:
        return
    madvise, span = ctypes.CDLL(None).madvise, (ctypes.c_void_p(first), ctypes.c_size_t(end - first))
    if _REMOVE is None or madvise(*span, _REMOVE):  # which fails for private memory, and is all there is for shared
        madvise(*span, _DONTNEED)

"""Return pages of private memory to the system, while the memory stays mapped."""

from __future__ import annotations

import ctypes
import mmap

import torch

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def give_back_pages(memory: torch.Tensor) -> None:
    """Return whole pages of this memory to the system; they read as zero. Do nothing where that is unsupported."""
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _DONTNEED is not None and first < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONTNEED)

"""Allocate host memory of an exact size that a device can copy from and to directly.

An allocator that rounds up to powers of two can take twice the requested memory. A mapping takes whole pages only, and
registering the mapping pins it. Linux places pages when they are first touched. So huge pages, and memory near the
device, are requested before that. Registering would touch the pages with one thread, so several threads do that first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from ps_kernels._arrays import check_count, check_label
from ps_kernels._errors import InvalidArgument, KernelError
from ps_kernels._say_once import say_once

if TYPE_CHECKING:
    import torch

_PREFERRED = 1
_TOUCHING_THREADS, _BYTES_PER_THREAD = 16, 1 << 25
"""More threads than these wait for the system's locks; for fewer bytes starting one costs more than it saves."""
_HUGE_PAGE = 1 << 21
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The system call's number, which libc does not wrap."""


class Pinner(Protocol):
    """Protocol of an object that pins memory."""

    def node(self) -> int | None:
        """Return the memory node nearest to the device; None if there is none."""

    def pin(self, address: int, numbytes: int) -> str | None:
        """Pin memory; return why that failed, or None."""

    def unpin(self, address: int) -> None:
        """Unpin memory, once copies from and to it have ended."""


class CudaPinner:
    """Pin by CUDA's runtime, as PyTorch has loaded it."""

    def node(self) -> int | None:
        """Return the memory node of the current device's bus."""
        import torch

        if not torch.cuda.is_available():
            return None
        device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # older releases lack these names
        with suppress(AttributeError, OSError, ValueError):
            place = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{place}/numa_node").read_text("ascii"))
            return node if node >= 0 else None
        return None

    def pin(self, address: int, numbytes: int) -> str | None:
        """Pin memory for every device; return why that failed, or None."""
        import torch

        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        touch(address, numbytes)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        portable = 1
        status = int(runtime.cudaHostRegister(address, numbytes, portable))
        if status == 0:
            return None
        with suppress(RuntimeError):  # the runtime would report this failure at whatever kernel is launched next
            torch.empty(1, dtype=torch.uint8, device="cuda").fill_(1)
        return f"cudaHostRegister failed with status {status}"

    def unpin(self, address: int) -> None:
        """Wait for the copies of every device that this process uses, then unpin."""
        import torch

        torch_c: Any = torch._C
        for index in range(torch.cuda.device_count()):
            if torch_c._cuda_hasPrimaryContext(index):  # waiting for any other would make a context, of 0.5 GB, there
                torch.cuda.synchronize(index)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)


class _Mapping(mmap.mmap):
    """Private memory, unpinned before it is unmapped. Tensors refer to it, so it outlives the last of them."""

    pinner: Pinner | None = None
    address: int = 0

    def unpin(self) -> None:
        """Unpin the pinned bytes."""
        pinner, self.pinner = self.pinner, None
        if pinner is not None:
            pinner.unpin(self.address)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the process's end unpins, and CUDA's runtime may be gone
            self.unpin()


class PinnedArena:
    """Allocate host memory of an exact size (whole pages), pinned if possible; else a warning says so.

    The arena's tensors keep the memory alive, so dropping the arena while tensors are in use is safe. To free the
    memory at a definite moment, call :meth:`close`, which raises while there are tensors.
    """

    def __init__(self, bytes: int, *, pin: bool = True, pinner: Pinner | None = None) -> None:
        check_count("bytes", bytes)
        if not isinstance(pin, bool):
            raise InvalidArgument(f"pin: expected True or False, found {pin!r}")
        # Huge pages are for private memory; a child gets none of it, so no page is copied under a device's feet.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            self._mapping = _Mapping(-1, bytes, **private)
        except OSError as error:
            raise InvalidArgument(f"bytes: cannot allocate {bytes:,} bytes ({error})") from error
        self._mapping.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._windows: list[ref[ctypes.Array[ctypes.c_char]]] = []
        self._closed = False
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK") if pin else ("MADV_HUGEPAGE",):
            with suppress(AttributeError, OSError):  # a system or a kernel without it
                self._mapping.madvise(getattr(mmap, advice))
        if pin:
            self._pin(pinner or CudaPinner())

    def _pin(self, pinner: Pinner) -> None:
        node = pinner.node()
        if node is not None:
            prefer_node(self._mapping.address, len(self._mapping), node)
        why_not = pinner.pin(self._mapping.address, len(self._mapping))
        if why_not is None:
            self._mapping.pinner = pinner
        else:
            say_once(f"host memory is not pinned, so copies are slower: {why_not}")

    @property
    def bytes(self) -> int:
        """Return the requested number of bytes."""
        return 0 if self._closed else len(self._mapping)

    @property
    def pinned(self) -> bool:
        """Return True if devices can copy from and to the memory directly."""
        return self._mapping.pinner is not None

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the arena's memory; ``offset`` counts bytes and is a multiple of the element's size."""
        import torch

        if self._closed:
            raise KernelError("this PinnedArena is closed and gives no more tensors; make another")
        if not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype: expected a torch.dtype, found {dtype!r}")
        for name, value in (("offset", offset), ("numel", numel)):
            check_label(name, value)
        size = dtype.itemsize
        if offset < 0 or numel < 0 or offset % size or offset + numel * size > self.bytes:
            raise InvalidArgument(
                f"offset: {numel} elements of {size} bytes from byte {offset}: expected a multiple of {size}, "
                f"and an end within {self.bytes} bytes"
            )
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        # The tensor's storage holds the window, and the window the mapping.
        window = (ctypes.c_char * (numel * size)).from_buffer(self._mapping, offset)
        self._windows = [each for each in self._windows if each() is not None] + [ref(window)]
        return torch.frombuffer(window, dtype=dtype)

    def close(self) -> None:
        """Unpin and free the memory; a second call does nothing. Raise while one of its tensors is alive."""
        if self._closed:
            return
        alive = sum(each() is not None for each in self._windows)
        if alive:
            raise KernelError(f"this PinnedArena has {alive} tensors in use: drop them, and every view of them, first")
        self._mapping.unpin()
        self._mapping.close()
        self._closed = True


def touch(address: int, numbytes: int) -> None:
    """Write zeros to new memory, by several threads, so that all of its pages exist."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_TOUCHING_THREADS, cores, numbytes // _BYTES_PER_THREAD)
    if threads < 2:
        return  # registering touches as fast
    piece = -(-numbytes // threads // _HUGE_PAGE) * _HUGE_PAGE
    with ThreadPoolExecutor(threads) as pool:  # `memset` lets go of the interpreter's lock
        for start in range(0, numbytes, piece):
            pool.submit(ctypes.memset, address + start, 0, min(piece, numbytes - start))


def prefer_node(address: int, numbytes: int, node: int) -> bool:
    """Request pages on a memory node, before they are touched; return True if the kernel accepted that."""
    number = _MBIND.get(platform.machine())
    if sys.platform != "linux" or number is None or not 0 <= node < 64:
        return False
    mask = ctypes.c_ulong(1 << node)
    length = -(-numbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    long, pointer = ctypes.c_long, ctypes.c_void_p
    # The kernel reads one bit fewer than it is told.
    arguments = (long(number), pointer(address), long(length), long(_PREFERRED), ctypes.byref(mask), long(65), long(0))
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)

"""Record allocations that fail on a CUDA device, and raise an error that names the engine where PyTorch's arrives.

[Note: failed allocations]
PyTorch's allocator calls an observer before it raises `torch.OutOfMemoryError`. C++ code may catch that error: cuDNN
then tries an algorithm with a smaller workspace. It would not catch an error of the observer's. So the observer only
records and logs. The engine raises its own error in place of PyTorch's where it can: in the model's forward, and where
the engine allocates. In backward PyTorch's error goes straight to the caller of ``backward()``, and the log has the
advice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ps_core._errors import DeviceOutOfMemory
from ps_core._units import format_bytes
from ps_core.engine._devices.cuda.memory import EngineAllocations
from ps_core.engine._devices.device import Device
from ps_core.engine._support.log import log_line


class CudaOutOfMemory(DeviceOutOfMemory, torch.OutOfMemoryError):
    """Say that memory ran out on a device that an engine uses; also an instance of PyTorch's own error."""


class OutOfMemoryObserver:
    """Observe failed allocations for as long as the device lives: the allocator never drops an observer.

    See [Note: failed allocations].
    """

    def __init__(self, device: Device, owned: EngineAllocations, lift_cap: Callable[[], bool]) -> None:
        """Store what messages tell; ``lift_cap``: see `AllocatorCap.lift`."""
        self._index = device.torch_device.index
        self._owned, self._lift_cap = owned, lift_cap
        self._name = str(device.torch_device)
        self._device = weakref.ref(device)
        self._missing_bytes = 0
        """The largest request that failed since the last `take_missing_bytes`."""
        self._message = ""
        """The engine's words for the last failure since then; empty: there was none."""

    def __call__(self, index: int, wanted_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
        """Record a failed allocation, and log advice where more bytes are missing than before."""
        if index != self._index or self._device() is None:
            return
        capped = (
            "; a larger Budget(device=...), to which PyTorch's allocator is capped, or Options(cap_allocator=False)"
            if self._lift_cap()
            else ""
        )
        advice = (
            "are as they were: call optimizer.zero_grad() and go on, the next pass is planned with "
            "more room for everything else. If that is not enough: a smaller batch, gradient checkpointing, a smaller "
            "Budget(device=...) where others use the device too, or PYTORCH_ALLOC_CONF=expandable_segments:True where "
            f"memory is in pieces{capped}"
        )
        wanted = format_bytes(wanted_bytes)
        self._message = (
            f"CUDA out of memory. Tried to allocate {wanted} on {self._name}; of its {format_bytes(allowed_bytes)}, "
            f"{format_bytes(free_bytes)} are free, and weights and states under management take "
            f"{format_bytes(self._owned.bytes)}. They {advice}"
        )
        if wanted_bytes > self._missing_bytes:
            self._missing_bytes = wanted_bytes
            log_line(
                f"{wanted} could not be allocated on {self._name}. If PyTorch raises an error, "
                f"weights and states {advice}"
            )

    def take_missing_bytes(self) -> int:
        """Return the largest request that failed since the last call; 0: none did."""
        found, self._missing_bytes, self._message = self._missing_bytes, 0, ""
        return found

    def raise_named(self, error: BaseException) -> None:
        """Raise the engine's error in place of PyTorch's for a failed allocation; return if ``error`` is another."""
        if self._message and type(error) is torch.OutOfMemoryError:
            raise CudaOutOfMemory(self._message) from error

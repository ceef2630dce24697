"""Observe allocations that fail on a CUDA device, and raise an error that names the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ps_core._errors import DeviceOutOfMemory
from ps_core._units import format_bytes
from ps_core.engine._devices.cuda.memory import EngineAllocations
from ps_core.engine._devices.device import Device


class CudaOutOfMemory(DeviceOutOfMemory, torch.OutOfMemoryError):
    """Say that memory ran out on a device that an engine uses; also an instance of PyTorch's own error."""


class OutOfMemoryObserver:
    """Observe failed allocations for as long as the device lives: the allocator never drops an observer."""

    def __init__(
        self, device: Device, owned: EngineAllocations, missing_bytes: list[int], lift_cap: Callable[[], bool]
    ) -> None:
        """Store what to compare with; ``missing_bytes``: one figure, the largest request that failed.

        ``lift_cap``: see `AllocatorCap.lift`.
        """
        self._index = device.torch_device.index
        self._owned, self._missing_bytes, self._lift_cap = owned, missing_bytes, lift_cap
        self._name = str(device.torch_device)
        self._device = weakref.ref(device)

    def __call__(self, index: int, wanted_bytes: int, allowed_bytes: int, free_bytes: int) -> None:
        """Raise the engine's error in place of the allocator's."""
        if index != self._index or self._device() is None:
            return
        self._missing_bytes[0] = max(self._missing_bytes[0], wanted_bytes)
        capped = (
            "; a larger Budget(device=...), to which PyTorch's allocator is capped, or Options(cap_allocator=False)"
            if self._lift_cap()
            else ""
        )
        raise CudaOutOfMemory(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted_bytes)} on {self._name}; of its "
            f"{format_bytes(allowed_bytes)}, {format_bytes(free_bytes)} are free, and weights and states under "
            f"management take {format_bytes(self._owned.bytes)}. They are as they were: call optimizer.zero_grad() and "
            "go on, the next pass is planned with more room for everything else. If that is not enough: a smaller "
            "batch, gradient checkpointing, a smaller Budget(device=...) where others use the device too, or "
            f"PYTORCH_ALLOC_CONF=expandable_segments:True where memory is in pieces{capped}"
        )

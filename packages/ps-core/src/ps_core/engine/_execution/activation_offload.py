"""Define ``offloaded``, which keeps activations in host memory until backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ps_core._errors import InvalidInput
from ps_core.engine._execution.engine import Engine
from ps_core.engine._parameters.managed_parameter import ManagedParameter


class _Route(Protocol):
    """Protocol of a way to move tensors to host memory and back. (Any: each class has its own handles.)"""

    def offload(self, tensor: torch.Tensor) -> Any:
        """Start a copy of the tensor to host memory; return the handle for `restore`."""

    def finish_offloads(self) -> None:
        """Make the compute stream wait for all copies that `offload` launched; their sources may be freed then."""

    def restore(self, away: Any) -> torch.Tensor:
        """Return the tensor that `offload` returned this handle for, on its device again."""


@contextmanager
def offloaded(module: nn.Module, *tensors: torch.Tensor) -> Iterator[None]:
    """Offload what autograd saves of a module's inputs to host memory, until backward needs it.

    Use this with ``checkpoint``, which saves a call's inputs only: ``with offloaded(block, x): x = checkpoint(block, x,
    use_reentrant=False)``. Under management the engine moves the tensors, within its budgets. Otherwise tensors on CUDA
    are copied to the CPU, and others stay where they are.
    """
    engine = _engine_of(module)
    way = _way_for(engine, tensors)
    if way is None or not torch.is_grad_enabled():
        yield
        return
    storages = {each.untyped_storage()._cdata for each in tensors if each.is_contiguous()}

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.is_contiguous() and tensor.untyped_storage()._cdata in storages:
            return _Put(way, way.offload(tensor))
        return tensor if engine is None else engine.saved.pack(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Put):
            return packed.way.restore(packed.what)
        return packed if engine is None else engine.saved.unpack(packed)

    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    finally:
        way.finish_offloads()


class _Put:
    """A tensor that is offloaded."""

    __slots__ = ("way", "what")

    def __init__(self, way: _Route, what: Any) -> None:
        self.way, self.what = way, what


def _engine_of(module: nn.Module) -> Engine | None:
    """Return the engine that manages the module; None if there is none, or its first tier is host memory."""
    for parameter in module.parameters():
        if isinstance(parameter, ManagedParameter):
            owner = parameter._owner
            assert isinstance(owner, Engine), "every owner is an Engine"
            return owner if owner.store.tiers[0].name == "device" else None
    return None


def _way_for(engine: Engine | None, tensors: tuple[torch.Tensor, ...]) -> _Route | None:
    if any(isinstance(each, FakeTensor) for each in tensors):
        return _TracedOffload()
    if engine is None:
        return _Copied() if any(each.is_cuda for each in tensors) else None
    if engine.store.file is not None:
        raise InvalidInput(
            "offloaded(...) with Budget.disk: the host's memory is full of what the disk has no place for; leave "
            "offloaded(...) out, or Budget.disk"
        )
    engine.activations.keep_clear_of(engine.passes.scheduler.plan)
    return engine.activations


class _Copied:
    """Offload without an engine, by blocking copies."""

    def offload(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        """Copy the tensor to the CPU and wait; return its device and the copy."""
        return tensor.device, tensor.detach().to("cpu")

    def finish_offloads(self) -> None:
        """Do nothing: every copy has ended."""

    def restore(self, away: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        """Copy the tensor back to its device."""
        return away[1].to(away[0])


class _TracedOffload:
    """Offload fake tensors, which have no bytes: drop them, and make new ones on restoring."""

    def offload(self, tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Return the tensor's shape, type and device: fake tensors have no contents."""
        return tensor.shape, tensor.dtype, tensor.device

    def finish_offloads(self) -> None:
        """Do nothing: nothing is copied."""

    def restore(self, away: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
        """Make a tensor like the offloaded one; the fake pass's mode is on, so it is fake."""
        return torch.empty(away[0], dtype=away[1], device=away[2])

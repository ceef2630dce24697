"""Define ``offloaded``, which keeps activations in host memory until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from ps_core._errors import DoesNotFit, PlanMismatch
from ps_core.engine._devices.hide_from_modes import hidden_from_modes
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.instruction_executor import Diverged
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._execution.planned_activations import bytes_of
from ps_core.engine._memory.activation_slots import OffloadedActivation
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._support.interrupts import defer_interrupts
from ps_core.engine._tracing.fake_recorder import FakeParameter, FakePassRecorder


class _Route(Protocol):
    """Protocol of a way to move tensors to host memory and back. (Any: each class has its own handles.)"""

    def offload(self, tensor: torch.Tensor) -> Any:
        """Start a copy of the tensor to host memory; return the handle for `restore`."""

    def finish_offloads(self) -> None:
        """Make the compute stream wait for the copies that read the tensors themselves; they may be freed then."""

    def restore(self, activation: Any) -> torch.Tensor:
        """Return the tensor that `offload` returned this handle for, on its device again."""


@contextmanager
def offloaded(module: nn.Module, *tensors: torch.Tensor) -> Iterator[None]:
    """Offload what autograd saves of a module's inputs to host memory, until backward needs it.

    Use this with ``checkpoint``, which saves a call's inputs only: ``with offloaded(block, x): x = checkpoint(block, x,
    use_reentrant=False)``. Under management the engine moves the tensors, within its budgets. Otherwise tensors on CUDA
    are copied to the CPU, and others stay where they are.
    """
    engine = _engine_of(module)
    way = _way_for(module, engine, tensors)
    if way is None or not torch.is_grad_enabled():
        yield
        return
    storages = {each.untyped_storage()._cdata for each in tensors if _is_movable(each)}

    def pack(tensor: torch.Tensor) -> Any:
        if _is_movable(tensor) and tensor.untyped_storage()._cdata in storages:
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


def _is_movable(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's values are its memory in a row, which `offload` copies; else the tensor stays."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


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


def _way_for(module: nn.Module, engine: Engine | None, tensors: tuple[torch.Tensor, ...]) -> _Route | None:
    if any(isinstance(each, FakeTensor) for each in tensors):
        recorders = (each._recorder for each in module.parameters() if isinstance(each, FakeParameter))
        return _TracedOffload(next(recorders, None))
    if engine is None:
        return _Copied() if any(each.is_cuda for each in tensors) else None
    passes = engine.passes
    engine.activations.keep_clear_of(passes.scheduler.plan, avoid_plan=passes.driver is not passes.demand)
    return _ByEngine(engine)


class _ByEngine:
    """Offload as an engine's plan has it, else on demand.

    A tensor stays where it is if the host has no room for it. One that was copied back is held until autograd drops it,
    so that nothing depends on how often it asks. Where backward keeps its graph that would be every block's: then the
    bytes stay on the host, too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._passes, self._room = engine, engine.passes, engine.activations
        self._launched = False
        """True if a copy reads a tensor itself."""

    def offload(self, tensor: torch.Tensor) -> OffloadedActivation:
        """Move a tensor, once the pass has a moment."""
        activation = OffloadedActivation(tensor.detach(), self._room)
        if self._passes.current is None:
            self._passes.before_moments.append(partial(self._move_late, weakref.ref(activation)))
        else:
            self._move(activation)
        return activation

    @defer_interrupts
    @hidden_from_modes
    def _move(self, activation: OffloadedActivation) -> None:
        passes, tensor = self._passes, activation.held
        assert tensor is not None, "it was not moved before"
        with passes.nonmodel.paused(), torch.no_grad():
            recording = passes.recording
            if recording is not None and torch._C._current_graph_task_id() == -1:  # else it is of a recomputed block
                activation.note_recorded(recording, recording.note_offloaded(activation.nbytes))
            driver = passes.driver
            if not (activation.name and isinstance(driver, PlanDriver) and driver.activations.keep(activation)):
                if self._offload(activation, tensor):
                    self._launched = True
                elif isinstance(driver, PlanDriver) and not driver.has_room_for(activation):
                    name = activation.name or "an activation"
                    passes.diverge(Diverged(f"{name} stays on the accelerator, where the plan has no room for it"))

    def _offload(self, activation: OffloadedActivation, tensor: torch.Tensor) -> bool:
        """Copy an activation to a slot of its own; return False where that has no room: the device may have it."""
        try:
            self._room.offload(activation, bytes_of(tensor))
        except DoesNotFit as why:
            self._engine.store.ledger.note_not_offloaded(activation.nbytes, why)
            return False
        return True

    def _move_late(self, activation: weakref.ref[OffloadedActivation]) -> None:
        found = activation()
        if found is not None:
            self._move(found)
            self.finish_offloads()

    @defer_interrupts
    @hidden_from_modes
    def finish_offloads(self) -> None:
        """Make the compute queue wait for the copies that read tensors of PyTorch's."""
        if self._launched:
            self._room.finish_offloads()
            self._launched = False

    @defer_interrupts
    @hidden_from_modes
    def restore(self, activation: OffloadedActivation) -> torch.Tensor:
        """Copy an activation back into new memory of the device."""
        if activation.held is not None:
            return activation.held
        recording = self._passes.recording
        if recording is not None and activation.origin is recording:
            recording.note_taken(activation.name)
        driver = self._passes.driver
        if activation.slot is None and isinstance(driver, PlanDriver):
            tensor = self._new(activation, partial(driver.activations.restore, activation))
            if tensor is not None:
                return self._returned(activation, tensor)
            self._passes.diverge(Diverged(f"the plan does not have {activation.name} here"))
        return self._on_demand(activation)

    def _on_demand(self, activation: OffloadedActivation) -> torch.Tensor:
        """Copy an activation back from its own slot; right after its plan was left it may be held instead."""
        if activation.held is not None:
            return activation.held
        slot = activation.slot
        if slot is None:
            self._engine.residency.transfers.check_disk()
            raise PlanMismatch(f"{activation.name} is in no slot")
        tensor = self._new(activation, partial(self._room.restore, slot))
        assert tensor is not None, "its own slot has it at all times"
        return self._returned(activation, tensor)

    def _new(self, activation: OffloadedActivation, fill: Callable[[torch.Tensor], bool]) -> torch.Tensor | None:
        """Make a tensor and fill it; None: it was not filled."""
        tensor = activation.empty(self._engine.store.device.torch_device)
        with self._passes.nonmodel.paused(), torch.no_grad():
            return tensor if fill(bytes_of(tensor)) else None

    def _returned(self, activation: OffloadedActivation, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that was copied back; note where its bytes are from now on."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            activation.hold(tensor)
        elif activation.slot is None:
            with self._passes.nonmodel.paused(), torch.no_grad():
                if self._offload(activation, tensor):
                    self._room.finish_offloads()
                else:
                    activation.hold(tensor)
        return tensor


class _Copied:
    """Offload without an engine, by blocking copies."""

    def offload(self, tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        """Copy the tensor to the CPU and wait; return its device and the copy."""
        return tensor.device, tensor.detach().to("cpu")

    def finish_offloads(self) -> None:
        """Do nothing: every copy has ended."""

    def restore(self, activation: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        """Copy the tensor back to its device."""
        return activation[1].to(activation[0])


class _TracedOffload:
    """Offload fake tensors, which have no bytes: drop them, and make new ones on restoring."""

    def __init__(self, recorder: FakePassRecorder | None) -> None:
        self._recorder = recorder

    def offload(self, tensor: torch.Tensor) -> _Traced:
        """Note the offload; return the tensor's shape, type and device: fake tensors have no contents."""
        name = "" if self._recorder is None else self._recorder.make_activation(tensor.nbytes)
        return _Traced(name, tensor.shape, tensor.dtype, tensor.device)

    def finish_offloads(self) -> None:
        """Do nothing: nothing is copied."""

    def restore(self, activation: _Traced) -> torch.Tensor:
        """Make a tensor like the offloaded one; the fake pass's mode is on, so it is fake."""
        if activation.held is None:
            if self._recorder is not None:
                self._recorder.take_activation(activation.name)
            activation.held = torch.empty(activation.shape, dtype=activation.dtype, device=activation.device)
        return activation.held


@dataclass(slots=True)
class _Traced:
    """A fake tensor that was offloaded."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    held: torch.Tensor | None = None

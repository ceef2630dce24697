"""Read and write ``parameter.grad``: stored gradients, between passes, on any tier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ps_core._errors import UnsupportedParameter
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._gradients.gradient_sums import flatten
from ps_core.engine._gradients.loss_scale import LossScale
from ps_core.engine._gradients.managed_grad import ManagedGrad
from ps_core.engine._parameters.assigned_gradient import AssignedGradient
from ps_core.engine._parameters.errors import compute_tier_too_small
from ps_core.engine._parameters.param_state import ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace

KINDS = {GradientPlace.IN_ACCUMULATOR: Kind.ACC}


class UserGradients:
    """Give access to one engine's gradients through its parameters."""

    def __init__(
        self,
        residency: Residency,
        gradients: GradientStore,
        *,
        loss_scale: LossScale | None,
        finish_pass: Callable[[], None],
        read: Callable[[ParamState, Kind], torch.Tensor],
        forget_decision: Callable[[], None],
        assign: Callable[[ParamState, torch.Tensor], None],
    ) -> None:
        """Give access to ``gradients``.

        ``read`` copies a parameter's part of a chunk. ``forget_decision`` is called before a gradient changes: a step
        that broke off is then decided anew. ``assign`` stores a gradient in place of the one that is there.
        """
        self._residency, self._gradients, self._loss_scale = residency, gradients, loss_scale
        self._finish_pass, self._read, self._forget_decision = finish_pass, read, forget_decision
        self._assign = assign
        self.watched: dict[ParamState, None] = {}
        """Parameters that were assigned tensors since the last step, or the one before."""

    def proxy(self, record: ParamState) -> torch.Tensor | None:
        """Return the tensor without memory that stands for a stored gradient, always the same one, or None."""
        if record.gradient is GradientPlace.NONE and record.staged_factor is None:
            return None
        if record.grad_proxy is None:
            record.grad_proxy = ManagedGrad(record, self, self._loss_scale)
        return record.grad_proxy

    def to_store(self, record: ParamState, value: Any) -> torch.Tensor:
        """Return a copy of a tensor that the user assigned, with the loss scale if it `replaces_scaled`."""
        if not record.trainable:
            raise UnsupportedParameter(
                f"the gradient given to {record.name!r}: it was frozen when chunked(...) was called, so it has "
                "nothing to be stepped with; call requires_grad_(True) before, or leave the gradient out"
            )
        tensor = isinstance(value, torch.Tensor)
        if not tensor or not value.is_floating_point() or value.is_meta or value.layout is not torch.strided:
            kind = f"{value.dtype}, {value.layout}, on {value.device}" if tensor else f"a {type(value).__name__}"
            raise UnsupportedParameter(
                f"the gradient given to {record.name!r} is {kind}: expected a dense floating-point tensor with values"
            )
        if value.shape != record.shape:
            raise UnsupportedParameter(
                f"the gradient given to {record.name!r} has shape {tuple(value.shape)}, expected {tuple(record.shape)}"
            )
        copy: torch.Tensor = value.detach().clone()
        return copy.float() * self._loss_scale.value if self._loss_scale and self.replaces_scaled(record) else copy

    def replaces_scaled(self, record: ParamState) -> bool:
        """Return True if the parameter has a gradient of a scaled loss, which the step divides by the loss scale."""
        return self._loss_scale is not None and record.gradient is not GradientPlace.NONE and not record.assigned

    def watch(self, record: ParamState, value: torch.Tensor) -> None:
        """Notice later changes of a tensor that was assigned; see [Note: assigned tensors]."""
        record.watch(AssignedGradient.of(value))
        last = next(reversed(self.watched), record)
        if last is not record and last.source is not None and last.source.is_final:
            last.watch(None)  # or its memory would be kept until the step
        self.watched.pop(record, None)
        self.watched[record] = None

    def take_changes(self, record: ParamState) -> None:
        """Store the assigned tensor again if it was changed in place."""
        source, proxy = record.source, record.grad_proxy
        if source is not None and source.has_changed(record.name):
            self._assign(record, source.tensor)
            record.watch(source.mark_stored())
            record.grad_proxy = proxy

    def take_all_changes(self) -> None:
        """Store every assigned tensor again that was changed in place, before a step."""
        for record in list(self.watched):
            self.take_changes(record)
        self.watched = {record: None for record in self.watched if record.source is not None}

    def assign_gradient(self, record: ParamState, value: Any) -> None:
        """Do as ``parameter.grad = value`` does, but keep the tensor that stands for the gradient."""
        proxy = record.grad_proxy
        record.parameter.grad = value
        record.grad_proxy = proxy

    def gradient_norm(self, record: ParamState) -> float:
        """Return the norm of the stored gradient times its factor."""
        self.take_changes(record)
        self._finish_pass()
        if record.norm_part is None:
            self._residency.transfers.prepare_use()
        self._residency.transfers.wait_for_others(Queue.CPU)
        squares = float(self._gradients.measure(record)[0])
        return math.sqrt(squares) * abs(record.factor)

    def scale_gradient(self, record: ParamState, factor: float) -> None:
        """Multiply the gradient's factor, which the step applies, by this one."""
        self._forget_decision()
        self._overtake(record)
        self._gradients.scale(record, factor)

    def _overtake(self, record: ParamState) -> None:
        """Note that the gradient changes, and the tensor that was assigned does not."""
        self.take_changes(record)
        if record.source is not None:
            record.source.mark_overtaken()

    def read_gradient(self, record: ParamState) -> torch.Tensor:
        """Copy the stored gradient, times its factor, to the compute tier in fp32; the move is counted."""
        self._gradients.check_summed(record)
        self.take_changes(record)
        self._finish_pass()
        store, own = self._residency.store, record.own_gradient
        self._check_room(record)
        if own is not None:
            self._residency.transfers.wait_for_other_queues(Queue.CPU)
            value = own.detach().to(torch.float32, copy=True)
        else:
            kind = KINDS.get(record.gradient, record.group.weight)
            value = self._read(record, kind)
            if tier := record.group.chunks[kind].home.tier:
                self._residency.transfers.watcher.moved(tier, 0, value.nbytes)
            value = value.to(store.device.torch_device, torch.float32)
        return value.mul_(record.factor) if record.factor != 1.0 else value

    def _check_room(self, record: ParamState) -> None:
        """Raise `DoesNotFit` if the compute tier has no room for a copy of the gradient."""
        store, size = self._residency.store, 4 * record.numel
        if not store.resident and store.free_bytes(0) + store.spare.bytes < size:
            needed = store.ledger.used_bytes[0] + size
            what = f"reading the gradient of {record.name}"
            raise compute_tier_too_small(store, [record.group], what, needed, size, proven=True, whole=True)

    def write_gradient(self, record: ParamState, value: torch.Tensor) -> None:
        """Replace the stored gradient by an fp32 tensor, unrounded; if 16 bits cannot hold it, store it as a sum."""
        self._overtake(record)
        self._gradients.replaced(record, value)
        self._forget_decision()
        rounded = value.to(record.dtype)
        if record.gradient is GradientPlace.IN_WEIGHT_SLOT and not same_values(rounded, value):
            self._gradients.restore_weights(record.group)
        record.factor, record.norm_part = 1.0, None
        if record.own_gradient is not None:
            exact = rounded if same_values(rounded, value) else value
            record.keep_gradient(exact, overwrite_pending=record.overwrite_pending)
        else:
            kind = KINDS.get(record.gradient, record.group.weight)
            self._residency.replace(record, kind, flatten(record, value))


def same_values(rounded: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if rounding changed no element; not-a-number equals itself."""
    again = rounded.to(value.dtype)
    return bool(((again == value) | (again.isnan() & value.isnan())).all())

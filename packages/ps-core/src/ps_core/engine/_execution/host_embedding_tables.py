"""Look rows up in tables that stay in host memory, and collect their gradients there.

[Note: tables on the host]
A group of such tables keeps its home slots on the host. No plan or moment contains it, and no parameter of it is ever
bound. The host thread looks rows up in the home slot, which no other thread writes. PyTorch's own operator makes one
gradient of the whole table from those of rows. So the bits are those of an ``nn.Embedding``. Where a table was looked
up more than once, autograd would add these gradients in their type first. The engine does so too, until the hook of the
parameter's gradient runs. The host's budget includes memory for that gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ps_core._errors import UnsupportedParameter
from ps_core._plan import Queue
from ps_core.engine._execution.pass_tracker import PassTracker
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._parameters.errors import graph_of_gradient
from ps_core.engine._parameters.param_state import HOST, ParamState
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._support.interrupts import defer_interrupts

_DEVICE = 0
"""The tier of the accelerator."""


class HostTables:
    """The host tables of one engine; see [Note: tables on the host]."""

    def __init__(
        self,
        passes: PassTracker,
        gradients: GradientStore,
        store: TierStore,
        watcher: TransferObserver,
        *,
        check_usable: Callable[[], None],
        accept: Callable[[ParamState, Tensor], None],
    ) -> None:
        """Make the tables; ``check_usable`` raises if training is not allowed, ``accept`` stores a table's gradient."""
        self._passes, self._gradients, self._store, self._watcher = passes, gradients, store, watcher
        self._check_usable, self._accept = check_usable, accept
        self.pending: dict[ParamState, tuple[int, Tensor]] = {}
        """Gradients that the parameter's hook has not asked for yet, and the number of their backward pass."""

    @defer_interrupts
    def rows(self, record: ParamState, ids: Tensor) -> Tensor:
        """Return the rows of these ids, on the ids' device."""
        self._check_usable()
        self._passes.attach()
        if record.contents is not SlotContents.WEIGHT:
            with self._passes.nonmodel.paused(), torch.no_grad():
                self._gradients.restore_weights(record.group)
        slot = record.group.weight_chunk.home
        self._store.device.declare_access(Queue.CPU, f"rows of {record.name}", (slot.memory,), ())
        found = functional.embedding(ids.to("cpu"), record.shaped(slot.memory.view(record.dtype))).to(ids.device)
        self._watcher.moved(_DEVICE, HOST, ids.nbytes)
        self._watcher.moved(HOST, _DEVICE, found.nbytes)
        return found

    @defer_interrupts
    def gain(self, record: ParamState, ids: Tensor, gradient: Tensor, padding: int) -> None:
        """Add the gradient of these rows; ``ids`` are on the host."""
        if not record.trainable:
            return
        if torch.is_grad_enabled() and gradient.requires_grad:
            raise graph_of_gradient(record.name)
        if record.parameter._backward_hooks:
            raise UnsupportedParameter(
                f"a hook (register_hook) waits for the gradient of {record.name!r}, a table that stays on the host, "
                "which autograd does not see: use nn.Embedding, or register_post_accumulate_grad_hook"
            )
        task = torch._C._current_graph_task_id()
        with self._passes.nonmodel.paused(), torch.no_grad():
            rows = gradient.to("cpu")
            whole = torch.ops.aten.embedding_dense_backward(rows, ids, record.shape[0], padding, False)
            before = self.pending.get(record)
            if before is not None and before[0] == task:
                whole = before[1].add_(whole)
        self.pending[record] = task, whole
        self._watcher.moved(_DEVICE, HOST, gradient.nbytes)

    @defer_interrupts
    def deliver(self, record: ParamState) -> None:
        """Store the table's gradient once this backward pass has made all of it."""
        pending = self.pending.pop(record, None)
        if pending is not None and pending[0] == torch._C._current_graph_task_id():
            with self._passes.nonmodel.paused():
                self._accept(record, pending[1])

    def forget(self) -> None:
        """Drop the gradients of a pass that broke off."""
        self.pending.clear()

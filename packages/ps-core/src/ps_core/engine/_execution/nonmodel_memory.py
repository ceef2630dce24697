"""Count the bytes of a pass that are not the model's, and tell how much of the compute tier each moment takes."""

from __future__ import annotations

import gc
from collections.abc import Container

import torch

from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._tracing.pass_recording import MomentRecord


class NonModelMemory:
    """Count the non-model bytes of one engine's passes: activations, and all else that is not in a chunk."""

    def __init__(self, store: TierStore, model_storages: Container[int], constant_bytes: int) -> None:
        """Count on the store's device.

        ``model_storages`` has the addresses of the storages that belong to the model, which are not counted.
        ``constant_bytes`` are always on the compute tier.
        """
        self._store, self._model_storages, self._constant_bytes = store, model_storages, constant_bytes
        self._bytes = store.device.nonmodel_bytes()
        self.paused, self.forget = self._bytes.paused, self._bytes.forget
        """Of the device's counter: a block in which nothing is counted; a tensor that is not counted any more."""
        self.counting = False
        """True while bytes may be counted: that cannot be stopped everywhere, see `stop`."""

    def start(self) -> None:
        """Count from now on."""
        self.counting = True
        self._bytes.start()

    def start_pass(self) -> None:
        """Count from now on, with a peak of its own for the first moment."""
        self.start()
        self._bytes.take_peak()

    def stop(self) -> None:
        """Stop counting; `TensorBytesTracker.stop` says when this must be repeated later."""
        if self.counting:
            off = self._bytes.stop()
            self.counting = not off or torch._C._current_graph_task_id() != -1

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor that no operator was seen to make, unless its memory is the model's."""
        if tensor.untyped_storage()._cdata not in self._model_storages:
            self._bytes.count(tensor)

    def measure(self, moment: MomentRecord, *, planned: bool) -> int:
        """Record a moment's peak of non-model bytes; return the most bytes that it took of the compute tier.

        ``planned``: by a plan, to which the whole arena belongs.
        """
        peak = self._bytes.take_peak()
        moment.nonmodel_bytes = max(moment.nonmodel_bytes, peak)
        store, ledger = self._store, self._store.ledger
        ledger.end_moment(peak + self._constant_bytes)
        needed = (store.held_bytes if planned else ledger.used_bytes[0]) + ledger.nonmodel_bytes
        ledger.set_nonmodel(self._bytes.current_bytes + self._constant_bytes)
        return needed

    def measured(self, moment: MomentRecord) -> int:
        """Return the most non-model bytes that were measured of a moment, with those that are always there."""
        return moment.nonmodel_bytes + self._constant_bytes

    def free_broken_pass(self) -> int:
        """Free the activations that an exception left alive; return the bytes that objects of the user's hold.

        A backward pass that raised leaves nodes in autograd's queue of this thread, and with them their graph. The
        thread's next backward pass frees them, so run one. An exception's frames may refer to one another until they
        are collected.
        """
        if not self._bytes.current_bytes:
            return 0
        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            torch.autograd.grad(leaf.clone(), leaf)
        gc.collect()
        return self._bytes.current_bytes

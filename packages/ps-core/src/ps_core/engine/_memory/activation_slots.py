"""Keep offloaded activations in slots of the host tier.

[Note: offloaded activations]
A copy to the host runs on the D2H queue, after the computation that made the tensor. The tensor must live until
`ActivationSlots.finish_offloads`, where the compute queue waits for the copy. A copy back waits for what was computed
so far, because its new memory may have been in use there. What is computed next waits for that copy. So plans may use
both queues as well. Slots are used again: a copy into one waits for the copy out of it. They count for the host's
budget from their first use on. No plan knows of them. They use what the plan in force leaves free at all times, and
later plans get that much less.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from ps_core._errors import DoesNotFit
from ps_core._plan import Plan, Queue, Reserve
from ps_core._units import align_up
from ps_core.engine._devices.device import NonModelBytes
from ps_core.engine._memory.budget_suggestions import suggest_budget
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._support.interrupts import defer_interrupts

_DEVICE, _HOST = 0, 1


class OffloadedActivation:
    """A tensor whose bytes are in a slot of the host tier for as long as this object lives."""

    __slots__ = ("_returned", "dtype", "shape", "slot")

    def __init__(self, tensor: torch.Tensor, slot: Slot, returned: deque[Slot]) -> None:
        self.shape, self.dtype, self.slot, self._returned = tensor.shape, tensor.dtype, slot, returned

    def __del__(self) -> None:
        self._returned.append(self.slot)  # at any instant, so nothing else is done


class ActivationSlots:
    """The slots of one engine; see [Note: offloaded activations]."""

    def __init__(self, store: TierStore, watcher: TransferObserver, nonmodel: NonModelBytes) -> None:
        self._store, self._watcher, self._nonmodel = store, watcher, nonmodel
        self._returned: deque[Slot] = deque()
        """Slots whose activations are gone; destructors append at any time, also while this code runs."""
        self._free: list[Slot] = []
        self.bytes = 0
        """Bytes of all slots, whether an activation is in them or not."""
        self._plan: Plan | None = None
        self._planned_bytes = 0

    def keep_clear_of(self, plan: Plan | None) -> None:
        """Use no host memory from now on that this plan uses at any time."""
        if plan is not None and plan is not self._plan:
            ends = [held.offset + held.bytes for held in plan.home if held.tier == _HOST]
            for segment in plan.segments:
                found = (instr.op for instr in segment.instrs if isinstance(instr.op, Reserve))
                ends += [op.offset + op.bytes for op in found if op.tier == _HOST]
            self._plan, self._planned_bytes = plan, max(ends, default=0) + self._store.ledger.fixed_host_bytes

    @defer_interrupts
    def offload(self, tensor: torch.Tensor) -> OffloadedActivation:
        """Launch a copy of a contiguous tensor to the host; the tensor must live until `finish_offloads`."""
        device, size = self._store.device, tensor.nbytes
        with self._nonmodel.paused(), torch.no_grad():
            slot = self._slot(align_up(size))
            for queue in (Queue.COMPUTE, Queue.H2D):
                device.wait(Queue.D2H, device.record(queue))
            self._copy(Queue.D2H, slot.memory[:size], _bytes_of(tensor))
        self._watcher.moved(_DEVICE, _HOST, size)
        return OffloadedActivation(tensor, slot, self._returned)

    @defer_interrupts
    def finish_offloads(self) -> None:
        """Make the compute queue wait for all copies to the host; the tensors' memory may be used again then."""
        self._make_compute_wait(Queue.D2H, "after activations left")

    @defer_interrupts
    def restore(self, away: OffloadedActivation) -> torch.Tensor:
        """Copy an activation back into new memory of the device."""
        device = self._store.device
        tensor = torch.empty(away.shape, dtype=away.dtype, device=device.torch_device)
        with self._nonmodel.paused(), torch.no_grad():
            for queue in (Queue.COMPUTE, Queue.D2H):
                device.wait(Queue.H2D, device.record(queue))
            self._copy(Queue.H2D, _bytes_of(tensor), away.slot.memory[: tensor.nbytes])
            self._make_compute_wait(Queue.H2D, "with activations back")
        self._watcher.moved(_HOST, _DEVICE, tensor.nbytes)
        return tensor

    def _copy(self, queue: Queue, target: torch.Tensor, source: torch.Tensor) -> None:
        copy, recorder = partial(self._store.device.copy, queue, target, source), self._watcher.recorder
        if recorder is None:
            copy()
        else:
            recorder.record(queue, f"{'evict' if queue is Queue.D2H else 'fetch'} an activation", copy, source.nbytes)

    def _make_compute_wait(self, queue: Queue, what: str) -> None:
        device = self._store.device
        device.wait(Queue.COMPUTE, device.record(queue))
        device.declare_access(Queue.COMPUTE, what, (), ())

    def _slot(self, size: int) -> Slot:
        """Return the smallest free slot that is large enough; else release all free slots, and reserve a new one."""
        while self._returned:
            self._free.append(self._returned.popleft())
        fitting = [slot for slot in self._free if slot.bytes >= size]
        if fitting:
            chosen = min(fitting, key=lambda slot: slot.bytes)
            self._free.remove(chosen)
            return chosen
        while self._free:
            slot = self._free.pop()
            self.bytes -= slot.bytes
            self._store.release(slot, Queue.COMPUTE)
        others = max(self._planned_bytes, self._store.ledger.used_bytes[_HOST] - self.bytes)
        if others + self.bytes + size > self._store.tiers[_HOST].capacity_bytes:
            raise self._too_large(size, others + self.bytes + size)
        self.bytes += size
        return self._store.reserve(_HOST, size)

    def _too_large(self, size: int, needed: int) -> DoesNotFit:
        tier = self._store.tiers[_HOST]
        return DoesNotFit(
            tier=tier.name,
            moment="moving activations there",
            needed_bytes=needed,
            available_bytes=tier.capacity_bytes,
            proven=True,
            remedies=(
                f"{suggest_budget(self._store.limits, _HOST, needed)}, and {size:,} bytes for every further block",
                "fewer blocks whose activations are offloaded: less goes there",
                f"a smaller batch or sequence: {size:,} bytes go there at a time",
            ),
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)

"""Keep offloaded activations in slots below the compute tier, where no plan moves them.

[Note: activations without a plan]
The plan in force moves most activations (`_execution.planned_activations`). It does not move those of passes on demand,
of several ranks, and of passes that left their plan. A few can be moved by no plan.

A copy to the host runs on the D2H queue, after the computation that made the tensor. The tensor must live until
`ActivationSlots.finish_offloads`, where the compute queue waits for the copy. A copy back waits for what was computed
so far, because its new memory may have been in use there. What is computed next waits for that copy. Slots are used
again: a copy into one waits for the copy out of it. They count for the host's budget from their first use on. They use
what the plan in force leaves free at all times, and later plans get that much less. A pass on demand may also use what
the plan would use. Where the host has no room, bytes go on to the disk at once. Where the disk has none either, the
tensor stays on the device.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from ps_core._errors import DoesNotFit
from ps_core._plan import Plan, Queue, Reserve
from ps_core._units import align_up
from ps_core.engine._memory.budget_suggestions import suggest_budget
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfers import Transfers

_DEVICE, _HOST = 0, 1


class OffloadedActivation:
    """A tensor that backward will want, and where its bytes are: in ``held``, in ``slot``, or in slots of a plan."""

    __slots__ = ("__weakref__", "dtype", "held", "name", "nbytes", "origin", "room", "shape", "slot")

    def __init__(self, tensor: torch.Tensor, room: ActivationSlots) -> None:
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.held: torch.Tensor | None = tensor
        """The tensor itself, before it is moved and after it was copied back; None: it is elsewhere."""
        self.slot: Slot | None = None
        """A slot of its own; None: it has none."""
        self.name = ""
        """Its name in the recording of the pass that made it; empty: it is not recorded."""
        self.origin: object = None
        """That recording."""
        self.room = room

    def note_recorded(self, recording: object, name: str) -> None:
        """Note the recording of the pass that is on, and the activation's name there."""
        self.origin, self.name = recording, name

    def move_to(self, slot: Slot | None) -> None:
        """Note that the bytes are in a slot of its own; None: in slots of a plan."""
        self.slot, self.held = slot, None

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the tensor itself until autograd drops the activation; give a slot of its own back."""
        self.held = tensor
        self.return_slot()

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a new tensor for the bytes."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def return_slot(self) -> None:
        """Give its own slot back, if it has one."""
        if self.slot is not None:
            self.room.returned.append(self.slot)
            self.slot = None

    def __del__(self) -> None:
        self.return_slot()  # at any instant, so nothing else is done


class ActivationSlots:
    """The slots of one engine; see [Note: activations without a plan]."""

    def __init__(self, transfers: Transfers, store: TierStore) -> None:
        self._store, self._transfers, self._watcher = store, transfers, transfers.watcher
        self.returned: deque[Slot] = deque()
        """Slots whose activations are gone; destructors append at any time, also while this code runs."""
        self._free: list[Slot] = []
        self.bytes = 0
        """Bytes of all slots on the host, whether an activation is in them or not."""
        self._plan: Plan | None = None
        self._avoids_plan = True
        """True: no slot may use memory that the plan uses at any time."""
        self._planned_bytes = [0] * len(store.tiers)
        """By tier: the bytes that the plan in force may use at some time."""
        store.free_host_slots_by(self.release_free)

    def keep_clear_of(self, plan: Plan | None, *, avoid_plan: bool) -> None:
        """Use memory of this plan from now on only where there is no other; if ``avoid_plan``, not even then."""
        self._avoids_plan = avoid_plan
        if plan is not None and plan is not self._plan:
            ends = [(held.tier, held.offset + held.bytes) for held in plan.home]
            for segment in plan.segments:
                found = (instr.op for instr in segment.instrs if isinstance(instr.op, Reserve))
                ends += [(op.tier, op.offset + op.bytes) for op in found]
            tiers = range(len(self._store.tiers))
            self._plan = plan
            self._planned_bytes = [max((end for at, end in ends if at == tier), default=0) for tier in tiers]

    def offload(self, activation: OffloadedActivation, source: torch.Tensor) -> None:
        """Launch a copy of the activation's bytes to a slot; ``source`` must live until `finish_offloads`."""
        device, size = self._store.device, activation.nbytes
        slot = self._slot(align_up(size))
        if slot.place is None:
            for queue in (Queue.COMPUTE, Queue.H2D):
                device.wait(Queue.D2H, device.record(queue))
            self._copy(Queue.D2H, slot.memory[:size], source)
            self._watcher.moved(_DEVICE, _HOST, size)
        else:
            self._transfers.copy_via_host(Slot(_DEVICE, -1, size, source), slot, size)
        activation.move_to(slot)

    def finish_offloads(self) -> None:
        """Make the compute queue wait for all copies to the host; the tensors' memory may be used again then."""
        self._make_compute_wait(Queue.D2H, "after activations left")

    def restore(self, slot: Slot, target: torch.Tensor) -> bool:
        """Copy an activation's bytes from its slot to new memory of the device; return True."""
        device, size = self._store.device, target.nbytes
        if slot.place is not None:
            self._transfers.copy_via_host(slot, Slot(_DEVICE, -1, size, target), size)
            return True
        for queue in (Queue.COMPUTE, Queue.D2H):
            device.wait(Queue.H2D, device.record(queue))
        self._copy(Queue.H2D, target, slot.memory[:size])
        self._make_compute_wait(Queue.H2D, "with activations back")
        self._watcher.moved(_HOST, _DEVICE, size)
        return True

    def adopt(self, activation: OffloadedActivation, slot: Slot) -> None:
        """Make a slot that a plan reserved below the compute tier an activation's own."""
        activation.move_to(slot)
        self.bytes += slot.bytes * (slot.tier == _HOST)

    def release_free(self) -> None:
        """Release all slots that no activation is in."""
        self._collect()
        while self._free:
            slot = self._free.pop()
            self.bytes -= slot.bytes
            self._store.release(slot, Queue.COMPUTE)

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

    def _collect(self) -> None:
        """Take in the slots whose activations are gone; those on the disk are released."""
        while self.returned:
            slot = self.returned.popleft()
            if slot.tier == _HOST:
                self._free.append(slot)
            else:
                self._store.release(slot, Queue.COMPUTE)

    def _slot(self, size: int) -> Slot:
        """Return a free slot of that size; without one release all free slots, and reserve a new one.

        A larger slot would take more of the budget than the activation needs.
        """
        self._collect()
        for place, slot in enumerate(self._free):
            if slot.bytes == size:
                return self._free.pop(place)
        self.release_free()
        tiers, last = self._store.tiers, len(self._store.tiers) - 1
        for with_plan in (True,) if self._avoids_plan else (True, False):
            for tier in (_HOST, last) if self._store.is_disk(last) else (_HOST,):
                if self._needed(tier, size, with_plan=with_plan) <= tiers[tier].capacity_bytes:
                    self.bytes += size * (tier == _HOST)
                    return self._store.reserve(tier, size)
        raise self._too_large(size, self._needed(_HOST, size, with_plan=self._avoids_plan))

    def _needed(self, tier: int, size: int, *, with_plan: bool) -> int:
        """Return the bytes that a tier needs with a new slot; ``with_plan``: and with all that the plan ever uses."""
        ledger, own = self._store.ledger, self.bytes * (tier == _HOST)
        planned = self._planned_bytes[tier] + ledger.fixed_host_bytes * (tier == _HOST) if with_plan else 0
        return max(planned, ledger.used_bytes[tier] - own) + own + size

    def _too_large(self, size: int, needed: int) -> DoesNotFit:
        tier = self._store.tiers[_HOST]
        return DoesNotFit(
            tier=tier.name,
            moment="moving activations there",
            needed_bytes=needed,
            available_bytes=tier.capacity_bytes,
            proven=False,
            remedies=(
                f"{suggest_budget(self._store.limits, _HOST, needed)}, and {size:,} bytes for every further block",
                "fewer blocks whose activations are offloaded: less goes there",
                f"a smaller batch or sequence: {size:,} bytes go there at a time",
            ),
            depends_on_batch=True,
        )

"""Find what was written to a parameter's memory without PyTorch's knowledge: by NumPy, DLPack, a storage, an address.

[Note: writes that PyTorch does not count]
PyTorch counts changes in place through tensors, and the engine refuses those. It counts no others. So memory of a
parameter is *exposed* once code outside of the model was given it: ``detach()``, ``.data``, any view that outlives its
call. Before the engine reads another copy of the parameter, or writes over this one, it compares the two.

If they differ, what the memory is decides. In fp32 the weight itself is trained. There, and where nothing trains it,
the written memory becomes the newest copy, as in plain PyTorch. In 16 bits the memory is a copy of the fp32 master, and
with several processes it was gathered. There the write is refused, as one that PyTorch counts is. Where there is
nothing to compare with, the memory is the only copy, and a write needs no help.

While there is an alias, memory is compared at each step and each reading of states. It is compared once more after its
last alias is gone. What was gathered from several processes is compared with a copy, so that all of them find the same.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._memory.chunk import Slot, SlotView
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfers import Transfers
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import SlotContents

_PIECE_NUMEL = 2**20
"""Elements compared at a time: where one side has to be rounded or fetched, the copy stays small."""
_BITS = {2: torch.int16, 4: torch.int32}


class SlotMoves(Protocol):
    """Protocol of the residency of the parameters' slots, as these checks use it."""

    tampered: list[ParamState]
    """Parameters whose changes in place were lost and are not reported yet."""

    @property
    def store(self) -> TierStore:
        """Return the tiers."""

    @property
    def transfers(self) -> Transfers:
        """Return the object that copies between tiers."""

    def undo_changes(self, record: ParamState, slot: Slot) -> None:
        """Discard what was written to a slot."""

    def sides(self, record: ParamState, slot: Slot) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a parameter's elements in a slot, and those they were copied from."""


class ExposedParameters:
    """Track the exposed memory of one engine; in ordinary training there is none."""

    def __init__(self, residency: SlotMoves) -> None:
        self._residency = residency
        self.bounds: dict[int, tuple[ParamState, SlotView, torch.Tensor | None]] = {}
        """Exposed views by storage address; empty in ordinary training, where nothing needs a check."""

    def add(self, record: ParamState) -> None:
        """Note that code outside of the model has, or had, the memory where a parameter is now."""
        bound = record.bound
        assert bound is not None, "only memory that a parameter has can be exposed"
        if bound.storage._cdata not in self.bounds:
            before = bound.view.detach().to("cpu", copy=True) if record.group.gathered else None
            self.bounds[bound.storage._cdata] = (record, bound, before)

    def forget(self, group: ParamGroup) -> None:
        """Stop tracking the memory of a group's copy, which other groups may be given from now on."""
        if self.bounds:
            self.bounds = {key: row for key, row in self.bounds.items() if row[0].group is not group}

    def clear(self) -> None:
        """Forget all exposed memory: its contents do not matter any more."""
        self.bounds.clear()

    @torch.no_grad()
    def check(self, record: ParamState | None = None, *, ended: bool = False) -> None:
        """Keep or refuse what was written to a parameter, or to all; ``ended``: only where no alias is left."""
        for key, (owner, bound, before) in list(self.bounds.items()):
            alive = bound.aliased if bound is owner.bound else bound.outlived
            if record not in (None, owner) or (ended and alive):
                continue
            if not alive or not bound.slot.memory.numel():
                self.bounds.pop(key, None)
            if bound.slot.memory.numel():
                self._check(owner, bound, before, alive=alive)

    def _check(self, record: ParamState, bound: SlotView, before: torch.Tensor | None, *, alive: bool) -> None:
        residency, chunk, slot = self._residency, record.group.weight_chunk, bound.slot
        group = record.group
        if slot.version != chunk.version:
            if alive and chunk.copies.get(slot.tier) is slot and not group.gathered:
                residency.transfers.copy_to(chunk, slot)  # aliases see a step's result, as in plain PyTorch
        elif record.contents is SlotContents.WEIGHT and (
            self._differs(record, slot) if before is None else not _same(bound.view, before)
        ):
            if group.gathered or (group.trainable and group.weight is Kind.P16):
                residency.tampered.append(record)
                residency.undo_changes(record, slot)
            else:
                flat = slot.flat(group.dtype, group.chunk_numel)
                for other in record.others:
                    flat[other.span].copy_(flat[record.span])
                chunk.mark_written(slot)

    def _differs(self, record: ParamState, slot: Slot) -> bool:
        """Return True if a parameter's elements in a slot differ from those that they were copied from."""
        mine, source = self._residency.sides(record, slot)
        if source is None:
            return False
        self._residency.transfers.wait_for_other_queues(Queue.CPU)
        self._residency.store.device.declare_access(Queue.CPU, f"compare {record.name}", (mine, source), ())
        return not _same(mine, source)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same bits, once both have the first one's type; compare on its device."""
    pieces = zip(*(torch.split(each.reshape(-1), _PIECE_NUMEL) for each in (one, other)), strict=True)
    return all(_same_bits(left, right.to(left.device).to(left.dtype)) for left, right in pieces)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = _BITS[one.dtype.itemsize]
    if torch.equal(one.view(bits), other.view(bits)):
        return True
    lost = one.isnan()  # not-a-number has many bit patterns, and kernels round to others than PyTorch
    rest = (each.masked_fill(lost, 0).view(bits) for each in (one, other))
    return torch.equal(lost, other.isnan()) and torch.equal(*rest)

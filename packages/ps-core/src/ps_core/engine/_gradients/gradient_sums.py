"""Add gradients to fp32 sums, which are in home slots, usually on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch

import ps_kernels
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace

Tensors: TypeAlias = Sequence[torch.Tensor]
Launch: TypeAlias = Callable[[str, Tensors, Tensors, Callable[[], object]], None]
"""A function that launches work: its name, the tensors it reads, those it writes, and the function to run."""
Measure: TypeAlias = Callable[[ParamState, torch.Tensor], torch.Tensor]
"""A function that measures a parameter's gradient, given as a vector."""

_PIECE_NUMEL = 2**14
"""Elements of a gradient that are copied down at a time, if there is no room for all of it."""


def flatten(record: ParamState, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a vector in the memory order of its parameter; a copy if the strides differ."""
    if gradient.stride() == record.stride:
        return gradient.as_strided((record.numel,), (1,))
    flat = torch.empty(record.numel, dtype=gradient.dtype, device=gradient.device)
    flat.as_strided(record.shape, record.stride).copy_(gradient)
    return flat


def _room_for_sum(record: ParamState) -> torch.Tensor:
    """Allocate host memory for the fp32 sum of one parameter's gradients; its bytes are not set."""
    return torch.empty(record.numel, dtype=torch.float32, device="cpu")


class GradientSums:
    """Manage the fp32 sums of one engine's gradients."""

    def __init__(self, residency: Residency, measure: Measure, tier_of_sums: Callable[[ParamGroup], int]) -> None:
        """Make the sums; ``tier_of_sums`` returns the tier for sums that no plan contains."""
        self._residency, self._store, self._measure = residency, residency.store, measure
        self._tier_of_sums = tier_of_sums
        self.unplanned = False
        """True once there was an accumulator that no plan contains."""

    def accumulator(self, group: ParamGroup) -> Chunk:
        """Return the chunk of a group's fp32 sums; make it if no plan contains it."""
        chunk = group.chunks.get(Kind.ACC)
        if chunk is None:
            slot = self._store.reserve(self._tier_of_sums(group), group.shard_numel * 4)
            chunk = group.chunks[Kind.ACC] = Chunk(group.extent(Kind.ACC), slot.bytes, slot)
            chunk.mark_written(slot)
            self.unplanned = True
        return chunk

    def reach_above(self, end: int) -> bool:
        """Return True if a sum that no plan contains lies on the compute tier, beyond an address."""
        chunks = [group.chunks.get(Kind.ACC) for group in self._residency.groups]
        homes = (chunk.home for chunk in chunks if chunk is not None and not chunk.planned)
        return any(home.tier == 0 and home.offset + home.bytes > end for home in homes)

    def free_unused(self) -> None:
        """Release the accumulators that no plan contains and that hold no gradient."""
        for group in self._residency.groups:
            chunk = group.chunks.get(Kind.ACC)
            if chunk is None or chunk.planned:
                continue
            if not any(record.gradient is GradientPlace.IN_ACCUMULATOR for record in group.tensors):
                self._residency.transfers.release_slot(chunk.home)
                del group.chunks[Kind.ACC]

    def add(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Add a gradient, wherever its tensor is, to the parameter's sum; the first one begins the sum."""
        chunk = self.accumulator(record.group)
        flat = flatten(record, gradient)
        tier = self._store.work_tier(chunk.home.tier)
        if not tier or record.group.on_host:
            self.add_home(record, flat, chunk)
        elif self._store.free_bytes(tier) < flat.nbytes:
            self._add_in_pieces(record, flat, chunk, tier)
        else:
            stage = self._store.reserve(tier, max(1, flat.nbytes))
            self.add_home(record, self._put_down(flat, stage.memory, tier), chunk)
            self._residency.transfers.release_slot(stage)

    def _put_down(self, flat: torch.Tensor, memory: torch.Tensor, tier: int) -> torch.Tensor:
        """Copy a vector from the compute tier into memory of another, and return it there."""
        staged = memory[: flat.nbytes].view(flat.dtype)
        self._residency.transfers.wait_for_other_queues(Queue.D2H)
        self._store.device.copy(Queue.D2H, staged, flat)
        self._residency.transfers.watcher.moved(0, tier, flat.nbytes)
        return staged

    def _add_in_pieces(self, record: ParamState, flat: torch.Tensor, chunk: Chunk, tier: int) -> None:
        """Add to sums whose tier is full, through a small buffer outside the budget, like the disk's buffers."""
        fresh, on_disk = record.gradient is not GradientPlace.IN_ACCUMULATOR, chunk.home.place is not None
        total = _room_for_sum(record) if on_disk and fresh else self._residency.vector(record, Kind.ACC)
        buffer = self._store.device.host(_PIECE_NUMEL * flat.itemsize)
        for start in range(0, flat.numel(), _PIECE_NUMEL):
            part = slice(start, start + _PIECE_NUMEL)
            self._sum_into(total[part], self._put_down(flat[part], buffer, tier), record, fresh=fresh)
        if on_disk:
            self._residency.replace(record, Kind.ACC, total)
        else:
            chunk.mark_written(chunk.home)
        record.mark_summed()
        record.norm_part = self._measure(record, total) if on_disk else None

    def add_home(self, record: ParamState, flat: torch.Tensor, chunk: Chunk) -> None:
        """Add a vector to the parameter's part of the sums, on the tier that works on the home slot."""
        if chunk.home.place is None:
            queue = Queue.CPU if chunk.home.tier else Queue.COMPUTE
            self.add_run([record], flat, chunk.home, partial(self._residency.transfers.do_now, queue))
            return
        fresh = record.gradient is not GradientPlace.IN_ACCUMULATOR
        total = _room_for_sum(record) if fresh else self._residency.vector(record, Kind.ACC)
        self._sum_into(total, flat, record, fresh=fresh)
        self._residency.replace(record, Kind.ACC, total)
        record.mark_summed()
        record.norm_part = self._measure(record, total)

    def _sum_into(self, sums: torch.Tensor, flat: torch.Tensor, record: ParamState, *, fresh: bool) -> None:
        """Copy a vector into the sums (``fresh``), or add it to them, on the CPU."""
        self._residency.transfers.wait_for_other_queues(Queue.CPU)
        reads = (flat,) if fresh else (flat, sums)
        self._store.device.declare_access(Queue.CPU, f"sum of the gradient of {record.name}", reads, (sums,))
        if fresh:
            sums.copy_(flat)
        else:
            ps_kernels.accumulate(sums, flat)

    def add_run(self, records: list[ParamState], flat: torch.Tensor, slot: Slot, launch: Launch) -> None:
        """Add the gradients of adjacent parameters to their sums; either all have sums already, or none has."""
        first, group = records[0], records[0].group
        start = first.piece.start
        target = slot.flat(torch.float32, group.shard_numel)[start : start + flat.numel()]
        begun = first.gradient is GradientPlace.IN_ACCUMULATOR
        add = partial(ps_kernels.accumulate, target, flat) if begun else partial(target.copy_, flat)
        launch(f"sum of the gradient of {first.name}", (flat, target) if begun else (flat,), (target,), add)
        for record in records:
            record.mark_summed()
            record.norm_part = None
        group.chunks[Kind.ACC].mark_written(slot)

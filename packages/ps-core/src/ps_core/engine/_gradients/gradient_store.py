"""Store gradients: in the weight slots, in fp32 sums, or for a while in the tensors that autograd made.

[Note: over the weight]
In 16-bit training without accumulation a gradient is written over its weight. So it costs no memory. That is right only
once nothing reads the weight before the step: no saved tensor, no alias of its memory. Until then the gradient stays in
autograd's tensor. A forward pass may need the weight before the step. Then the gradient moves into an fp32 sum, and the
weight is rebuilt from its master, which is unchanged.

[Note: kept memory]
What is measured in backward is read at the step. Small tensors for it would lie meanwhile in the gaps that freed
activations leave. The next pass would find no gap for its largest activations. The allocator would take new pages from
the system for each of them, and return them. So the same parameters are measured into the same memory at each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

import torch

import ps_kernels
from ps_core._errors import UnsupportedParameter
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core.engine._gradients.gradient_sums import GradientSums, Launch, flatten
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents

SMALL_NUMEL = 2**14
"""Smaller gradients take less time than a call: those of one group are measured, and stepped, together."""

CONCATENATED_NUMEL = 2**16
"""The most elements of small gradients that are concatenated: no budget counts the copy."""

_USES_OF_ONE = 2
"""The use count of a storage that one tensor has, and Python's object of it."""

_PLACE = attrgetter("gradient")
_INDEX = attrgetter("index")
_Key: TypeAlias = tuple[torch.device, tuple[int, ...]]
"""A device, and the indices of the parameters."""
_Rows: TypeAlias = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
_MOST_KEPT = 2**14
"""The most rows that are kept: where other parameters have gradients at each step, there are ever more sets of them."""


def sparse_gradient_error(record: ParamState, gradient: torch.Tensor) -> UnsupportedParameter:
    """Return the error for a gradient that is not dense."""
    return UnsupportedParameter(
        f"the gradient of {record.name!r} is {gradient.layout}: expected a dense one; use sparse=False"
    )


def concatenate(records: Sequence[ParamState]) -> torch.Tensor:
    """Return gradients with tensors of their own as one vector; a copy if there are several."""
    flat = [flatten(record, record.own_gradient) for record in records if record.own_gradient is not None]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def is_finite(flat: torch.Tensor) -> bool:
    """Return True if every element of a vector is finite."""
    part = torch.zeros(2, dtype=torch.float32, device=flat.device)
    if flat.numel():
        ps_kernels.sumsq_finite(flat, part)
    return not part[1]


class NormMeasurement:
    """Measures the gradients of one engine; see [Note: kept memory]."""

    def __init__(self, *, keeps: bool) -> None:
        """``keeps``: keep the memory; else each result has memory of its own."""
        self._most_kept = _MOST_KEPT if keeps else 0
        self._kept: dict[_Key, _Rows] = {}
        self._kept_rows = 0

    def measure(self, record: ParamState, flat: torch.Tensor) -> torch.Tensor:
        """Return the sum of squares and the non-finite flag of a gradient, on its device; drop an earlier result."""
        key = flat.device, (record.index,)
        record.norm_part = None  # an older result lies there; it must not be taken for this one if measuring fails
        part = (self._kept.get(key) or self._keep(key))[1][0].zero_()
        if flat.numel():
            ps_kernels.sumsq_finite(flat, part)
        return part

    def measure_spans(
        self, records: list[ParamState], flat: torch.Tensor, spans: list[tuple[int, int]], launch: Launch | None = None
    ) -> Iterator[tuple[ParamState, torch.Tensor]]:
        """Measure gradients of one group in one call: each one's span of ``flat``; ``launch`` None: at once.

        Return each with its sum of squares and its non-finite flag. None of them may have a result already.
        """
        if launch is None:
            key = flat.device, tuple(map(_INDEX, records))
            parts, rows = self._kept.get(key) or self._keep(key)
            ps_kernels.sumsq_finite(flat, parts.zero_(), spans=spans)
        else:  # into new memory: a measurement that was launched earlier may still write to what is kept
            parts, rows = _new_rows(len(spans), flat.device)
            measure = partial(ps_kernels.sumsq_finite, flat, parts, spans=spans)
            launch(f"norms of {records[0].group.name}", (flat,), (parts,), measure)
        return zip(records, rows, strict=True)

    def _keep(self, key: _Key) -> _Rows:
        """Allocate memory for these parameters, and keep it unless there is too much."""
        device, indices = key
        with torch.inference_mode(False):  # or later steps could not write to it outside of that mode
            rows = _new_rows(len(indices), device)
        if self._kept_rows + len(indices) <= self._most_kept:
            self._kept[key] = rows
            self._kept_rows += len(indices)
        return rows


def _new_rows(count: int, device: torch.device) -> _Rows:
    """Return a row of two numbers for each gradient, and all of them as one tensor."""
    parts = torch.zeros(count, 2, dtype=torch.float32, device=device)
    return parts, parts.unbind()


class GradientStore:
    """Store and read the gradients of one engine, wherever they are."""

    def __init__(self, residency: Residency, *, overwrites: bool, keeps_norms: bool = True) -> None:
        self._residency = residency
        self._store = residency.store
        self._overwrites = overwrites
        self._one_tier = residency.store.resident
        self.left_over: dict[tuple[int, ParamState], Slot] = {}
        """Gradients that no sum over ranks takes before the step, in host memory; by the pass since the last step."""
        self.forgets = False
        """See `forgetting`."""
        self.expected_sums = 0
        """Number of calls so far that expected a sum over ranks; ranks may count differently."""
        self.pending: dict[ParamState, None] = {}
        """Parameters whose gradients are to overwrite their weights later; some may have moved since."""
        self._norms = NormMeasurement(keeps=keeps_norms)
        self.sums = GradientSums(residency, self._norms.measure, self._tier_of_sums)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Store no sums over ranks in this block: all gradients are forgotten in it, or next."""
        before, self.forgets = self.forgets, True
        try:
            yield
        finally:
            self.forgets = before

    # Arrival.

    def accept(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Store a gradient that autograd made, in the weight slot if its group is on the compute tier."""
        if gradient.layout is not torch.strided:
            raise sparse_gradient_error(record, gradient)
        record.norm_part = None
        over = self._overwrites and record.group.weight is Kind.P16
        if record.gradient is not GradientPlace.NONE or not over:
            self.add(record, gradient)
        elif not self._write_over_weight(record, gradient):
            record.keep_gradient(gradient, overwrite_pending=True)
            self.pending[record] = None

    def _keeps_own_tensor(self, record: ParamState) -> bool:
        """Return True if a gradient that cannot go into the weight slot stays, and is summed, in its own tensor."""
        return self._one_tier or record.group.fixed_tier == 0

    def write_over_weight(self, record: ParamState) -> bool:
        """Write a gradient from its own tensor over the weight; return False while the weight is elsewhere or
        needed.
        """
        return record.own_gradient is not None and self._write_over_weight(record, record.own_gradient)

    def _write_over_weight(self, record: ParamState, gradient: torch.Tensor) -> bool:
        if self._residency.exposed.bounds:
            self._residency.exposed.check(record, ended=True)
        slot = record.group.weight_chunk.newest(record.group.fixed_tier or 0)
        if slot is None or record.busy:
            return False
        if (bound := record.bound) is not None and bound.slot is slot:
            target = bound.view
        else:
            target = record.shaped(slot.memory.view(record.dtype))
        if not self._store.synchronous:
            queue = Queue.CPU if slot.tier else Queue.COMPUTE
            self._store.device.declare_access(queue, f"gradient of {record.name}", (), (target,))
        target.copy_(gradient)
        record.group.weight_chunk.mark_written(slot)
        record.mark_overwritten()
        if self._store.file is not None:
            self.measure(record)  # or it would have to be read for that
        return True

    def pending_overwrites(self) -> list[ParamState]:
        """Return the parameters whose gradients are to overwrite their weights once nothing reads these."""
        self.pending = {record: None for record in self.pending if record.overwrite_pending}
        return list(self.pending)

    def end_overwrites(self) -> None:
        """End a backward pass: move gradients that still cannot overwrite weights to the sums, or keep them (one
        tier).
        """
        for record in self.pending_overwrites():
            if not self._keeps_own_tensor(record):
                self.move_to_accumulator(record)
            elif record.own_gradient is not None:
                record.keep_gradient(record.own_gradient)
        self.pending.clear()

    def add(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Add a gradient to the earlier one in fp32; the first one begins the sum."""
        if record.gradient is GradientPlace.IN_WEIGHT_SLOT:
            self.restore_weights(record.group)
        if record.factor != 1.0:
            self.apply_factor(record)
        if self._keeps_own_tensor(record):
            self._add_to_own_tensor(record, gradient)
            return
        if record.gradient is GradientPlace.OWN_TENSOR:
            self.move_to_accumulator(record)
        self.sums.add(record, gradient)

    def apply_factor(self, record: ParamState) -> None:
        """Multiply the gradient by its factor, which does not apply to gradients that are added later."""
        factor, record.factor = record.factor, 1.0
        if factor == 1.0 or record.gradient is GradientPlace.NONE:
            return
        self._residency.transfers.wait_for_other_queues(Queue.CPU)
        if record.gradient is GradientPlace.OWN_TENSOR and record.own_gradient is not None:
            record.keep_gradient(
                _to_change(record.own_gradient).mul_(factor), overwrite_pending=record.overwrite_pending
            )
        elif record.gradient is GradientPlace.IN_ACCUMULATOR:
            chunk = record.group.chunks[Kind.ACC]
            slot = chunk.source()
            target = self._residency.part_of(slot, record, torch.float32)
            self._store.device.declare_access(Queue.CPU, f"factor of {record.name}", (target,), (target,))
            target.mul_(factor)
            if slot.place is None:
                chunk.mark_written(slot)
            else:
                self._residency.replace(record, Kind.ACC, target)
        record.norm_part = None

    def _add_to_own_tensor(self, record: ParamState, gradient: torch.Tensor) -> None:
        own = record.own_gradient
        record.keep_gradient(gradient if own is None else _to_change(own).add_(gradient))

    def move_to_accumulator(self, record: ParamState) -> None:
        """Move a gradient from its own tensor into the fp32 sum."""
        if record.own_gradient is not None:
            self.sums.add(record, record.own_gradient)

    def sum_staged(self, record: ParamState, slot: Slot) -> None:
        """Add a gradient that lies in a staging slot to the sums."""
        if record.factor != 1.0:
            self.apply_factor(record)
        flat, chunk = self._residency.part_of(slot, record, record.dtype), self.sums.accumulator(record.group)
        tier = self._store.work_tier(chunk.home.tier)
        if slot.tier and not tier:
            self._residency.transfers.wait_for_other_queues(Queue.H2D)
            above = torch.empty_like(flat, device=self._store.device.torch_device)
            self._store.device.copy(Queue.H2D, above, flat)
            flat = above
        if slot.tier:
            self.sums.add_home(record, flat, chunk)
        else:
            self.sums.add(record, flat.as_strided(record.shape, record.stride, flat.storage_offset()))

    def add_staged(
        self, group: ParamGroup, records: list[ParamState], flat: torch.Tensor, slot: Slot, launch: Launch
    ) -> None:
        """Add the gradients in a group's staging slot to the group's sums, which are on the same tier."""
        for record in records:
            if record.factor != 1.0:
                self.apply_factor(record)
        if len(records) == len(group.tensors) and len(set(map(_PLACE, records))) == 1:
            self.sums.add_run(group.tensors, flat[group.clip(slice(0, group.numel))], slot, launch)
            return
        for record in records:
            self.sums.add_run([record], flat[record.piece], slot, launch)

    def _tier_of_sums(self, group: ParamGroup) -> int:
        """Return the tier for sums that no plan contains: that of the master, which the step reads with them."""
        return group.chunks[Kind.P32].home.tier

    # The weight again.

    def restore_weights(self, group: ParamGroup) -> None:
        """Rebuild every weight of a group; move the gradients in their place to sums or own tensors."""
        over = [record for record in group.tensors if record.gradient is GradientPlace.IN_WEIGHT_SLOT]
        lost = [record for record in group.tensors if record.contents is SlotContents.UNDEFINED]
        self._residency.transfers.at_home(group.weight_chunk)
        for record in over:
            flat = self._over(record)
            if self._keeps_own_tensor(record):
                with torch.inference_mode(False):  # or no later gradient could be added to it outside of one
                    record.keep_gradient(flat.float().as_strided(record.shape, record.stride))
            else:
                self.sums.add_home(record, flat, self.sums.accumulator(group))
        self._residency.rebuild(group, over + lost)
        for record in over + lost:
            record.mark_rebuilt()

    def scale(self, record: ParamState, factor: float) -> None:
        """Multiply the factor that the step applies to a gradient."""
        if record.staged_factor is None:
            record.factor *= factor
        else:
            record.staged_factor *= factor

    def check_summed(self, record: ParamState) -> None:
        """Do nothing: one process waits for no sum over ranks."""

    def replaced(self, record: ParamState, value: torch.Tensor) -> None:
        """Do nothing: there are no other ranks that have to write the same value."""

    def forget_left_over(self, records: Iterable[ParamState]) -> None:
        """Do nothing: only one of several ranks keeps gradients that no other rank knows of."""

    def discard(self, records: list[ParamState]) -> None:
        """Forget gradients, and rebuild the weights that they were written over."""
        groups: dict[ParamGroup, None] = {}
        for record in records:
            if record.gradient in (GradientPlace.IN_WEIGHT_SLOT, GradientPlace.ON_ITS_WAY):
                groups[record.group] = None  # also if a sum over ranks broke off
            record.mark_discarded()
        for group in groups:
            if (
                not self._residency.transfers.broken
            ):  # else nothing can be rebuilt on the disk; the masters are there to be read
                self.restore_weights(group)

    # Norms.

    def wait_until_measured(self, records: Iterable[ParamState], stepping: bool) -> None:
        """Wait until the norms of all stored gradients are known; ``stepping``: other groups are still stepped.

        Gradients that lie in their weight's slot were measured on the compute queue within the pass. Those on the host
        are measured by the worker's thread.
        """
        waiting = [record for record in records if record.gradient is not GradientPlace.NONE] if stepping else ()
        if stepping and not any(
            record.group.chunks[Kind.P32].home.tier
            and (record.norm_part is None or record.gradient is not GradientPlace.IN_WEIGHT_SLOT)
            for record in waiting
        ):
            self._residency.transfers.wait_for_streams()
        else:
            self._residency.transfers.wait_for_others(Queue.CPU)

    def norm_parts(self, records: list[ParamState]) -> list[torch.Tensor]:
        """Return the sum of squares and the non-finite flag of each gradient."""
        over: dict[ParamGroup, list[ParamState]] = {}
        small: dict[ParamGroup, list[ParamState]] = {}
        for record in records:
            if record.norm_part is not None:
                continue
            if record.gradient is GradientPlace.IN_WEIGHT_SLOT:
                over.setdefault(record.group, []).append(record)
            elif record.gradient is GradientPlace.OWN_TENSOR and record.numel < SMALL_NUMEL:
                small.setdefault(record.group, []).append(record)
        for group, rows in over.items():
            slot = self._slot_over(group)
            if slot.place is None:
                self.measure_all(rows, slot.flat(group.dtype, group.chunk_numel))
        for group_rows in small.values():
            for rows in _batches_of(group_rows):
                ends = list(accumulate(record.numel for record in rows))
                spans = list(zip([0, *ends], ends, strict=False))
                for record, part in self._norms.measure_spans(rows, concatenate(rows), spans):
                    record.norm_part = part
        return [self.measure(record) if record.norm_part is None else record.norm_part for record in records]

    def _slot_over(self, group: ParamGroup) -> Slot:
        """Return the slot with a group's gradients that were written over their weights."""
        chunk = group.weight_chunk
        return chunk.home if not chunk.home_is_stale and chunk.home.place is None else chunk.source()

    def _over(self, record: ParamState) -> torch.Tensor:
        return self._residency.part_of(self._slot_over(record.group), record, record.group.dtype)

    def gradient_vector(self, record: ParamState) -> torch.Tensor:
        """Return a gradient as a vector, on the tier where it is."""
        if record.gradient is GradientPlace.IN_WEIGHT_SLOT:
            return self._over(record)
        if record.gradient is GradientPlace.IN_ACCUMULATOR:
            return self._residency.part_of(record.group.chunks[Kind.ACC].source(), record, torch.float32)
        assert record.own_gradient is not None, "there is a gradient"
        return flatten(record, record.own_gradient)

    def measure(self, record: ParamState) -> torch.Tensor:
        """Return the sum of squares and the non-finite flag of a gradient; the first call measures it."""
        if record.norm_part is None:
            record.norm_part = self._norms.measure(record, self.gradient_vector(record))
        return record.norm_part

    def measure_all(self, records: list[ParamState], flat: torch.Tensor, launch: Launch | None = None) -> None:
        """Measure gradients of one group, which lie in ``flat``, in one call; ``launch`` None: at once."""
        if records:
            spans = [(record.offset, record.offset + record.numel) for record in records]
            for record, part in self._norms.measure_spans(records, flat, spans, launch):
                record.norm_part = part


def _to_change(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in fp32 that may be changed in place: a copy if another tensor has the same memory.

    Autograd may make the gradients of two parameters views of one tensor, as of those that are stacked.
    """
    storage = gradient.untyped_storage()
    shared = torch._C._storage_Use_Count(storage._cdata) > _USES_OF_ONE
    return gradient.to(torch.float32, copy=shared)


def _batches_of(records: list[ParamState]) -> Iterator[list[ParamState]]:
    """Yield runs of small gradients, in order, each small enough to concatenate."""
    piece: list[ParamState] = []
    numel = 0
    for record in records:
        numel += record.numel
        if numel > CONCATENATED_NUMEL:
            yield piece
            piece, numel = [], record.numel
        piece.append(record)
    yield piece

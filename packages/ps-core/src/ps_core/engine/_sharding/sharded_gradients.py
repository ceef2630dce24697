"""Sum, measure and step this rank's shards of gradients and optimizer states.

[Note: where sums lie]
With one backward pass a step, in 16 bits, the sum is rounded once to the weight's type. It is written over
this rank's shard of the weight, so that it costs no memory. A gather before the step reads the master instead, which is
unchanged. A second backward pass moves the sum into fp32 sums, and the weight is rebuilt. Otherwise sums are fp32 from
the start. All this follows from which gradients came, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

import ps_kernels
from ps_core._errors import UnsupportedParameter
from ps_core._extents import Kind
from ps_core._plan import Queue
from ps_core._units import align_up
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._gradients.gradient_sums import Launch
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._optim.group_step import numbers
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._sharding.compare_ranks import RankComparison
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.checksum import checksum

_CUT_NUMEL = 1 << 18
"""Elements of a sum on the disk, or of one to be added to on another tier, that are in memory at a time."""


class ShardedGradients(GradientStore):
    """Gradients summed over ranks; see [Note: where sums lie]."""

    _residency: ShardedResidency

    def __init__(self, residency: ShardedResidency, *, overwrites: bool) -> None:
        # Ranks measure within the recorded pass. Memory that is kept from there would count in each later pass, and not
        # in the plan: an evaluation of another structure would take more than the plan leaves free.
        super().__init__(residency, overwrites=False, keeps_norms=False)
        self.comparison = RankComparison(residency.together)
        self._may_overwrite_weights = overwrites
        self._measured: dict[ParamState, torch.Tensor] = {}
        """This rank's part of the norm, where it was measured when the sum arrived."""
        self.given = 0
        """Parameters, as bits, for which this rank had a gradient since the last step."""
        self.passes = 0
        """Training passes by a plan since the last step; the same number on every rank."""
        self.complete = True
        """False: some rank may have gradients that no sum has taken; the same on every rank."""

    def expect(self, record: ParamState) -> None:
        """Expect the sum over ranks of a parameter's gradient, to which this rank may have nothing to add."""
        record.norm_part = None
        self.expected_sums += 1
        self._measured.pop(record, None)
        if record.gradient is GradientPlace.NONE:
            record.expect_sum()

    def mark_given(self, record: ParamState) -> None:
        """Note that this rank has a gradient for a sum over ranks that is to come."""
        self.given |= 1 << record.index
        self.expect(record)

    def keep_left_over(self, record: ParamState, gradient: torch.Tensor) -> None:
        """Keep a gradient, for which the plan has no sum, until the step."""
        self.given |= 1 << record.index
        slot = self.left_over.get((self.passes, record))
        if slot is None:
            size = max(align_up(record.numel * record.dtype.itemsize), 128)
            tier = self._store.work_tier(min(1, len(self._store.tiers) - 1))
            slot = self.left_over[self.passes, record] = self._store.reserve(tier, size)
            slot.flat(record.dtype, record.numel).fill_(-0.0)
        target = slot.flat(record.dtype, record.numel).as_strided(record.shape, record.stride)
        self._store.device.declare_access(Queue.COMPUTE, f"gradient of {record.name}", (), (target,))
        target.add_(gradient.to(target.device))

    def forget_left_over(self, records: Iterable[ParamState]) -> None:
        """Forget that this rank gave gradients of these parameters, and those that no sum has taken."""
        chosen = set(records)
        for record in chosen:
            self.given &= ~(1 << record.index)
        for key in [key for key in self.left_over if key[1] in chosen]:
            self._residency.transfers.release_slot(self.left_over.pop(key))

    def drop_left_over(self) -> None:
        """Forget the gradients that no sum has taken."""
        for slot in self.left_over.values():
            self._residency.transfers.release_slot(slot)
        self.left_over.clear()

    def begin_pass(self) -> None:
        """Count a training pass that goes by the plan."""
        self.passes += 1
        self.complete = False

    def mark_complete(self) -> None:
        """Note that what was left over is summed on all ranks."""
        self.complete = True

    def end_step(self) -> None:
        """Note that a step is over."""
        self.given, self.passes, self.complete = 0, 0, True
        self.drop_left_over()

    def discard(self, records: list[ParamState]) -> None:
        """Forget gradients as one process does; the other ranks must forget the same, except with the model."""
        if records and not self.forgets:
            names = ", ".join(record.name for record in records)
            self.comparison.note(f"{len(records)} gradients were forgotten", names)
        super().discard(records)

    def scale(self, record: ParamState, factor: float) -> None:
        """Scale a gradient as one process does; the other ranks must scale alike."""
        self.check_summed(record)
        self.comparison.note(f"the gradient of {record.name!r} was multiplied", repr(factor))
        super().scale(record, factor)

    def check_summed(self, record: ParamState) -> None:
        """Raise `UnsupportedParameter` during backward."""
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedParameter(
                f"the gradient of {record.name!r} cannot be read or multiplied during backward: its sum over ranks is "
                "still on its way; do it between backward() and optimizer.step()"
            )

    def replaced(self, record: ParamState, value: torch.Tensor) -> None:
        """Note a gradient that the user wrote; the other ranks must write the same."""
        self.check_summed(record)
        self._measured.pop(record, None)
        self.comparison.note(f"the gradient of {record.name!r} was written", str(checksum(value)))

    def dtype(self, group: ParamGroup) -> torch.dtype:
        """Return the type that sums over ranks are rounded to."""
        return group.dtype if self._overwrites_weight(group) else torch.float32

    def _overwrites_weight(self, group: ParamGroup) -> bool:
        return self._may_overwrite_weights and group.weight is Kind.P16

    def _chunk_to_fill(self, group: ParamGroup) -> Chunk | None:
        """Return the chunk that the next sum of a group fills; None: the next is added to one that is there."""
        if any(each.gradient not in (GradientPlace.NONE, GradientPlace.ON_ITS_WAY) for each in group.tensors):
            return None
        return group.chunks[Kind.P16] if self._overwrites_weight(group) else self.sums.accumulator(group)

    def direct_target(self, group: ParamGroup) -> Slot | None:
        """Return the slot on the compute tier that the sum over ranks may go to directly; None: there is none."""
        chunk = None if self.forgets else self._chunk_to_fill(group)
        if chunk is None or chunk.home.tier:
            return None
        if self._overwrites_weight(group):
            self.mark_weight_overwritten(group)
        return chunk.home

    def make_room_for_sum(self, group: ParamGroup) -> None:
        """Reserve what `accept_sum` takes; if memory is short, raise before other ranks take part in the sum."""
        if not self.forgets and self._chunk_to_fill(group) is None:
            self.restore_weights(group)
            self.sums.accumulator(group)

    def accept_sum(self, group: ParamGroup, records: list[ParamState], slot: Slot) -> None:
        """Store the sum over ranks of this shard, which lies in a slot of the compute tier."""
        if self.forgets:
            return  # the parameters stay as those whose sums broke off
        chunk = self._chunk_to_fill(group)
        if chunk is None:
            self._add(group, records, slot)
        else:
            over = self._overwrites_weight(group)
            if over:
                self.mark_weight_overwritten(group)
                self._store.device.declare_access(Queue.COMPUTE, f"norms of {group.name}", (slot.memory,), ())
                self.measure_all(records, slot.flat(group.dtype, group.shard_numel))
            self._fill(chunk, slot)
            for record in records:
                if over:
                    record.mark_overwritten()
                else:
                    record.mark_summed()

    def _fill(self, chunk: Chunk, slot: Slot) -> None:
        """Copy what a slot holds into the home slot of a chunk."""
        chunk.mark_written(slot)
        if slot is not chunk.home:
            chunk.add_copy(slot)
            self._residency.transfers.write_home(chunk)
            self._residency.transfers.check_disk()
            chunk.drop_copy(slot.tier)

    def _add(self, group: ParamGroup, records: list[ParamState], slot: Slot) -> None:
        """Add to what there is, in fp32."""
        self.restore_weights(group)
        chunk, source = self.sums.accumulator(group), slot.flat(self.dtype(group), group.shard_numel)
        tier = self._store.work_tier(chunk.home.tier)
        self._residency.transfers.wait_for_other_queues(Queue.CPU)
        self._store.device.declare_access(Queue.CPU, f"sums of {group.name}", (source,), ())
        for record in records:
            factor, record.factor = record.factor, 1.0
            for part in self._cut(chunk, record.piece, whole=tier == slot.tier):
                gradient = source[part]
                if tier != slot.tier:  # in pieces outside the budget: the other ranks have done their part already
                    gradient = gradient.cpu()
                    self._residency.transfers.watcher.moved(slot.tier, tier, gradient.nbytes)
                if record.gradient is GradientPlace.ON_ITS_WAY:
                    self._residency.save(chunk, part, gradient)
                    continue
                total = self._residency.load(chunk, part)
                ps_kernels.accumulate(total if factor == 1.0 else total.mul_(factor), gradient)
                self._residency.save(chunk, part, total)
            record.mark_summed()

    def _cut(self, chunk: Chunk, span: slice, *, whole: bool = True) -> Iterator[slice]:
        """Yield a span whole; in pieces for a chunk on the disk, or unless ``whole``."""
        step = max(1, span.stop - span.start) if whole and chunk.home.place is None else _CUT_NUMEL
        for start in range(span.start, span.stop, step):
            yield slice(start, min(start + step, span.stop))

    def restore_weights(self, group: ParamGroup) -> None:
        """Move gradients from the weight slot into the sums, and rebuild the weight."""
        over = [record for record in group.tensors if record.gradient is GradientPlace.IN_WEIGHT_SLOT]
        gone = [record for record in group.tensors if record.contents is not SlotContents.WEIGHT]
        if over:
            source, target = group.chunks[Kind.P16], self.sums.accumulator(group)
            for part in self._cut(target, slice(0, group.shard_numel)):
                self._residency.save(target, part, self._residency.load(source, part))
            for record in over:
                record.mark_summed()
        self._residency.rebuild(group, gone)
        for record in gone:
            record.mark_rebuilt()

    # Norms.

    def measure(self, record: ParamState) -> torch.Tensor:
        """Return the sum of squares and the flag of a whole gradient; the first call measures all gradients."""
        if record.norm_part is None:
            rows = [each for group in self._residency.groups for each in group.tensors]
            self.norm_parts([each for each in rows if each.gradient is not GradientPlace.NONE])
        assert record.norm_part is not None, "it is among them"
        return record.norm_part

    def norm_parts(self, records: list[ParamState]) -> list[torch.Tensor]:
        """Return them for several gradients, added up in the order of the shards in double precision."""
        missing = [record for record in records if record.norm_part is None]
        if missing:
            self._measure_homes([record for record in missing if record not in self._measured])
            mine = [value for part in numbers([self._measured.pop(each) for each in missing]) for value in part]
            rows = self._residency.together.all_values(mine, "norms of gradients", shards_only=True)
            columns = list(zip(*rows, strict=True))
            values = list(zip(map(sum, columns[::2]), map(max, columns[1::2]), strict=True))
            parts = torch.tensor(values, dtype=torch.float64, device="cpu").unbind()
            for record, part in zip(missing, parts, strict=True):
                record.norm_part = part
        return [record.norm_part for record in records if record.norm_part is not None]

    def _measure_homes(self, records: list[ParamState]) -> None:
        """Measure gradients where they lie, in one call a group; those on the disk are read one by one."""
        rows: dict[Chunk, list[ParamState]] = {}
        for record in records:
            chunk = record.group.chunks[Kind.P16 if record.gradient is GradientPlace.IN_WEIGHT_SLOT else Kind.ACC]
            rows.setdefault(chunk, []).append(record)
        for chunk, found in rows.items():
            if chunk.home.place is None:
                self.measure_all(found, self._residency.load(chunk, slice(0, found[0].group.shard_numel)))
            else:
                self._measured.update(
                    {each: self._norms.measure(each, self._residency.load(chunk, each.piece)) for each in found}
                )

    def measure_all(self, records: list[ParamState], flat: torch.Tensor, launch: Launch | None = None) -> None:
        """Measure this rank's part of a group's sums, which lies in ``flat``."""
        rows = [record for record in records if record not in self._measured]
        if rows:
            spans = [(record.piece.start, record.piece.stop) for record in rows]
            self._measured.update(self._norms.measure_spans(rows, flat, spans, launch))

    def mark_weight_overwritten(self, group: ParamGroup) -> None:
        """Mark this rank's shard of the weight as overwritten: the master alone has the weight now."""
        for record in group.tensors:
            record.mark_slot_taken()

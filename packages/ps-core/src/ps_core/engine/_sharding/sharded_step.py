"""Step this rank's shards, once all ranks are about to take the same step.

[Note: gradients that the plan does not sum]
A rank that did other than the plan may have gradients for which the plan has no sum. And a sum of the plan may be of
nothing, where no rank had a gradient. One process would not step such a parameter. All ranks compare something at every
step. With it each rank tells whether it has any left over, and which gradients it gave. Only where a rank has any, more
is exchanged. All this comes before norms are taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

import torch

from ps_core._extents import Kind
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.on_demand_step import OnDemandStepper
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.plan_agreement import exchange_texts
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.submitted_collectives import CollectiveQueue
from ps_core.engine._support.checksum import checksum

_BITS = 48
"""Bits that one number of a message holds exactly."""


class ShardedStepper(OnDemandStepper):
    """Steps this rank's shards."""

    _residency: ShardedResidency
    _gradients: ShardedGradients

    def __init__(self, residency: ShardedResidency, gradients: ShardedGradients, groups: list[ParamGroup]) -> None:
        super().__init__(residency, gradients, groups)
        self._queue = CollectiveQueue(residency, "a step")

    def compare(self) -> None:
        """Raise `RanksDiverged` unless all ranks did the same between passes."""
        self._gradients.comparison.compare()

    def compare_step(
        self, records: Sequence[ParamState], settings_of: SettingsOf, max_norm: float | None, loss_scale: float
    ) -> None:
        """Raise `RanksDiverged` unless all ranks take the same step; then complete the gradients for it."""
        told = self._told(records)
        rows = self._gradients.comparison.compare_step(records, settings_of, max_norm, loss_scale, told)
        self._complete(records, rows)

    def before_gradient(self, records: Sequence[ParamState]) -> None:
        """Complete the gradients of the passes so far, before the user reads one, as every rank does."""
        if not self._gradients.complete:
            rows = self._residency.together.all_values(self._told(records), "gradients, before one is read")
            self._complete(records, rows)

    def weight(self, record: ParamState) -> torch.Tensor:
        """Compare ranks, then copy the parameter as one process does."""
        self.compare()
        return super().weight(record)

    def read(self, record: ParamState, kind: Kind) -> torch.Tensor:
        """Compare ranks, then read as one process does."""
        self.compare()
        return self.read_while_loading(record, kind)

    def write(self, record: ParamState, kind: Kind, value: torch.Tensor) -> None:
        """Write as one process does; the other ranks must write the same."""
        self._gradients.comparison.before_write()
        of = "" if kind in (Kind.P32, record.group.weight) else "the optimizer's state of "
        self._gradients.comparison.note(f"{of}{record.name!r} was written", f"{kind.value} {checksum(value)}")
        super().write(record, kind, value)

    def free_sums(self) -> None:
        """Release sums after a step; from now on other ranks get the new weights."""
        super().free_sums()
        self._residency.forget()
        self._gradients.end_step()
        self._residency.end_change()

    # See [Note: gradients that the plan does not sum].

    def _told(self, records: Sequence[ParamState]) -> list[float]:
        """Return whether this rank has anything left over, and the bits of the gradients that it gave."""
        given = self._gradients.given
        mask = [float(given >> start & (1 << _BITS) - 1) for start in range(0, len(records), _BITS)]
        return [float(bool(self._gradients.left_over)), *mask]

    def _complete(self, records: Sequence[ParamState], rows: Sequence[Sequence[float]]) -> None:
        """Sum what is left over on any rank, and forget what none gave; ``rows``: what the ranks told."""
        given = 0
        for row in rows:
            for place, bits in enumerate(row[1:]):
                given |= int(bits) << place * _BITS
        if any(row[0] for row in rows):
            self._sum_left_over(records)
        self._forget_what_nobody_gave(records, given)
        self._gradients.mark_complete()

    def _sum_left_over(self, records: Sequence[ParamState]) -> None:
        mine = [(number, record.index) for number, record in self._gradients.left_over]
        texts = exchange_texts(self._residency.together, json.dumps(mine), "gradients that the plan does not sum")
        of = {record.index: record for record in records}
        keys = sorted({(number, of[index].group.index, index) for text in texts for number, index in json.loads(text)})
        for (number, group), rows in groupby(keys, key=lambda key: key[:2]):
            self._sum(number, group, [of[index] for _, _, index in rows])
        self._gradients.drop_left_over()

    def _sum(self, number: int, index: int, records: list[ParamState]) -> None:
        """Sum what a pass left over of one group."""
        residency, gradients, group = self._residency, self._gradients, self._residency.groups[index]
        slot = residency.take_slot(group.weight_chunk.bytes)
        whole = slot.flat(group.dtype, group.chunk_numel)
        mine = {
            record: gradients.left_over[number, record] for record in records if (number, record) in gradients.left_over
        }
        self._queue.fill_gaps(group, mine, whole)
        for record, kept in mine.items():
            whole[record.span].copy_(kept.flat(record.dtype, record.numel))
        self._queue.sum_now(gradients, group, records, whole, residency.take_slot)
        residency.return_slot(slot)

    def _forget_what_nobody_gave(self, records: Sequence[ParamState], given: int) -> None:
        """Forget sums of nothing: one process would not step these parameters."""
        empty = [r for r in records if r.gradient is not GradientPlace.NONE and not given >> r.index & 1]
        for record in empty:
            record.mark_discarded()
        for group in dict.fromkeys(record.group for record in empty):
            if all(record.gradient is GradientPlace.NONE for record in group.tensors):
                self._gradients.restore_weights(group)


def sharded_components(
    store: TierStore,
    groups: list[ParamGroup],
    watcher: TransferObserver,
    together: AsyncCollectives,
    *,
    overwrites: bool,
) -> Components:
    """Return the engine's components for a rank that has a shard of the model."""
    residency = ShardedResidency(store, groups, watcher, together)
    gradients = ShardedGradients(residency, overwrites=overwrites)
    updater = ShardedStepper(residency, gradients, groups)
    return Components(residency, gradients, updater, OnDemandDriver(residency, gradients))

"""Step this rank's shards, once all ranks are about to take the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_core._extents import Kind
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.on_demand_step import OnDemandStepper
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives
from ps_core.engine._sharding.left_over_sums import LeftOverSums
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.checksum import checksum


class ShardedStepper(OnDemandStepper):
    """Steps this rank's shards."""

    _residency: ShardedResidency
    _gradients: ShardedGradients

    def __init__(self, residency: ShardedResidency, gradients: ShardedGradients, groups: list[ParamGroup]) -> None:
        super().__init__(residency, gradients, groups)
        self._left_over = LeftOverSums(residency, gradients)

    def compare(self) -> None:
        """Raise `RanksDiverged` unless all ranks did the same between passes."""
        self._gradients.comparison.compare()

    def compare_step(
        self, records: Sequence[ParamState], settings_of: SettingsOf, max_norm: float | None, loss_scale: float
    ) -> None:
        """Raise `RanksDiverged` unless all ranks are about to do the same step."""
        self._left_over.before_step(records, settings_of, max_norm, loss_scale)

    def before_gradient(self, records: Sequence[ParamState]) -> None:
        """Complete gradients, in which every rank takes part."""
        self._left_over.before_read(records)

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

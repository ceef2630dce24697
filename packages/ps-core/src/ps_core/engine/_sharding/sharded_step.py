"""Step this rank's shards, once all ranks are about to take the same step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_core._program import Kind
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._memory.make_room import make_room
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.on_demand_step import OnDemandStepper
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._sharding.left_over_sums import LeftOverSums
from ps_core.engine._sharding.shard_promotion import low_tier
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.checksum import checksum


class ShardedStepper(OnDemandStepper):
    """Steps this rank's shards."""

    def __init__(self, residency: ShardedResidency, gradients: ShardedGradients, groups: list[ParamGroup]) -> None:
        super().__init__(residency, gradients, groups)
        self._shards, self._alike = residency, gradients.alike
        self._left_over = LeftOverSums(residency, gradients)

    def compare(self) -> None:
        """Raise `RanksDiverged` unless all ranks did the same between passes."""
        self._alike.compare()

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
        self._alike.before_write()
        of = "" if kind in (Kind.P32, record.group.weight) else "the optimizer's state of "
        self._alike.note(f"{of}{record.name!r} was written", f"{kind.value} {checksum(value)}")
        super().write(record, kind, value)

    def step_one(self, group: ParamGroup, settings_of: SettingsOf, factor: float) -> None:
        """Step one group's shard on the tier of its master, after other shards were demoted to make room."""

        def fits() -> bool:
            if self._store.work_tier(group.chunks[Kind.P32].home.tier):
                return True  # the step is done below
            kinds = {kind: chunk for kind, chunk in group.chunks.items() if kind is not Kind.FULL}
            return self._store.fits_slots([chunk.bytes for chunk in kinds.values() if chunk.home.tier])

        make_room(fits, lambda: self._shards.promoter.demote(1))
        super().step_one(group, settings_of, factor)

    def _on(self, group: ParamGroup, kind: Kind, tier: int) -> Slot:
        chunk = group.chunks[kind]
        below = chunk.copies.get(tier)
        if below is None or chunk.home.tier == tier:
            return super()._on(group, kind, tier)
        if kind is group.weight and all(record.gradient is GradientPlace.IN_ACCUMULATOR for record in group.tensors):
            return below  # all of it is written
        return self._residency.transfers.copy_to(chunk, below)

    def _put_back(self, chunk: Chunk, slot: Slot) -> None:
        if slot.tier == low_tier(chunk) != chunk.home.tier:  # the place that it keeps below
            self._residency.transfers.write_home(chunk)
        else:
            super()._put_back(chunk, slot)

    def free_sums(self) -> None:
        """Release sums after a step, and promote shards into the room."""
        super().free_sums()
        self._shards.forget()
        self._left_over.end_step()
        self._shards.end_change()
        self._shards.promoter.promote()

"""Gradients and states of a shared model: each process sums, measures and steps its own shards."""

from __future__ import annotations

import torch

import ps_kernels
from ps_core._plan import Queue
from ps_core._program import Kind
from ps_core.engine._gradients import GradientKeeper
from ps_core.engine._processes.shards import ShardResidency
from ps_core.engine._processes.together import Together
from ps_core.engine._records import Gradient, GroupRecord, TensorRecord
from ps_core.engine._stepping import SettingsOf
from ps_core.engine._store import Home, Slot
from ps_core.engine._update import Updater


class ShardGradients(GradientKeeper):
    """Sums over processes, in fp32; see [Note: who sums what when] in `driver`."""

    def __init__(self, residency: ShardResidency, together: Together) -> None:
        super().__init__(residency, overwrites=False)
        self._together = together
        self._fresh: set[TensorRecord] = set()
        """Those whose place in the accumulator holds nothing yet."""

    def announce(self, record: TensorRecord) -> None:
        """A gradient is on its way."""
        record.part = None
        if record.gradient is Gradient.NONE:
            record.gradient = Gradient.SUMMED
            self._fresh.add(record)

    def settled(self) -> None:
        """Everything that was announced has come."""
        self._fresh.clear()

    def direct(self, group: GroupRecord) -> Slot | None:
        """The accumulator, if the sum over processes may be put there as it is."""
        slot = self.accumulator(group).slot
        old = any(each.gradient is Gradient.SUMMED and each not in self._fresh for each in group.tensors)
        return None if slot.tier or old else slot

    def add_shard(self, group: GroupRecord, records: list[TensorRecord], slot: Slot) -> None:
        """Add the sum over processes of this shard, which lies on the compute tier in fp32."""
        home, numel = self.accumulator(group), group.shard_numel
        if slot is home.slot:
            self._fresh.difference_update(records)
            home.changed(slot)
            return
        stage = slot if home.slot.tier == slot.tier else self._down(slot, home)
        source, target = (each.flat(torch.float32, numel) for each in (stage, home.slot))
        self._residency.await_all(Queue.CPU)
        self._store.device.work(Queue.CPU, f"sums of {group.name}", (source, target), (target,))
        for record in records:
            piece = record.piece
            if record in self._fresh:
                target[piece].copy_(source[piece])
                self._fresh.discard(record)
                continue
            self.apply_factor(record)
            if piece.stop > piece.start:
                ps_kernels.accumulate(target[piece], source[piece])
        home.changed(home.slot)
        if stage is not slot:
            self._residency.give_back(stage)

    def _down(self, slot: Slot, home: Home) -> Slot:
        """A copy where the accumulator is."""
        stage = self._store.reserve(home.slot.tier, slot.bytes)
        self._residency.await_all(Queue.D2H)
        self._store.device.copy(Queue.D2H, stage.memory, slot.memory)
        self._residency.watcher.moved(0, stage.tier, slot.bytes)
        return stage

    def measure(self, record: TensorRecord, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of squares and non-finite flag of the whole gradient; the first to ask has all of them taken."""
        if record.part is None:
            rows = [each for group in self._residency.groups for each in group.tensors]
            self.parts([each for each in rows if each.gradient is not Gradient.NONE])
        assert record.part is not None, "it is among them"
        return record.part

    def parts(self, records: list[TensorRecord]) -> list[torch.Tensor]:
        """The same for these; sums over shards in the order of the shards, in double precision."""
        missing = [record for record in records if record.part is None]
        if missing:
            mine = [value for record in missing for value in self._measure_piece(record)]
            rows = self._together.all_values(mine, "norms of gradients", shards_only=True)
            for place, record in enumerate(missing):
                squares = sum(row[2 * place] for row in rows)
                record.part = torch.tensor([squares, max(row[2 * place + 1] for row in rows)], dtype=torch.float64)
        return [record.part for record in records if record.part is not None]

    def _measure_piece(self, record: TensorRecord) -> list[float]:
        group, piece, part = record.group, record.piece, torch.zeros(2)
        slot = self._residency.at_home(group.homes[Kind.ACC])
        if piece.stop > piece.start:
            ps_kernels.sumsq_finite(slot.flat(torch.float32, group.shard_numel)[piece], part)
        found: list[float] = part.tolist()
        return found


class ShardUpdater(Updater):
    """Steps this process's shards."""

    def __init__(self, residency: ShardResidency, gradients: GradientKeeper, groups: list[GroupRecord]) -> None:
        super().__init__(residency, gradients, groups)
        self._shards = residency

    def step_one(self, group: GroupRecord, settings_of: SettingsOf, factor: float) -> None:
        """Step one group's shard; what was gathered is old now."""
        super().step_one(group, settings_of, factor)
        group.home.stamp += 1

    def free_sums(self) -> None:
        """After a step."""
        super().free_sums()
        self._shards.forget()

"""Measure what fills the compute tier, moment by moment, while a model is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._parameters.state_transitions import SlotContents
from ps_core.engine._tracing.pass_recording import MomentRecord
from ps_core.report.columns import CATEGORIES, Category, Column, Tide, category_of


class MemoryMeasurement:
    """Measure one training step of one process on the compute tier, in bytes that were in use rather than planned.

    Train within `passes` and step within `update`. Weights, gradients and states are the slots there at the end of each
    moment. Non-model bytes are the moment's highest. Where a model is on one tier there are no moments.
    """

    def __init__(self, model: nn.Module) -> None:
        self._engine = hooks_of(model).engine
        self._store = self._engine.store
        self._columns: list[Column] = []

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Measure the passes of this block; of several micro-batches the last one's moments are kept."""
        passes = self._engine.passes
        passes.observe(None if self._store.resident else self._add_moment)
        try:
            yield
        finally:
            passes.observe(None)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Measure the optimizer step of this block: its highest moment, as one column."""
        peaks = self._store.ledger.peak_bytes
        before, peaks[0] = peaks[0], 0
        try:
            yield
        finally:
            highest = max(peaks[0], self._store.ledger.used_bytes[0])
            peaks[0] = max(before, peaks[0])
        if self._columns:
            counts = self._model_data()
            counts[Category.NONMODEL] = self._engine.constant_bytes
            # Slots that exist only within the step hold a group's states.
            counts[Category.STATES] += max(0, highest - self._store.ledger.used_bytes[0])
            self._columns.append(Column("the optimizer's step", "update", tuple(counts.values())))

    def report(self, model: str) -> Tide | None:
        """Return the moments for `ps_core.report` to draw, under the model's name; None if none was measured."""
        if not self._columns:
            return None
        tier = self._store.tiers[0]
        return Tide(
            model=model,
            tier=tier.name,
            budget_bytes=tier.capacity_bytes,
            columns=tuple(self._columns),
        )

    def _add_moment(self, moment: MomentRecord, first: bool) -> None:
        if first:
            self._columns.clear()
        counts = self._model_data()
        counts[Category.NONMODEL] = moment.nonmodel_bytes + self._engine.constant_bytes
        phase = "backward" if moment.backward else "forward"
        self._columns.append(Column(moment.name, phase, tuple(counts.values())))

    def _model_data(self) -> dict[Category, int]:
        counts = dict.fromkeys(CATEGORIES, 0)
        for slot in self._store.arena.slots:
            counts[self._category(slot)] += slot.bytes
        return counts

    def _category(self, slot: Slot) -> Category:
        extent = slot.extent
        if extent is None:
            return Category.GRADIENTS  # a slot that nothing is copied to is for gradients that are about to come
        group = self._engine.groups[extent.index]
        newest = extent.kind is group.weight and slot.version == group.weight_chunk.version
        over = newest and any(record.contents is not SlotContents.WEIGHT for record in group.tensors)
        return category_of(extent.kind, group.weight, is_gradient=over)

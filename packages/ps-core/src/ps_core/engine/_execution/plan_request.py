"""Request a plan for a recording, the current tiers and the machine; explain the planner's errors."""

from __future__ import annotations

from pathlib import Path

from ps_core._errors import DoesNotFit
from ps_core._extents import Precision
from ps_core._layout import Layout
from ps_core._options import Options
from ps_core._plan import Tier
from ps_core._planner.bounds import STEP_TIER
from ps_core._planner.plan_cache import find_plan_again
from ps_core._planner.search import Planned, Setup, find_plan
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import machine as find_machine
from ps_core._trace import Trace
from ps_core.engine._execution.emulated_machine import SMALL_COMPUTER
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan, lay_groups
from ps_core.engine._memory.reserved_bytes import with_constant_peak
from ps_core.engine._parameters.errors import compute_tier_too_small, everything_too_large, group_too_large
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.pass_recording import PassRecording


class PlanRequest:
    """Find plans for one engine."""

    def __init__(self, engine: Engine, model_name: str, setup: Setup, options: Options) -> None:
        self._engine, self._model_name, self._setup = engine, model_name, setup
        self._folder, self._prefetch = options.plan_cache, options.prefetch
        named, own = options.machine, engine.store.device.machine or SMALL_COMPUTER
        self.machine = own if named is None else find_machine(named)

    def find(self, recording: PassRecording, batch: BatchShape, spare_bytes: int) -> EnginePlan:
        """Return the best plan for such passes, with ``spare_bytes`` left free; raise `DoesNotFit` if there is none."""
        engine = self._engine
        records = [record for record in engine.records if not record.group.pinned]
        groups = [group for group in engine.groups if not group.pinned]
        engine.activations.release_free()  # the plan has room for them
        constant = engine.constant_bytes + self._waiting_bytes(recording)
        trace = recording.trace(self._model_name, records, engine.groups, constant, batch.tokens)
        if not engine.store.device.overcommits:
            trace = with_constant_peak(trace, spare_bytes)
        layout, order = lay_groups(groups, records, trace)
        try:
            planned = self._find(trace, layout, self._tiers())
        except DoesNotFit as error:
            raise self._explained(error, trace) from None
        return EnginePlan(planned, self.machine, order, recording, self._prefetch)

    def saved_by_early_steps(self, planned: Planned) -> float:
        """Return the fraction of a step that steps within backward would save, by this plan; 0: they are impossible.

        See ``Options(step="in_backward")``.
        """
        setup = self._setup
        alone = setup.accumulate == setup.ranks * setup.copies == 1
        if not setup.training or setup.step_in_backward or setup.precision is Precision.FP16 or not alone:
            return 0.0
        early = simulate(planned.program, planned.plan, self.machine, iterations=1, step_in_backward=True)
        return 1 - early.step_time_s / planned.prediction.step_time_s

    def _waiting_bytes(self, recording: PassRecording) -> int:
        """Return the bytes of gradients that a step's earlier passes leave on the compute tier, of groups fixed there.

        A fake pass is the first of a step. A recorded one is usually the last.
        """
        if not recording.foreseen or not self._setup.training or self._setup.accumulate == 1:
            return 0
        return 4 * sum(group.numel for group in self._engine.groups if group.fixed_tier == 0 and group.trainable)

    def _find(self, trace: Trace, layout: Layout, tiers: tuple[Tier, ...]) -> Planned:
        setup, folder = self._setup, self._folder
        if folder is None:
            return find_plan(trace, tiers, self.machine, setup=setup, layout=layout)
        return find_plan_again(trace, tiers, self.machine, setup=setup, layout=layout, folder=Path(folder))

    def _explained(self, error: DoesNotFit, trace: Trace) -> DoesNotFit:
        """Return the planner's error with suggestions for users of the engine."""
        store, groups = self._engine.store, self._engine.groups
        # The planner was given the tiers without permanent uses (pinned weights, tables, offloaded activations).
        kept = [
            whole.capacity_bytes - left.capacity_bytes for whole, left in zip(store.tiers, self._tiers(), strict=True)
        ]
        last = len(store.tiers) - 1
        middle = {STEP_TIER: store.work_tier(last)} | {store.tiers[tier].name: tier for tier in range(1, last)}
        if error.tier in middle:
            tier = middle[error.tier]
            return group_too_large(store, groups, tier, error, error.needed_bytes + kept[tier])
        if error.tier != store.tiers[0].name:
            return everything_too_large(store, groups, error.needed_bytes + sum(kept))
        nonmodel, needed = trace.peak_nonmodel_bytes, error.needed_bytes + kept[0]
        return compute_tier_too_small(store, groups, error.moment, needed, nonmodel, proven=error.proven, whole=True)

    def _tiers(self) -> tuple[Tier, ...]:
        """Return the tiers without the bytes of pinned groups, tables and activations."""
        store = self._engine.store
        first, *others = store.tiers
        taken = self._engine.activations.bytes + store.ledger.fixed_host_bytes
        if taken:
            others[0] = Tier(others[0].name, others[0].capacity_bytes - taken)
        pinned = [
            chunk.home for group in self._engine.groups if group.fixed_tier == 0 for chunk in group.chunks.values()
        ]
        end = min((slot.offset for slot in pinned), default=first.capacity_bytes)
        return (Tier(first.name, end & -128), *others)

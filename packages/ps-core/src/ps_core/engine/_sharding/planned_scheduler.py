"""Choose the driver of each pass of a model that ranks share, and make the plan that all of them follow.

Before the first pass each rank estimates it with fake tensors, or rank 0 for all that make the same call. Then the
ranks plan it together. A pass that no plan serves asks other ranks for weights, and is recorded. As its step begins,
the ranks tell each other what they recorded. They plan, and move their shards to where the plan has them; see
[Note: one plan] in `plan_agreement`. All ranks compare something at every step. With it each tells whether it has a new
recording, so that takes no message of its own. A rank where memory ran out tells so with what ranks compare next: a
step, or which gradients were forgotten. The next pass by the plan begins with a plan that leaves more free. A model
without an optimizer has no steps. There the ranks ask each other before passes 2, 3, 5, 9, 17, 33, and then before
every 64th.
"""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from ps_core._extents import SegmentName
from ps_core._options import Options
from ps_core._planner.search import Setup
from ps_core.engine._execution.driver_protocols import DriverForRest, PassDriver
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.module_guards import called_part
from ps_core.engine._execution.plan_scheduler import PlanScheduler
from ps_core.engine._execution.unplanned_passes import READ_OUTSIDE
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.speculative_steps import Stepping
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._sharding.following_driver import FollowingDriver, UnplannedDriver
from ps_core.engine._sharding.plan_agreement import RanksPlanRequest, exchange_texts
from ps_core.engine._sharding.planned_collectives import collectives_of
from ps_core.engine._sharding.planned_driver import RanksPlanDriver
from ps_core.engine._sharding.ranks_plan import RanksPlan
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._sharding.submitted_collectives import queue_for_pass
from ps_core.engine._tracing.batch_shape import describe_call, within_a_module
from ps_core.engine._tracing.pass_recording import PassRecording

_ASKED_EVERY = 64
"""Without an optimizer, ranks ask each other for new recordings at least once in so many passes."""


class RanksScheduler(PlanScheduler):
    """Plans for one rank's engine together with the other ranks, and chooses the driver of its passes."""

    _in_force: RanksPlan

    def __init__(
        self, engine: Engine, setup: Setup, *, model_name: str, options: Options, cast: torch.dtype | None
    ) -> None:
        assert isinstance(engine.residency, ShardedResidency), "several ranks share the model"
        assert isinstance(engine.gradients, ShardedGradients), "several ranks share the model"
        self._residency, self._gradients = engine.residency, engine.gradients
        self._comparison = engine.gradients.comparison
        self._together = engine.residency.together
        super().__init__(engine, setup, model_name=model_name, options=options, cast=cast)
        self._residency.serve()
        self._calls = 0
        """Calls of the root module so far, counted for a model without an optimizer; the same on all ranks."""
        self._same_call: bool | None = None
        """True if all ranks made the same first call; None until they compared it."""

    def _no_plan_yet(self, options: Options) -> RanksPlan:
        asking = RanksPlanRequest(self._engine, self._model_name, self._setup, options, self._together)
        return RanksPlan(self._engine, asking, self._homes, self._others, self._measured, self._say)

    def _replay(
        self, plan: EnginePlan, segment: SegmentName, *, tracked: bool = False, stepping: Stepping | None = None
    ) -> RanksPlanDriver:
        return RanksPlanDriver(plan, segment, self._residency, self._gradients, self._engine.counters, tracked=tracked)

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at the batch that the root module is called with; plan the first pass, together with the others."""
        self._recover()
        # A pass that began with a call is open on all ranks; one that began with a read weight may be open on one.
        goes_on = self._served is not None and self._engine.passes.recording is not None
        if goes_on and self._setup.training and torch._C._current_graph_task_id() == -1:
            self._add_call(self._batch_of(module, args, kwargs))
            return
        self._batch = self._batch_of(module, args, kwargs)
        if not self._setup.training:
            self._plan_between_passes()
        elif not self._tried and torch.is_grad_enabled():
            self._foresee(module, args, kwargs)
            self._tried = True

    def _plan_between_passes(self) -> None:
        """Plan before a pass of a model without an optimizer, if it is time to ask and a rank has a new recording."""
        done, self._calls = self._calls, self._calls + 1
        if done and (done & (done - 1) == 0 or done % _ASKED_EVERY == 0):
            wanted = float(self._in_force.found is not None)
            if any(self._comparison.compare_free_bytes(wanted, "whether a pass is to be planned")):
                self._in_force.replan()

    def _request_free_bytes(self, size_bytes: int) -> None:
        """Tell the other ranks with the next comparison to leave more free."""
        self._comparison.propose_free_bytes(size_bytes)

    def _foresee(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Plan the first pass from what the ranks estimate; if a rank cannot, it goes without a plan.

        Where all ranks make the same call, rank 0 estimates for all: importing what fake tensors need takes 70 MB.
        """
        assert self._batch is not None, "the pass is the root module's"
        if self._same_call is None:  # else an interrupt ended the estimate, and other ranks wait with theirs
            self._same_call = self._make_same_call(module, args, kwargs)
        alike = self._same_call
        estimates = self._estimates.possible and (self._together.process == 0 or not alike)
        recording = self._estimates.estimate(module, args, kwargs) if estimates else None
        self._in_force.foresee_together(recording, self._batch, alike=alike)

    def _make_same_call(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return True if all ranks make the same first call of models that are alike."""
        call = describe_call(module, args, kwargs) if self._estimates.possible else ""
        digest = blake2b(f"{self._engine.constant_bytes} {call}".encode(errors="replace"), digest_size=16).hexdigest()
        told = exchange_texts(self._together, f"{bool(call)} {digest}", "the first call")
        return bool(call) and len(set(told)) == 1

    def driver_for_pass(self, training: bool, *, backward: bool) -> PassDriver:
        """Choose the plan's driver where the plan serves the pass, else one that needs no plan."""
        if self._batch is None and not backward and not within_a_module():
            self._served = None
            for_rest = partial(self._choose, why="weights were read outside of the model before it")
            return self._drive_without_plan(training=False, for_rest=for_rest)
        return self._choose(training, backward)

    def _choose(self, training: bool, backward: bool, why: str = "") -> PassDriver:
        """Choose the driver of a pass; ``why``: the reason if this rank cannot go by the plan.

        Whether a pass goes by the plan is decided by what is the same on all ranks.
        """
        plan, batch = self._in_force.plan, None if backward else self._batch
        if batch is None and training and not backward and self._setup.training:
            batch = called_part()
        self._served, self._part, self._batch = batch, batch, None
        if training and self._gradients.passes and not self._engine.holds_gradients():
            self._gradients.end_step()  # what there was, was forgotten
        if training or self._comparison.has_writes:
            self._comparison.compare()
        passes = self._gradients.passes
        if training:
            self._gradients.begin_pass()
        if (
            plan is None
            or batch is None
            or (training and not self._setup.training)
            or self._has_gradients_over_weights()
            or (training and self._has_sums_besides(plan))
        ):
            return self._drive_without_plan(training=training)
        free_bytes = self._comparison.take_free_bytes()  # which a rank asked for; all begin the same pass
        if free_bytes and not self._in_force.leave_free(free_bytes):
            self._say("memory ran out, and no plan leaves more free, so the plan stays")
        plan = self._in_force.plan or plan
        micro = plan.micro_segments
        segment = micro[min(passes, len(micro) - 1)] if training else SegmentName.EVAL
        if not why and (why := self._others.why_unserved(batch, self._in_force.batch, training=training)):
            self._free_for_unplanned(training)
        elif not why and self._homes.elsewhere and not self._homes.move_to_plan(plan):
            why = "memory that home slots have to be moved to has live aliases"
        if not why:
            return self._replay(plan, segment, tracked=self._is_watched(training))
        self._engine.counters.diverged(why)
        queue = queue_for_pass(self._residency, training=training)
        collectives = collectives_of(plan, plan.segments[segment])
        return FollowingDriver(queue, collectives, plan.learning, self._gradients, self._engine.counters)

    def _drive_without_plan(self, *, training: bool, for_rest: DriverForRest | None = None) -> FollowingDriver:
        """Return the driver of a whole pass that no plan serves; see [Note: passes without a plan]."""
        self._homes.move_down()
        learning = {
            group: records
            for group in (self._residency.groups if training else ())
            if (records := [each for each in group.tensors if each.trainable and each.parameter.requires_grad])
        }
        queue, counters = queue_for_pass(self._residency, training=training), self._engine.counters
        sums = [(True, group) for group in reversed(learning)]
        return UnplannedDriver(queue, sums, learning, self._gradients, counters, for_rest=for_rest)

    def forget_plan(self) -> None:
        """Drop the plan and the order of collectives, because groups change on all ranks."""
        super().forget_plan()
        self._calls, self._same_call = 0, None

    def _has_gradients_over_weights(self) -> bool:
        """Return True if a weight's shard is overwritten; the same on all ranks."""
        return any(record.contents is not SlotContents.WEIGHT for record in self._engine.records)

    def _has_sums_besides(self, plan: EnginePlan) -> bool:
        """Return True if gradients lie in sums, for which the plan has no place; the same on all ranks."""
        rows = (record for group in plan.overwritten for record in group.tensors)
        return any(record.gradient is GradientPlace.IN_ACCUMULATOR for record in rows)

    def observe(self, recording: PassRecording) -> None:
        """Remember a recorded pass, if the plan is not for such passes."""
        batch, self._served = self._served, None
        passes = self._engine.passes
        trains = recording.training and self._setup.training and not passes.broke_off
        if trains and self._in_force.none_yet:
            self._unplanned.note(recording, READ_OUTSIDE if batch is None else "")
        if batch is not None:
            self._note_measured(recording, batch)
        if batch is None or passes.broke_off or not recording.complete or not passes.tracked:
            return
        if recording.training is self._setup.training:
            self._in_force.note_pass(recording, batch, left_plan=passes.followed)
        elif not isinstance(passes.driver, RanksPlanDriver):
            self._others.note_evaluation(self._in_force.plan, recording, batch, self._engine.constant_bytes)

    def maybe_replan(self) -> None:
        """Tell the other ranks, as the step is compared, whether this one has a pass to plan from."""
        self._recover()
        self._before_step = self._engine.passes.gradient_passes
        self._comparison.propose_plan(wanted=self._in_force.wants_plan())

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """Plan if the ranks agreed to; then carry out the plan's step, if it is the step that is wanted."""
        self._in_force.begin_step(plans=self._comparison.agreed_to_plan)
        return super().step(settings_of, factor)

    def _say(self, text: str) -> None:
        """Log a line on one rank."""
        if self._together.process == 0:
            super()._say(text)

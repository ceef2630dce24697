"""Choose the driver of each pass: a plan that fits, or moves on demand; see what passes did that were recorded.

`_execution.plan_in_force` has the plan, and says which batches it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ps_core._extents import SegmentName
from ps_core._options import Options
from ps_core._plan import Plan
from ps_core._planner.search import Planned, Setup
from ps_core.engine._execution.driver_protocols import PassDriver
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.instruction_executor import Diverged
from ps_core.engine._execution.lower_home_slots import HomePlacement
from ps_core.engine._execution.measured_batches import MeasuredBatches
from ps_core.engine._execution.module_guards import called_part
from ps_core.engine._execution.on_demand_driver import OnDemandDriver
from ps_core.engine._execution.other_batches import OtherBatches
from ps_core.engine._execution.pass_estimates import PassEstimates
from ps_core.engine._execution.passes_without_plan import ResidentDriver
from ps_core.engine._execution.plan_driver import PlanDriver, fits_step, why_not_ready
from ps_core.engine._execution.plan_in_force import PlanInForce
from ps_core.engine._execution.plan_request import PlanRequest
from ps_core.engine._execution.unplanned_passes import (
    READ_OUTSIDE,
    LeftPlans,
    UnplannedPasses,
    too_many_passes,
)
from ps_core.engine._memory.reserved_bytes import bytes_to_reserve
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.speculative_steps import Stepping
from ps_core.engine._parameters.state_transitions import GradientPlace
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._support.log import log_line
from ps_core.engine._tracing.batch_shape import BatchShape, batch_of, within_a_module
from ps_core.engine._tracing.input_tensors import VALUES, comparable
from ps_core.engine._tracing.pass_recording import MOST_CALLS, PassRecording

_WATCHED_EVERY = 32
"""The non-model bytes of one in so many planned passes are measured, which costs time; evaluations count apart."""


class PlanScheduler:
    """Plan for one engine, and choose the driver of its passes."""

    def __init__(
        self, engine: Engine, setup: Setup, *, model_name: str, options: Options, cast: torch.dtype | None
    ) -> None:
        self._engine, self._model_name, self._setup = engine, model_name, setup
        self._estimates = PassEstimates(engine, model_name, cast, self._say)
        self._caps = options.cap_allocator and not engine.store.device.overcommits
        """True if the device's allocator is capped at the budget in passes by a plan."""
        self._homes = HomePlacement(engine)
        self._others, self._measured = OtherBatches(self._say), MeasuredBatches()
        self._unplanned = UnplannedPasses(self._say)
        self._left = LeftPlans(self._say)
        self._in_force = self._no_plan_yet(options)
        self._batch: BatchShape | None = None
        """The batch that the root module was called with; None for a pass that began elsewhere."""
        self._served: BatchShape | None = None
        """The batch of the last pass that a driver was chosen for."""
        self._part: BatchShape | None = None
        """The last call of a part of the model, or else the model's first one; None: the pass began elsewhere."""
        self._before_step = 0
        """Number of passes with gradients before this step's first."""
        self._seen: tuple[list[Any], list[Any], BatchShape] = [], [], BatchShape()
        """Shapes and types of the last call's tensors, the model's mode and other arguments, and their batch shape."""
        self._tried = False
        """True if the first pass was tried with fake tensors."""
        self._replayed = {True: 0, False: 0}
        """Number of passes that began by a plan, with gradients and without."""

    def _no_plan_yet(self, options: Options) -> PlanInForce:
        asking = PlanRequest(self._engine, self._model_name, self._setup, options)
        return PlanInForce(self._engine, asking, self._homes, self._others, self._measured, self._say)

    @property
    def training(self) -> bool:
        """Return True if the model has an optimizer."""
        return self._setup.training

    @property
    def moments(self) -> int:
        """Moments of the planned pass."""
        plan = self._in_force.plan
        return 0 if plan is None else len(plan.recording.moments)

    @property
    def planned(self) -> Planned | None:
        """Return the present plan, with its program."""
        plan = self._in_force.plan
        return None if plan is None else plan.planned

    @property
    def plan(self) -> Plan | None:
        """Return the instructions of the present plan."""
        return None if self.planned is None else self.planned.plan

    @property
    def planned_step_s(self) -> float:
        """Return the predicted seconds of a step; 0 without a plan."""
        return 0.0 if self.planned is None else self.planned.prediction.step_time_s

    @property
    def _passes_of_step(self) -> int:
        """Return the number of passes that have made gradients since the last step."""
        return self._engine.passes.gradient_passes - self._before_step

    # Passes.

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the shapes of the root module's arguments; trace and plan a first or a larger pass before it runs."""
        if not self._engine.store.synchronous:
            self._recover()
        if self._engine.stepping.groups and torch.is_grad_enabled():
            self._engine.stepping.check_pass()
        if (
            self._setup.training
            and self._engine.passes.recording is not None
            and torch._C._current_graph_task_id() == -1
        ):
            self._add_call(self._batch_of(module, args, kwargs))
            return
        self._batch = self._batch_of(module, args, kwargs)
        if not self._setup.training:
            self.maybe_replan()
            return
        plan = self._in_force.plan
        offloads = plan is not None and plan.moves_activations
        if (offloads or not self._tried) and not self._engine.resident and torch.is_grad_enabled():
            if self._estimates.possible and (not self._tried or self._begins_larger_step()):
                estimate = self._estimates.estimate(module, args, kwargs)
                if estimate is not None:
                    self._in_force.foresee(estimate, self._batch)
            self._tried = True  # only now: after an interrupt the next call tries again

    def _add_call(self, batch: BatchShape) -> None:
        """Note a further call in an open pass; the plan is left if it has no room for this call."""
        if self._served is None or len(self._served.later) >= MOST_CALLS:
            return
        served = self._served = replace(self._served, later=(*self._served.later, batch))
        self._measured.note_call(served)
        planned = self._in_force.batch
        if self._in_force.plan is not None and not planned.covers(served):
            overrun = len(served.later) <= len(planned.later) and self._others.note_larger_call()
            self._engine.passes.leave_plan(planned.difference(served), overrun=overrun)

    def before_part(self) -> None:
        """Note a call of another part, or with another batch, in a pass that began with a call."""
        call = None if self._part is None else called_part()
        if call is None or call == self._part:
            return
        self._part, recording = call, self._engine.passes.recording
        if self._served is not None and len(self._served.later) >= MOST_CALLS and recording is not None:
            recording.irregular = "parts of the model are called many times, with different shapes"
        self._add_call(call)

    def _begins_larger_step(self) -> bool:
        """Return True if a step begins with a batch larger than the plan's.

        On demand all activations would go to the host, which may be too small where a plan keeps some on the device.
        """
        starts, planned = self._engine.passes.recording is None and not self._passes_of_step, self._in_force.batch
        return starts and not planned.later and not planned.covers(self._batch)

    def _batch_of(self, module: nn.Module, args: Any, kwargs: Any) -> BatchShape:
        """Return the shape of a call's arguments; usually they are as in the call before."""
        key: list[Any] = []
        values: list[Any] = [module.training, *kwargs]
        known = True
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_nested:
                key.append((value.shape, value.dtype))
            elif value is None:
                values.append(None)
            elif issubclass(type(value), VALUES):
                values.append(comparable(value))
            else:
                known = False
        found: BatchShape | None = None
        if not known:
            found = batch_of(args, kwargs)
            key, values = [found.shapes, found.tokens], [*values, *found.values]
        if key != self._seen[0] or values != self._seen[1]:
            self._seen = key, values, replace(found or batch_of(args, kwargs), values=tuple(values))
        return self._seen[2]

    @defer_interrupts_installing
    def _recover(self) -> None:
        """Leave more bytes free from now on, if the device ran out of memory since the last pass."""
        store, missing_bytes = self._engine.store, self._engine.store.device.take_failed_bytes()
        if missing_bytes:
            self._batch = self._served = None  # a pass that broke off is not recorded
            self._engine.finish_pass()
            self._engine.passes.forget_refusal()
            self._request_free_bytes(bytes_to_reserve(missing_bytes, store.tiers[0].capacity_bytes))

    def _request_free_bytes(self, size_bytes: int) -> None:
        """Plan again with so many more bytes left free."""
        self._before_step = self._engine.passes.gradient_passes
        if not self._in_force.leave_free(size_bytes) and self._caps:
            self._caps = False
            self._engine.store.device.cap_allocator(None)
            self._say("no plan leaves more room, so PyTorch's allocator has no cap any more")

    def driver_for_pass(self, training: bool, *, backward: bool) -> PassDriver:
        """Choose the plan's driver where the plan serves the pass, else the on-demand driver."""
        engine, plan = self._engine, self._in_force.plan
        if backward and not engine.resident:
            engine.demand.expect(None)
            return engine.demand
        if engine.speculation is not None:
            engine.speculation.undo()
        self._served, self._part, self._batch = self._batch, self._batch, None
        if engine.resident:
            measured = self._measured.on_one_tier
            known = measured is not None and measured.covers(self._served)
            return ResidentDriver(tracked=self._is_new(training) or not known)
        if self._served is None and training and self._setup.training:
            self._served = self._part = called_part()
        if plan is None or (training and self._left.to_record):
            return self._on_demand(self._homes.move_down)
        if self._served is None and not within_a_module():
            return self._on_demand(self._homes.make_room_to_read)
        planned = self._in_force.batch
        may_be_unserved = self._served != planned or (not training and self._others.too_large)
        if may_be_unserved and (why := self._others.why_unserved(self._served, planned, training=training)):
            engine.counters.diverged(why)
            return self._on_demand(partial(self._free_for_unplanned, training))
        if engine.demand.fetched:
            engine.demand.finish()  # copies that had live aliases when the last pass ended
        passes = self._passes_of_step if training else 0
        if passes and not engine.holds_gradients():
            passes, self._before_step = 0, engine.passes.gradient_passes  # earlier gradients were forgotten
        trains = not training or self._setup.training
        why = "" if trains else "a backward pass of a model without an optimizer"
        why = why or why_not_ready(plan, engine.groups, engine.gradients.sums)
        if not why and self._homes.elsewhere and not self._homes.move_to_plan(plan):
            why = "memory that home slots have to be moved to has live aliases"
        if why:
            if training:
                if self._setup.training:
                    why = too_many_passes(passes + 1, self._setup.accumulate) or why
                self._left.note_refused(why)
            engine.counters.diverged(why)
            known = not self._in_force.estimated and not self._is_new(training)
            return self._on_demand(partial(self._free_for_unplanned, training), plan.nonmodel_bytes if known else None)
        if self._caps:  # not by an estimate, which misses what a device's libraries take for themselves
            engine.store.device.cap_allocator(
                None if self._in_force.estimated else engine.store.tiers[0].capacity_bytes
            )
        micro = plan.micro_segments
        segment = micro[min(passes, len(micro) - 1)] if training else SegmentName.EVAL
        tracked = self._is_watched(training)
        stepping = (engine.speculation or engine.stepping) if training else None
        return self._replay(plan, segment, tracked=tracked, stepping=stepping)

    def _replay(
        self, plan: EnginePlan, segment: SegmentName, *, tracked: bool = False, stepping: Stepping | None = None
    ) -> PlanDriver:
        """Return the driver of one segment."""
        engine = self._engine
        if plan.moves_activations:
            engine.activations.release_free()  # the plan has room for these
        return PlanDriver(
            plan, segment, engine.residency, engine.gradients, engine.counters, tracked=tracked, stepping=stepping
        )

    def _on_demand(self, free: Callable[[], None], nonmodel_bytes: int | None = None) -> OnDemandDriver:
        """Return the driver on demand; ``free`` frees memory for the pass, whose peak is expected to be as given.

        The driver cannot leave more room, so the allocator has no cap meanwhile.
        """
        self._engine.demand.expect(nonmodel_bytes)
        free()
        if self._caps:
            self._engine.store.device.cap_allocator(None)
        return self._engine.demand

    def _is_new(self, training: bool) -> bool:
        """Return True if the pass that begins now is to be measured for its arguments; see `MeasuredBatches.is_new`."""
        measured = self._measured
        if self._served is measured.last_known[training] and measured.unmeasured is None:
            return False  # as in most passes, at no further call
        return measured.is_new(self._served, training=training)

    def _is_watched(self, training: bool) -> bool:
        """Return True if the non-model bytes of a planned pass are counted."""
        self._replayed[training] += 1
        every = self._replayed[training] % _WATCHED_EVERY == 0
        return self._is_new(training) or self._in_force.estimated or every

    def _free_for_unplanned(self, training: bool) -> None:
        """Free as much memory for an unplanned pass as it would have without a plan, unless it needs less."""
        peak = None if training else self._others.peak_of_evaluation(self._served)
        if peak is None:
            self._homes.move_down()
            return
        self._engine.demand.expect(peak)
        self._homes.make_room_beside(peak)

    def forget_plan(self) -> None:
        """Drop the plan, because groups change; move home slots off the compute tier, for a first pass."""
        self._homes.move_down()
        self._in_force.forget()
        self._tried = False

    def plan_abandoned(self, *, needs_more: bool) -> None:
        """Note that a pass left the present plan; ``needs_more``: its rest takes more memory than was planned."""
        if self._in_force.plan is not None:
            self._homes.plan_abandoned(self._in_force.plan, needs_more=needs_more)

    def observe(self, recording: PassRecording) -> None:
        """Keep a recorded pass, if a plan is to be made from it."""
        passes, trains = self._engine.passes, self._setup.training and recording.training
        batch, self._served = self._served, None
        if self._in_force.none_yet:
            if passes.broke_off:
                self._tried = False  # the next pass is a first one again
                self._engine.store.ledger.note_foreseen(0)
            elif trains and not self._engine.resident:
                self._unplanned.note(recording, READ_OUTSIDE if batch is None else "")
        if batch is None:
            return
        self._note_measured(recording, batch)
        if not self._engine.resident:
            self._observe_batch(recording, batch, measured=passes.tracked and not passes.broke_off)
        elif not passes.tracked or passes.broke_off or not passes.budget.stayed_within(recording):
            return
        elif recording.training is self._setup.training:
            whole = not trains or self._passes_of_step >= self._setup.accumulate
            self._measured.note_on_one_tier(batch, whole=whole)

    def _note_measured(self, recording: PassRecording, batch: BatchShape) -> None:
        """Note that a pass by the plan was measured to its end, or that an evaluation took more than was planned."""
        passes = self._engine.passes
        if recording.overrun:
            if recording.training is not self._setup.training:
                self._others.note_too_large(batch)
            return
        by_plan = passes.tracked and passes.driver.follows_plan
        if by_plan and not passes.broke_off and passes.budget.stayed_within(recording):
            self._measured.note_measured(batch, training=recording.training)

    def _observe_batch(self, recording: PassRecording, batch: BatchShape, *, measured: bool) -> None:
        """Keep a recorded pass that began with a call; ``measured``: its non-model bytes are known to the end."""
        passes, in_force = self._engine.passes, self._in_force
        if measured and not passes.refused and recording.training and not recording.ends_backward:
            self._others.note_dropped(recording, batch)
        evaluated = recording.training is not self._setup.training
        if (recording.overrun and not evaluated) or (recording.training and in_force.is_wrong(recording)):
            in_force.plan_roomier()
        if not measured:
            return
        served = in_force.serves(batch)
        if (served or in_force.estimated) and recording.left_plan and recording.makes_gradients:
            why = too_many_passes(self._passes_of_step, self._setup.accumulate)
            why = why or self._engine.counters.last_divergence
            self._left.note(passes.gradient_passes, why, several=bool(batch.later))
        if not recording.complete:
            return
        if evaluated:
            if not isinstance(passes.driver, PlanDriver):
                self._others.note_evaluation(in_force.plan, recording, batch, self._engine.constant_bytes)
        elif (self._left.note_recorded() or not served) and (
            not batch.later or self._others.confirms(recording, in_force.source)
        ):
            in_force.plan_next(recording, batch)

    # Steps.

    def step(self, settings_of: SettingsOf, factor: float) -> bool:
        """Carry out the plan's step, if that is the requested step."""
        plan, homes = self._in_force.plan, self._homes
        if homes.displaced and (plan is None or not homes.move_to_plan(plan)):
            homes.move_down()
        engine = self._engine
        if plan is None or homes.elsewhere or not fits_step(plan, engine.groups):
            if not engine.resident and not engine.updater.has_room():
                homes.make_room_to_step()
            return False
        replay = self._replay(plan, SegmentName.STEP)
        for group in engine.groups:
            if group.fixed_tier is None:
                continue
            if any(record.gradient is not GradientPlace.NONE for record in group.tensors):
                engine.updater.step_one(group, settings_of, factor)
        try:
            replay.step(settings_of, factor)
        except BaseException as why:
            engine.demand.adopt(engine.groups)
            engine.demand.finish()
            homes.plan_abandoned(plan, needs_more=False)
            if not isinstance(why, Diverged):
                raise
            engine.counters.diverged(str(why))
            return False
        return True

    # Planning.

    def maybe_replan(self) -> None:
        """Make a plan, if a pass was recorded that has none."""
        if not self._engine.store.synchronous:
            self._recover()  # in a loop that never calls the model itself
        self._before_step = self._engine.passes.gradient_passes
        if self._in_force.found is not None:
            self._in_force.replan()
        elif self._others.in_a_row:
            self._others.end_row()

    def _say(self, text: str) -> None:
        """Log a line about the model."""
        log_line(f"{self._model_name}: {text}")

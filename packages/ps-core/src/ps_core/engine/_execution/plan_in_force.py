"""Make plans from passes that were estimated or recorded, and keep the one in force.

[Note: what a plan is good for]
A plan is made from one recorded pass. It serves every batch whose tensors are no larger, training and evaluation alike.
A larger batch is served on demand, recorded, and planned anew. So the present plan is always that of the largest batch
seen. `_execution.other_batches` says what becomes of batches of another structure.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ps_core._errors import DoesNotFit
from ps_core.engine._execution.emulated_machine import SMALL_COMPUTER
from ps_core.engine._execution.engine import Engine
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.lower_home_slots import HomePlacement
from ps_core.engine._execution.measured_batches import MeasuredBatches
from ps_core.engine._execution.other_batches import OtherBatches
from ps_core.engine._execution.plan_request import PlanRequest
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.first_pass import begins_like_estimate, matches_estimate
from ps_core.engine._tracing.pass_recording import PassRecording, Recorded

_MENTIONED = 0.1
"""The fraction of a step that another option must save to be mentioned."""


class PlanInForce:
    """Hold the plan that one engine follows, what it was made from, and the pass that is to be planned next."""

    def __init__(
        self,
        engine: Engine,
        asking: PlanRequest,
        homes: HomePlacement,
        others: OtherBatches,
        measured: MeasuredBatches,
        say: Callable[[str], None],
    ) -> None:
        """Begin without a plan; ``say`` logs a line about the model."""
        self._engine, self._asking, self._homes, self._say = engine, asking, homes, say
        self._others, self._measured = others, measured
        self.plan: EnginePlan | None = None
        self.batch = BatchShape()
        """The batch that the plan was made for."""
        self.source: Recorded | None = None
        """The pass that the plan was made from."""
        self.found: Recorded | None = None
        """A recorded pass that a plan is to be made from."""
        self.estimated = False
        """True if the plan is from fake tensors; the pass that it serves is recorded all the same."""
        self.recorded = False
        """True if the plan is from a pass that ran."""
        self._spare_bytes = 0
        """Bytes left free beyond the peak of non-model bytes, since the device ran out of memory."""

    @property
    def none_yet(self) -> bool:
        """Return True if there is neither a plan, nor a pass that one is to be made from."""
        return self.plan is None and self.found is None

    def serves(self, batch: BatchShape) -> bool:
        """Return True if there is a plan from a pass that ran, for this batch or a larger one."""
        return self.plan is not None and not self.estimated and self.batch.covers(batch)

    def is_wrong(self, recording: PassRecording) -> bool:
        """Return True if a training pass differs from the estimate in force; do not ask if it broke off."""
        if self.plan is None or not self.estimated or not recording.irregular:
            return False
        return not begins_like_estimate(recording, self.plan.recording)

    def plan_next(self, recording: PassRecording, batch: BatchShape) -> None:
        """Keep a recorded pass, for `replan` to make a plan from."""
        self.found = recording, batch

    def forget(self) -> None:
        """Drop the plan and all that it was made from, or was to be."""
        self.plan = self.found = self.source = None
        self.estimated = self.recorded = False
        self._others.begin_plan()
        self._measured.begin_plan(None)

    def foresee(self, recording: PassRecording, batch: BatchShape) -> None:
        """Plan a pass that was estimated; if it does not fit, it runs on demand."""
        try:
            larger, before, done = self.recorded, self.plan, self._serve_both(recording, batch)
            self.estimated = self.adopt(recording, batch) if done is None else done
            if larger and self.plan is not before:
                self._engine.counters.replanned()
        except DoesNotFit as error:
            store = self._engine.store
            if error.tier == store.tiers[0].name:
                store.ledger.note_foreseen(error.needed_bytes)
            self._say("does not fit as estimated; this pass runs on demand and is recorded")

    def leave_free(self, size_bytes: int) -> bool:
        """Plan again with so many more bytes left free; return False if no plan does so: the one in force stays."""
        self._spare_bytes += size_bytes
        try:
            self._plan_again()
        except DoesNotFit:
            self._spare_bytes -= size_bytes
            return False
        return True

    def _plan_again(self) -> None:
        self.found, self.estimated = self.found or self.source, False
        self.replan()

    def plan_roomier(self) -> None:
        """Plan anew after a pass that took more than was planned."""
        if self.source is not None and not self.estimated:
            roomier = self._others.beside_dropped(*self.source)
            if roomier.moments != self.source[0].moments:
                self.found = self.source
                return
        self.plan, self.estimated = None, False  # so the next pass is served and recorded on demand

    def replan(self) -> None:
        """Make a plan from the recorded pass that has none, if there is one."""
        if self.found is None or all(group.pinned for group in self._engine.groups):
            return
        recording, batch = self.found
        self.found = None
        if self.estimated and self.plan is not None and matches_estimate(recording, self.plan.recording):
            self._end_replan()
            return
        before, done = self.plan, self._serve_both(recording, batch)
        if done is None:
            if before is not None and not self.estimated and not self._others.is_due(batch, self.batch):
                return
            done = self._adopt_roomier(recording, batch)
        if not done:
            self.found = recording, batch  # memory has live aliases: try again after the next pass
            return
        if self.recorded and self.plan is not before:
            self._engine.counters.replanned()
        self._end_replan()

    def _adopt_roomier(self, recording: PassRecording, batch: BatchShape) -> bool:
        """Plan as `adopt` does, with room for a forward pass whose graph was dropped if such a plan fits."""
        roomier = self._others.beside_dropped(recording, batch)
        if roomier is not recording:
            try:
                return self.adopt(roomier, batch)
            except DoesNotFit:
                self._others.forget_dropped()
        return self.adopt(recording, batch)

    def _end_replan(self) -> None:
        """Note that the plan is from a pass that ran: it will stay, so what the home slots left is given back."""
        self.estimated, self.recorded = False, True
        self._engine.store.device.trim_host()

    def _serve_both(self, recording: PassRecording, batch: BatchShape) -> bool | None:
        """Make one plan serve such passes and those before; return False if that is not possible now, None if never."""
        if self.source is None or batch.replaces(self.batch):
            return None
        source, before = self.source
        both, batches = self._others.join(source, recording), before.beside(batch)
        if both is None:
            return None
        if both.moments == source.moments:  # there is room already
            self.batch, self.source = batches, (both, batches)
            return True
        try:
            return self.adopt(both, batches)
        except DoesNotFit:
            self._others.note_failure()
            return None

    def adopt(self, recording: PassRecording, batch: BatchShape) -> bool:
        """Plan from these moments and move everything to the plan's places; return False if it is not possible now."""
        started = time.monotonic()
        plan = self._asking.find(recording, batch, self._spare_bytes)
        if not self._put(plan, recording, batch):
            return False
        self._others.begin_plan()
        self._measured.begin_plan(batch, training=recording.training)
        self._say(
            f"planned {len(plan.recording.moments)} moments of {len(plan.order)} groups in "
            f"{time.monotonic() - started:.1f} s{self._prediction(plan)}"
        )
        return True

    def _prediction(self, plan: EnginePlan) -> str:
        """Return the rest of the line that tells of a plan; empty where it is not known how fast the computer is."""
        machine, planned = self._asking.machine, plan.planned
        if machine is SMALL_COMPUTER:
            return ""
        told = f"; {planned.prediction.step_time_s:.3g} s a step are predicted for {machine.name}"
        saved = self._asking.saved_by_early_steps(planned)
        if saved > _MENTIONED:
            told += f", {saved:.0%} less with Options(step='in_backward'), which excludes clipping"
        return told

    @defer_interrupts_installing
    def _put(self, plan: EnginePlan, recording: PassRecording, batch: BatchShape) -> bool:
        """Put a plan in force; return False, with nothing done, while memory has live aliases."""
        if self._engine.speculation is not None:
            self._engine.speculation.free()  # the new plan says for how much there is room
        if not self._homes.move_to_plan(plan):
            return False
        self._engine.store.ledger.note_foreseen(0)
        self.plan, self.batch, self.source = plan, batch, (recording, batch)
        return True

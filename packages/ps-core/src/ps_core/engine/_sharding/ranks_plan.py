"""Keep the plan that all ranks follow: make it from what they tell each other that they estimated or recorded.

See [Note: one plan] in `plan_agreement`.
"""

from __future__ import annotations

from typing import Any

from ps_core._errors import DoesNotFit
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.plan_in_force import PlanInForce
from ps_core.engine._sharding.plan_agreement import RanksPlanRequest
from ps_core.engine._tracing.batch_shape import BatchShape
from ps_core.engine._tracing.first_pass import matches_estimate
from ps_core.engine._tracing.pass_recording import PassRecording, Recorded

_PLANS_AT_ONCE = 8
"""Number of plans that ranks make as soon as there is a new recording; then they wait for 2, 4, 8 ... steps."""


class RanksPlan(PlanInForce):
    """Hold the plan that this rank follows with the others; the same on all ranks."""

    _asking: RanksPlanRequest

    _plans_made = 0
    """Number of times that the ranks planned from recorded passes; the same on all ranks."""
    _steps_until_plan = 0
    """Steps before they tell each other again: ranks that never do the same must not plan in every step."""
    _mine: Recorded | None = None
    """This rank's part of an estimated plan: its estimate, or the pass that ran since."""
    _refused: Recorded | None = None
    """The recording that no plan was found for."""

    def forget(self) -> None:
        """Drop the plan, because groups change on all ranks."""
        super().forget()
        self._plans_made = self._steps_until_plan = 0
        self._mine = self._refused = None

    def _put(self, plan: EnginePlan, recording: PassRecording, batch: BatchShape) -> bool:
        """Follow the plan, as all ranks do. This one may be unable to move its shards to the plan's places now."""
        self._homes.expect_move()
        self.plan, self.batch, self.source = plan, batch, (recording, batch)
        self._homes.move_to_plan(plan)
        return True

    def _plan_again(self) -> None:
        assert self.source is not None, "there is a plan"
        self.adopt(*self.source)
        self._engine.counters.replanned()

    def foresee_together(self, estimate: PassRecording | None, batch: BatchShape, *, alike: bool) -> None:
        """Plan the first pass from what the ranks estimated; ``alike``: rank 0 did so for all of them."""
        self.found = None
        ranks = self._asking.exchange([] if estimate is None else [(estimate, batch)], "the estimated pass")
        if alike:
            estimate = self._asking.take_estimate(ranks)
        self._mine = None if estimate is None else (estimate, batch)
        self._plan_from(ranks)
        self.estimated = self.plan is not None

    def note_pass(self, recording: PassRecording, batch: BatchShape, *, left_plan: bool) -> None:
        """Keep a recorded pass, if the plan is not for such passes."""
        if self.estimated and self._mine is not None:
            wanted = not matches_estimate(recording, self._mine[0])
            self._mine = recording, batch
        else:
            wanted = self.plan is None or left_plan or not self.batch.covers(batch)
        if wanted:
            self.plan_next(recording, batch)

    def wants_plan(self) -> bool:
        """Return True if this rank has a new recording, and it is time for a plan; called once a step."""
        self._steps_until_plan = max(0, self._steps_until_plan - 1)
        return self.found is not None and not self._steps_until_plan

    def begin_step(self, *, plans: bool) -> None:
        """Begin a step; ``plans``: the ranks agreed to plan from what they recorded."""
        if plans:
            self.replan()
        elif self.estimated:
            self._end_replan()
        self.estimated, self._mine = False, None

    def replan(self) -> None:
        """Plan from what the ranks recorded; wait longer for the next time after many plans."""
        kept = self._mine if self.estimated else self.source
        mine = [each for each in (None if kept is self.found else kept, self.found) if each is not None]
        self._plans_made += 1
        self._steps_until_plan = 2 ** max(0, self._plans_made - _PLANS_AT_ONCE + 1)
        self.found = None
        self._plan_from(self._asking.exchange(mine, "the recorded pass"))
        self._end_replan()

    def _plan_from(self, ranks: list[dict[str, Any]]) -> None:
        """Follow a plan of what the ranks told each other, if there is one."""
        combined = self._asking.combine(ranks)
        if combined is None or combined in (self.source, self._refused):  # the same on all ranks
            return
        try:
            self.adopt(*combined)
            if self.recorded:
                self._engine.counters.replanned()
        except DoesNotFit as error:
            self._refused = combined
            self._say(f"no plan fits, so ranks ask each other for weights: {error}")

"""Run the driver of each pass, and change to another one where a plan does not fit."""

from __future__ import annotations

import torch

from ps_core._errors import DeviceOutOfMemory, DoesNotFit
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.driver_protocols import PassDriver, Scheduler
from ps_core.engine._execution.instruction_executor import Diverged
from ps_core.engine._execution.nonmodel_memory import NonModelMemory
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._support.counters import Counters
from ps_core.engine._tracing.pass_recording import PassRecording


class PassDriving:
    """The driver of one engine's present pass, or of the last one."""

    def __init__(self, parts: Components, counters: Counters, scheduler: Scheduler, nonmodel: NonModelMemory) -> None:
        self._groups, self._counters = parts.residency.groups, counters
        self._scheduler, self._nonmodel = scheduler, nonmodel
        self._recording: PassRecording | None = None
        """The recording of the present pass; None between passes."""
        self.demand = parts.demand
        """The driver of passes without a plan."""
        self.driver: PassDriver = self.demand
        self.followed = False
        """True if the last pass left its plan, and a driver went on that takes part in the plan's collectives."""
        self.deferred: PassDriver | None = None
        """The driver of an ended pass whose collectives wait for memory; None: there is none."""

    @property
    def by_plan(self) -> bool:
        """Return True if the pass follows a plan."""
        return isinstance(self.driver, PlanDriver)

    def begin_pass(self, recording: PassRecording, *, backward: bool, resident: bool) -> None:
        """Choose the driver of a pass that begins; ``resident``: nothing ever moves."""
        self._recording, self.followed = recording, False
        if not resident:
            self.driver = self.demand  # ends the pass if an error comes before its driver is chosen
        self.driver = self._scheduler.driver_for_pass(recording.training, backward=backward)

    def begin_moment(self, records: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Begin a moment, by demand if the plan has none that is like it."""
        recorder = self._counters.recorder
        if recorder is not None:
            recorder.end_moment()
        try:
            self.driver.begin(records, gains, name)
        except Diverged as why:
            self.leave_plan(why)
            if recorder is not None:
                recorder.end_moment()
            self.driver.begin(records, gains, name)
        if recorder is not None:
            recorder.begin_moment(name)

    def place_gradient(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient where memory is reserved for it; return False if there is none."""
        try:
            return self.driver.place_gradient(record, gradient)
        except Diverged as why:
            self.leave_plan(why)
            return self.driver.place_gradient(record, gradient)

    def leave_plan(self, why: Diverged) -> None:
        """Leave the plan for the rest of the pass."""
        replay, self.driver = self.driver, self.demand
        assert isinstance(replay, PlanDriver), "only plans are left"
        self._counters.diverged(str(why))
        with torch.no_grad():
            try:
                self.driver = replay.abandon() or self.demand
                self._scheduler.plan_abandoned()
            finally:
                self.followed = self.driver is not self.demand
                if not self.followed:
                    self.demand.adopt(self._groups)
                    if self._recording is not None:
                        self._recording.regular = False
                self._nonmodel.start()

    def end_pass(self, recording: PassRecording, broken_by: type[BaseException] | None) -> None:
        """Return every chunk to its home slot; ``broken_by``: the exception that ended the pass."""
        self._recording = None
        if self._counters.recorder is not None:
            self._counters.recorder.end_moment()
        with torch.no_grad():
            try:
                self.driver.finish()
            except Diverged as why:
                recording.regular = False
                self.leave_plan(why)
                self._end_without_plan(broken_by)
            except BaseException as why:  # out of memory, say: the plan is left, or its home slots stayed lent
                if self.by_plan:
                    recording.regular = False
                    self.leave_plan(Diverged(str(why)))
                    self._end_without_plan(broken_by)
                elif self._defer_collectives(why, broken_by):
                    return
                raise

    def _end_without_plan(self, broken_by: type[BaseException] | None) -> None:
        try:
            self.driver.finish()
        except (DeviceOutOfMemory, DoesNotFit) as why:
            if not self._defer_collectives(why, broken_by):
                raise

    def _defer_collectives(self, why: BaseException, broken_by: type[BaseException] | None) -> bool:
        """Keep the driver for `run_deferred_collectives`, if memory was short for its collectives.

        Return True if the caller must not raise ``why``: another exception ended the pass, and is raised. That one
        keeps the pass's activations alive.
        """
        if not isinstance(why, DeviceOutOfMemory | DoesNotFit) or self.driver is self.demand:
            return False
        self.deferred = self.driver
        return broken_by is not None

    def run_deferred_collectives(self) -> None:
        """Run the collectives for which memory was short when their pass ended: the other ranks wait for them."""
        if self.deferred is None:
            return
        with torch.no_grad():
            self.deferred.finish()
        self.deferred = None

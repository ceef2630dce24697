"""Track a model's pass, its moment and its driver; leave a plan that does not fit.

A *pass* begins with the first use of a parameter. It ends with backward, with an evaluation, or before work that cannot
belong to it. Between passes every chunk is in its home slot, except copies with live aliases.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch.autograd import Variable

from ps_core._errors import DeviceOutOfMemory, DoesNotFit
from ps_core.engine._devices.hide_from_modes import dispatch_modes, function_modes, modes_are_off, modes_off
from ps_core.engine._execution.build_components import Components
from ps_core.engine._execution.driver_protocols import PassDriver, Scheduler
from ps_core.engine._execution.instruction_executor import Diverged
from ps_core.engine._execution.nonmodel_memory import NonModelMemory
from ps_core.engine._execution.pass_budget import Excess, PassBudget
from ps_core.engine._execution.pass_threads import FORWARD, PassThreads
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._parameters.errors import check_not_reentrant
from ps_core.engine._parameters.param_state import ParamGroup, ParamState, has_saved
from ps_core.engine._parameters.saved_tensors import free_broken_backward, in_checkpoint, recomputing
from ps_core.engine._support.counters import Counters
from ps_core.engine._support.interrupts import defer_interrupts, install, uninstall
from ps_core.engine._tracing.input_tensors import tensors_of
from ps_core.engine._tracing.pass_recording import (
    ENDED_IN_BACKWARD,
    LEFT_PLAN,
    MOST_CALLS,
    MomentRecord,
    PassRecording,
    held_after,
)

_INDEX, _GRADS = attrgetter("index"), attrgetter("grads")
_graph_task = torch._C._current_graph_task_id
"""Return the number of the backward pass that this thread works for; -1: there is none."""
_MOST_MOMENTS = 4096
"""After so many moments of a pass, the next call of a part of the model begins another pass."""


class PassTracker:
    """Track the passes of one engine."""

    def __init__(
        self,
        parts: Components,
        records: list[ParamState],
        counters: Counters,
        constant_bytes: int,
        scheduler: Scheduler,
    ) -> None:
        self._residency, self._gradients = parts.residency, parts.gradients
        self._store, self._groups, self._records = parts.residency.store, parts.residency.groups, records
        self._record_of = {record.index: record for record in records}
        self._counters = counters
        self._resident = self._store.resident
        self._task = -1
        """Autograd's number of the running backward pass."""
        self.threads = PassThreads()
        self._around = -1
        """The backward pass in which the present pass began its forward (in a hook); -1: none."""
        self._ended_in_backward = False
        """True if a hook ended a pass while its backward went on, and no forward pass began since."""
        self.nonmodel = NonModelMemory(self._store, parts.residency.owners, constant_bytes)
        self.budget = PassBudget(self._store, self._groups, self.nonmodel)
        self.demand = parts.demand
        self.driver: PassDriver = self.demand
        self.scheduler = scheduler
        self.moment = 0
        """Serial number of the moment; never the same in forward and in backward."""
        self.outside = True
        """True if the root module's forward is not running: memory that a call returns belongs to the caller."""
        self.evaluates = False
        """True while the root module's forward runs without a parameter or an input that requires a gradient."""
        self.gradient_passes = 0
        """Number of training passes with gradients so far."""
        self.broke_off = False
        """True if an exception ended the last pass; `finish` sets it."""
        self.followed = False
        """True if the last pass left its plan, and a driver went on that takes part in the plan's collectives."""
        self.deferred: PassDriver | None = None
        """The driver of an ended pass whose collectives wait for memory; None: there is none."""
        self.recording: PassRecording | None = None
        """The recording of the present pass; None between passes."""
        self.current: MomentRecord | None = None
        """The present moment; None between passes, and before a pass's first."""
        self.observer: Callable[[MomentRecord, bool], None] | None = None
        """See `observe`."""
        self.before_moments: list[Callable[[], None]] = []
        """Called, and removed, as soon as the pass has a moment."""

    def observe(self, observer: Callable[[MomentRecord, bool], None] | None) -> None:
        """Call ``observer`` as each moment ends, with True for a pass's first; None: call nothing."""
        self.observer = observer

    @property
    def tracked(self) -> bool:
        """Return True if non-model bytes are counted in this pass."""
        return self.driver.tracked or self.observer is not None

    @property
    def refused(self) -> bool:
        """Return True if the last pass took too much memory: the next one raises `DoesNotFit`."""
        return self.budget.late is not None

    def forget_refusal(self) -> None:
        """Refuse the next pass no more: the device ran out of memory in the last one, which the user knows."""
        self.budget.forget_late()

    def add_records(self, records: list[ParamState]) -> None:
        """Track parameters that were added to the model; called between passes."""
        self._records.extend(records)
        self._record_of.update({record.index: record for record in records})

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor among non-model bytes, although no operator was seen to make it."""
        if self.tracked and self.recording is not None:
            self.nonmodel.count(tensor)

    # The root module's forward.

    def end_open(self, inputs: Any) -> None:
        """End an open pass if the forward with these ``inputs`` cannot belong to it.

        The inputs were made while the pass was open, and are not counted.
        """
        recording, task = self.recording, _graph_task()
        if task == -1:
            if recording is not None:  # maybe of a backward pass that raised before it used a parameter
                free_broken_backward()
            self._task = -1  # even if an earlier backward pass broke off
            if self.deferred is not None:
                self._run_deferred_collectives()
        if recording is not None:
            in_backward = task not in (-1, self._around) and task == self._task and not recomputing()
            if in_backward or (self.current is not None and self.current.backward) or not has_saved(self._records):
                self.finish()
                for tensor in tensors_of(inputs):
                    self.nonmodel.forget(tensor)

    def enter_forward(self, *, evaluates: bool) -> None:
        """Begin the root module's forward, behind `end_open`; ``evaluates``: as the attribute says."""
        self.evaluates = evaluates
        task = _graph_task()
        if self.recording is None:
            self._begin(backward=False)
        elif self.driver.for_rest is not None:
            self.recording.irregular = "weights are read outside of the model before it is called"
            self.driver = self.driver.for_rest(torch.is_grad_enabled(), False)
        elif task != -1 or not self.scheduler.training or self.recording.calls >= MOST_CALLS:
            self.recording.irregular = "the model is called within backward, or many times before backward"
        else:
            self.recording.calls += 1
        if task not in (-1, self._task) and not recomputing():
            self._around = task
        self.outside = False
        self._counters.enter_phase("forward")

    def abort_forward(self) -> None:
        """Note that an exception ended the root module's forward."""
        self.outside, self.evaluates = True, False

    def end_forward(self) -> None:
        """End the root module's forward."""
        self.outside = True
        within_backward = _graph_task() not in (-1, self._around)
        self._counters.enter_phase("backward" if within_backward else "")
        evaluated = not torch.is_grad_enabled() or (self.evaluates and not has_saved(self._records))
        self.evaluates = False
        if evaluated and self.recording is not None and not within_backward:
            self._finish_unless_backward_comes(self.recording)

    def _finish_unless_backward_comes(self, recording: PassRecording) -> None:
        """End the pass after a call without gradients, unless that was made in a training pass that goes on."""
        several = self.scheduler.training and recording.training and recording.calls < MOST_CALLS
        if not several or recording.ends_backward or not has_saved(self._records):
            self.finish(strict=True)

    # Moments.

    def attach(self) -> None:
        """Find the pass that the present use of a parameter belongs to, or begin one."""
        task, threads = _graph_task(), self.threads
        if task == self._around:
            task = -1
        inside, same = threads.inside, task == self._task and self.recording is not None
        if same and (task != -1 or not inside or inside.get(FORWARD) == get_ident()):
            return
        if inside or threads.backward:
            threads.check("use of a parameter") if task == -1 else threads.check_backward()
        if task == -1:
            self._task = -1
        if self._task not in (-1, task):
            check_not_reentrant()
            self.finish()  # this backward runs within another one, which goes on later in a pass of its own
        if self.recording is None:
            self._begin(backward=task != -1)
        if task not in (-1, self._task):
            self._task = task
            if self.driver.for_rest is not None:
                self.driver = self.driver.for_rest(True, True)
            self.moment += 1  # no moment is both forward and backward
            self._counters.enter_phase("backward")
            reports_end = partial(self._backward_done)
            threads.backward.clear()
            threads.backward[get_ident()] = task, weakref.ref(reports_end)
            Variable._execution_engine.queue_callback(reports_end)

    def begin_moment(self, records: list[ParamState], gains: list[ParamGroup]) -> None:
        """End the present moment, and begin one that reads these parameters and receives gradients of these groups."""
        recording = self.recording
        assert recording is not None, "there is a pass"
        if self._residency.exposed.bounds:
            self._residency.exposed.check(ended=True)
        backward = _graph_task() not in (-1, self._around)
        reads: dict[ParamGroup, None] = {}
        for record in records:
            reads[record.group] = None
        try:
            held = self._close_moment()
            if not backward and self.current is not None and self.current.backward:
                recording.irregular = "a parameter is used outside of backward after backward began"
            first = next(iter(reads or gains)).tensors[0]
            moment = MomentRecord(
                backward,
                tuple(map(_INDEX, reads)),
                tuple(map(_INDEX, gains)),
                tuple(map(_INDEX, held)),
                f"{'backward' if backward else 'forward'} of {first.name}",
            )
            recording.moments.append(moment)
            self.current = moment
            self.moment += 1
            with torch.no_grad():
                if self.nonmodel.counting:
                    if in_checkpoint() or not recording.training:
                        self._store.ledger.note_checkpointing_saves_nothing()
                    with self.nonmodel.paused():
                        self._drive(records, gains, moment.name)
                else:
                    self._drive(records, gains, moment.name)
        except DoesNotFit:
            if self.outside and not backward:
                self.finish()  # no call of the root module is on, which would do so
            raise
        for group in reads:
            group.last_read_moment = self.moment
        for group in gains:
            group.last_grad_moment = self.moment
        while self.before_moments:
            self.before_moments.pop(0)()

    def before_part(self) -> None:
        """Look at a use of a parameter outside of the root module's call, behind `attach`.

        Nothing tells when the last call of a part ends. So an evaluation ends where training begins, and both end after
        many moments.
        """
        recording = self.recording
        if recording is None or _graph_task() not in (-1, self._around):
            return
        trains = torch.is_grad_enabled() and not recording.training
        if trains or (len(recording.moments) >= _MOST_MOMENTS and not has_saved(self._records)):
            self.finish()
            self._begin(backward=False)
        self.scheduler.before_part()

    def _drive(self, records: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        recorder = self._counters.recorder
        if recorder is not None:
            recorder.end_moment()
        try:
            self.driver.begin(records, gains, name)
        except Diverged as why:
            self.diverge(why)
            if recorder is not None:
                recorder.end_moment()
            self.driver.begin(records, gains, name)
        if recorder is not None:
            recorder.begin_moment(name)

    @defer_interrupts
    def leave_plan(self, why: str, *, overrun: bool) -> None:
        """Leave the plan before a further call of the root module; ``overrun``: plan the next such pass anew."""
        if (dispatch_modes() or function_modes()) and not modes_are_off():
            with modes_off():
                self.leave_plan(why, overrun=overrun)
        elif isinstance(self.driver, PlanDriver) and self.recording is not None:
            self.recording.overrun = overrun
            self.diverge(Diverged(why), needs_more=True)

    def diverge(self, why: Diverged, *, needs_more: bool = False) -> None:
        """Leave the plan for the rest of the pass; ``needs_more``: that takes more memory than was planned."""
        replay, self.driver = self.driver, self.demand
        assert isinstance(replay, PlanDriver), "only plans are left"
        self._counters.diverged(str(why))
        with torch.no_grad():
            try:
                self.driver = replay.abandon() or self.demand
                self.scheduler.plan_abandoned(needs_more=needs_more)
            finally:
                self.followed = self.driver is not self.demand
                if not self.followed:
                    used = () if self.current is None else (*self.current.reads, *self.current.grad_groups)
                    present = [self._groups[index] for index in used]
                    self.demand.adopt(self._groups, present, partial(self.scheduler.plan_abandoned, needs_more=True))
                    if self.recording is not None:
                        self.recording.irregular = LEFT_PLAN
                self.nonmodel.start()

    def _close_moment(self, excess: Excess = Excess.RAISE) -> list[ParamState]:
        """End the present moment; return the parameters with live aliases, if the pass is recorded."""
        moment = self.current
        if moment is None:
            return []
        for record in self._gradients.pending_overwrites() if self._gradients.pending else ():
            if self.moment in (
                record.group.last_read_moment,
                record.group.last_grad_moment,
            ) and self._gradients.write_over_weight(record):
                moment.grads[record.index] = None
        if self.tracked:
            planned = isinstance(self.driver, PlanDriver)
            if self.budget.is_exceeded(moment, self.driver, excess, planned=planned):
                assert self.recording is not None, "the moment is of a pass"
                self.recording.overrun = True
                self.diverge(Diverged(f"{moment.name} takes more than was planned"), needs_more=True)
                if excess is Excess.RAISE and not self.recording.training:
                    self.budget.check_without_plan(moment, self.driver)
        if self.observer is not None and self.recording is not None:
            self.observer(moment, len(self.recording.moments) == 1)
        return held_after(moment, self._groups, self._record_of) if self.nonmodel.counting else []

    # Begin and end a pass.

    def _begin(self, *, backward: bool) -> None:
        if (dispatch_modes() or function_modes()) and not modes_are_off():
            with modes_off():
                self._begin(backward=backward)
            return
        if self._residency.exposed.bounds:
            self._residency.exposed.check(ended=True)
        if self._residency.tampered:
            self._residency.check_tampered()
        if self.budget.late is not None:
            self.budget.raise_late()
        install()
        self._store.ledger.begin_pass(self.nonmodel.free_broken_pass() if self.broke_off else 0)
        training = backward or (torch.is_grad_enabled() and not self.evaluates)
        irregular = ""
        if backward:
            goes_on = self._ended_in_backward
            irregular = ENDED_IN_BACKWARD if goes_on else "backward runs in the graph of an earlier pass"
        self._ended_in_backward = self._ended_in_backward and backward
        self.recording, self.followed = PassRecording(irregular=irregular, training=training), False
        if not self._resident:
            self.driver = self.demand  # ends the pass if an error comes before its driver is chosen
        self.driver = self.scheduler.driver_for_pass(training, backward=backward)
        self.current = None
        if self._resident:
            self.current = MomentRecord(False, (), (), name="a pass")
            self.recording.moments.append(self.current)
            if self._counters.recorder is not None:
                self._counters.recorder.begin_moment(self.current.name)
        if self.tracked:
            self.nonmodel.start_pass()

    @defer_interrupts
    def _backward_done(self) -> None:
        if (dispatch_modes() or function_modes()) and not modes_are_off():
            with modes_off():
                self._backward_done()
            return
        self._task = -1
        self.threads.backward.clear()
        if self.recording is None:
            return
        with torch.no_grad():
            for record in self._gradients.pending_overwrites() if self._gradients.pending else ():
                if record.busy:
                    continue
                if not self._resident and self.moment not in (
                    record.group.last_read_moment,
                    record.group.last_grad_moment,
                ):
                    self.begin_moment([], [record.group])
                if self._gradients.write_over_weight(record):
                    self.recording.moments[-1].grads[record.index] = None
            if self._gradients.pending:
                self._gradients.end_overwrites()
        self.finish(strict=True)

    def finish(self, *, strict: bool = False) -> None:
        """End the pass, if one is open. ``strict``: it succeeded, so its last moment must keep to the budget too."""
        if (dispatch_modes() or function_modes()) and not modes_are_off():
            with modes_off():
                self.finish(strict=strict)
            return
        self._task = self._around = -1
        if self._residency.exposed.bounds:
            self._residency.exposed.check(ended=True)
        recording = self.recording
        if recording is None:
            if self.deferred is not None:
                self._run_deferred_collectives()
            self.nonmodel.stop()
            return
        broken_by, in_backward = sys.exc_info()[0], self.current is not None and self.current.backward
        goes_on = in_backward and _graph_task() != -1  # a hook reads a gradient, say
        self.broke_off = not strict and (broken_by is not None or (in_backward and not goes_on))
        excess = Excess.IGNORE if self.broke_off else Excess.RAISE_LATER
        self._close_moment(Excess.RAISE if strict or goes_on else excess)  # if that raises, the pass is still open
        if goes_on and not strict:
            recording.irregular, self._ended_in_backward = ENDED_IN_BACKWARD, True
        self.recording = self.current = None
        self.before_moments.clear()
        self.moment += 1
        try:
            self._return_chunks_home(recording, broken_by)
        finally:
            if self.nonmodel.counting:
                self.nonmodel.stop()
            self._counters.enter_phase("")
            uninstall()
        self._store.ledger.set_nonmodel(0)
        if not recording.irregular and has_saved(self._records):
            recording.leave_graph()
        self._counters.passed(replayed=self.driver.follows_plan)
        self.gradient_passes += recording.training and any(map(_GRADS, recording.moments))
        if self.tracked or self.broke_off:  # else the recording has no new figures
            self.scheduler.observe(recording)

    def _return_chunks_home(self, recording: PassRecording, broken_by: type[BaseException] | None) -> None:
        if self._counters.recorder is not None:
            self._counters.recorder.end_moment()
        with torch.no_grad():
            if not isinstance(self.driver, PlanDriver):
                self._finish_without_plan(broken_by)
                return
            try:
                self.driver.finish()
            except BaseException as why:  # out of memory, say: the plan is left, or its home slots stayed lent
                ended = isinstance(why, Diverged) and recording.irregular == ENDED_IN_BACKWARD
                recording.irregular = LEFT_PLAN
                self.diverge(Diverged(ENDED_IN_BACKWARD if ended else str(why)))
                self._finish_without_plan(broken_by)
                if not isinstance(why, Diverged):
                    raise

    def _finish_without_plan(self, broken_by: type[BaseException] | None) -> None:
        """End the driver; if memory is short for its collectives, keep it for `_run_deferred_collectives`.

        Nothing is raised then if another exception ended the pass: that one keeps the pass's activations alive.
        """
        try:
            self.driver.finish()
        except (DeviceOutOfMemory, DoesNotFit):
            if self.driver is self.demand:
                raise
            self.deferred = self.driver
            if broken_by is None:
                raise

    def _run_deferred_collectives(self) -> None:
        """Run the collectives for which memory was short when their pass ended: the other ranks wait for them."""
        assert self.deferred is not None, "a pass was deferred"
        with torch.no_grad():
            self.deferred.finish()
        self.deferred = None

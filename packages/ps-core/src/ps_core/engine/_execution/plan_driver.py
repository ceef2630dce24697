"""Carry out one segment of a plan, moment by moment, as the model reaches each.

The note on issuing in `_execution.segment_queues` says when an instruction is issued. `_execution.instruction_executor`
says what it does, and what happens when a plan does not fit.
"""

from __future__ import annotations

import time
from functools import partial

from ps_core._extents import SegmentName
from ps_core._plan import Instr, Queue, Reserve
from ps_core.engine._devices.device import Event, Worker
from ps_core.engine._devices.disk.queues import DISK_QUEUES, DiskEvent
from ps_core.engine._execution.driver_protocols import PassDriver
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.instruction_executor import Diverged, InstructionExecutor
from ps_core.engine._execution.planned_activations import PlannedActivations
from ps_core.engine._execution.segment_queues import IssueOrder, PlannedMoment
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._gradients.gradient_sums import GradientSums
from ps_core.engine._memory.activation_slots import OffloadedActivation
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._optim.speculative_steps import Stepping
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state_transitions import GradientPlace, SlotContents
from ps_core.engine._support.counters import Counters


class PlanDriver:
    """Drive one pass, or one step, by one segment of a plan."""

    follows_plan = True
    for_rest = None
    _executor_class: type[InstructionExecutor] = InstructionExecutor

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentName,
        residency: Residency,
        gradients: GradientStore,
        counters: Counters,
        *,
        tracked: bool = False,
        stepping: Stepping | None = None,
    ) -> None:
        """Make the driver; ``stepping`` steps groups during backward; None: nothing is stepped before the step
        segment.
        """
        self.tracked = tracked
        """True: non-model bytes are counted meanwhile."""
        self._segment, self._taken = plan.segments[segment], plan.recording.activations.taken
        self._residency, self._counters = residency, counters
        self._store, self._device = residency.store, residency.store.device
        self._executor = self._executor_class(plan, self._segment, residency, gradients, counters)
        self.place_gradient = self._executor.place_gradient
        """Puts a gradient where the plan has room for it; returns False if it has none."""
        self._begun = 0
        """How many moments of the segment have begun."""
        self._running: Instr | None = None
        """The present moment."""
        self._waits = {} if self._store.synchronous else self._segment.waits
        self._recorded = frozenset[int]() if self._store.synchronous else self._segment.recorded
        self._events: dict[int, Event] = {}
        """The event behind each instruction."""
        self._stepping = stepping
        self._early = {} if stepping is None else self._segment.early
        if plan.stepped_in_backward and stepping is not None:
            self._executor.use_stepping(stepping)
        self._worker = None if self._store.synchronous else self._device.worker
        if not self._store.synchronous:
            residency.transfers.begin_segment()
        on_worker = self._worker is not None and self._uses(self._worker)
        waits_on_threads = self._store.file is not None or on_worker or self._executor.waits_for_ranks
        self._order = IssueOrder(self._segment, self._would_block) if waits_on_threads else None
        """Chooses what to issue by other threads' progress; None: there are no such threads, the order is fixed."""
        if self._segment.moments:
            self._store.arena.return_pages(plan.arena_end)
        if counters.recorder is not None:
            counters.recorder.follow(plan, segment)

    def _uses(self, worker: Worker) -> bool:
        """Return True if a worker's thread has work in this segment, or is still busy with earlier segments."""
        return worker.busy or bool(self._segment.by_queue[Queue.CPU])

    # The driver.

    @property
    def activations(self) -> PlannedActivations:
        """Return what keeps the offloaded activations that the plan moves."""
        return self._executor.activations

    def has_room_for(self, activation: OffloadedActivation) -> bool:
        """Return True if the activation stayed on the device in the recorded pass: its bytes are counted there."""
        return self._taken.get(activation.name) == {}

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Begin the next moment, which must be the plan's next one."""
        if self._store.file is not None:
            self._residency.transfers.check_disk()
        if self._begun >= len(self._segment.moments):
            raise Diverged(f"{name} comes after the last moment of {self._segment.name.value}")
        moment = self._segment.moments[self._begun]
        for record in reads:
            if record.group.index not in moment.reads:
                raise _other_moment(moment, name, f"reads {record.name}")
        for group in gains:
            if group.index not in moment.gains:
                raise _other_moment(moment, name, f"makes gradients of {group.name}")
        for record in reads:
            if record.contents is not SlotContents.WEIGHT:
                raise Diverged(f"{name}, with a gradient in the weight slot")
        self._executor.reach(moment.visit)
        self._issue(moment)
        if moment.instr.id in self._waits:
            self._wait_for_others(moment.instr)
        if self._counters.recorder is not None:
            self._counters.recorder.begin_moment(moment.name)
        self._executor.begin(moment)
        self._running = moment.instr
        self._begun += 1
        self._store.ledger.begin_moment(moment.nonmodel_bytes)

    def finish(self) -> None:
        """End the segment: carry out what is left, after which every chunk is in its home slot."""
        if self._begun < len(self._segment.moments):
            raise Diverged(f"the pass ends before {self._segment.moments[self._begun].name}")
        self._issue(None)
        self._executor.restore_homes()
        self._events.clear()  # the device may reuse them
        if self._counters.recorder is not None:
            self._counters.recorder.leave_plan()

    def step(self, settings_of: SettingsOf, factor: float) -> None:
        """Carry out the step segment; if that breaks off, what was stepped stays stepped."""
        self._executor.prepare_steps(settings_of, factor)
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def free_optional_bytes(self, needed_bytes: int) -> int:
        """Return 0: what the plan has on the compute tier is needed."""
        return 0

    def abandon(self) -> PassDriver | None:
        """Finish what was issued, keep copies that on-demand passes can use, and release the plan's own slots.

        Return what drives the rest of the pass; None: the on-demand driver.
        """
        try:
            self._residency.transfers.prepare_use()
        finally:
            self._device.synchronize()
            if self._counters.recorder is not None:
                self._counters.recorder.leave_plan()
            self._executor.abandon()
        return None

    def release_slots(self) -> None:
        """Release the plan's slots that are left: nothing uses the model any more."""
        self._executor.release_slots()

    # Issuing.

    def _issue(self, moment: PlannedMoment | None) -> None:
        """End the present moment; issue the plan's instructions before the next moment, or before the end (None)."""
        if self._running is not None:
            if self._running.id in self._recorded:
                self._events[self._running.id] = self._device.record(self._running.queue)
            self._running = None
            self._store.ledger.set_nonmodel(0)
        recorder = self._counters.recorder
        instrs = self._segment.batches[self._begun] if self._order is None else self._order.before(moment)
        for instr in instrs:
            if instr.id in self._waits:
                self._wait_for_others(instr)
            if self._worker is not None and instr.queue is not Queue.CPU:
                self._wait_for_worker(instr)
            if recorder is None or instr.queue is Queue.COLL:  # a collective is recorded where it is carried out
                self._executor.carry_out(instr)
            else:
                recorder.record(instr.queue, instr, partial(self._executor.carry_out, instr))
            if instr.id in self._recorded:
                self._events[instr.id] = self._device.record(instr.queue)
            if instr.id in self._early:
                self._step_early(instr)

    def _step_early(self, instr: Instr) -> None:
        """Make the steps whose gradients are complete after an instruction."""
        assert self._stepping is not None, "there are none else"
        if instr.queue is not Queue.CPU and not self._store.synchronous:
            event = self._device.record(instr.queue)
            if self._worker is not None:
                self._worker.wait(event)
            else:
                self._device.wait(Queue.CPU, event)
        recorder = self._counters.recorder
        for step in self._early[instr.id]:
            if recorder is None:
                self._executor.step_early(step, self._stepping)
            else:
                recorder.record(step.queue, step, partial(self._executor.step_early, step, self._stepping))

    def _wait_for_others(self, instr: Instr) -> None:
        """Make the instruction's queue wait for the instructions on other queues that it depends on."""
        self._wait(instr.queue, [self._events[wait] for wait in self._waits[instr.id]])

    def _wait(self, queue: Queue, events: list[Event]) -> None:
        """Make a queue wait for events of other queues."""
        started = time.perf_counter()
        for event in events:
            if self._worker is not None and queue is Queue.CPU:
                self._worker.wait(event)
            else:
                self._device.wait(queue, event)
        self._counters.waited(time.perf_counter() - started)

    def _wait_for_worker(self, instr: Instr) -> None:
        """Wait for the worker's thread, if an instruction of a stream needs its result."""
        events = self._executor.work_before(instr)
        if events:
            started = time.perf_counter()
            for event in events:
                self._device.wait(instr.queue, event)
            self._counters.waited(time.perf_counter() - started)

    def _would_block(self, instr: Instr) -> bool:
        """Return True if the host thread would have to wait for another thread before issuing an instruction."""
        if self._executor.is_blocked(instr):
            return True
        if isinstance(instr.op, Reserve) and instr.op.tier:
            return self._store.is_leaving
        if instr.queue in DISK_QUEUES:
            return False  # their threads wait
        for wait in instr.after:
            event = self._events.get(wait)
            if isinstance(event, DiskEvent) and not event.done:
                return True
        if self._worker is None or instr.queue is Queue.CPU:
            return False
        return any(not event.done for event in self._executor.work_before(instr))


def _other_moment(planned: PlannedMoment, name: str, does: str) -> Diverged:
    """Return why a moment is not the planned one; ``does``: what it does that is not planned."""
    if name == planned.name:
        return Diverged(f"{name} {does}, unlike in the plan")
    return Diverged(f"{name} where the plan has {planned.name}")


def why_not_ready(plan: EnginePlan, groups: list[ParamGroup], sums: GradientSums) -> str:
    """Return why no segment of the plan can begin with the groups as they are; an empty text if one can."""
    if sums.unplanned and sums.reach_above(plan.arena_end):
        return "gradients are in memory that the plan leaves to activations"
    for group in groups:
        if 0 in group.weight_chunk.copies:
            return f"memory of {group.name} has live aliases"
        for record in group.tensors:
            if record.contents is not SlotContents.WEIGHT:
                return f"a gradient is in the weight slot of {group.name}"
    return ""


def fits_step(plan: EnginePlan, groups: list[ParamGroup]) -> bool:
    """Return True if gradients are where the plan's step expects them, and no weight has live aliases."""
    stepped = plan.stepped
    for group in groups:
        if group.fixed_tier is not None:
            continue
        if 0 in group.weight_chunk.copies:
            return False
        over = group in plan.overwritten
        wanted = GradientPlace.IN_WEIGHT_SLOT if over else GradientPlace.IN_ACCUMULATOR
        for record in group.tensors:
            known = (GradientPlace.NONE, wanted) if group in stepped else (GradientPlace.NONE,)
            if record.gradient not in known:
                return False
    return True

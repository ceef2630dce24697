"""Replaying one segment of a plan, moment by moment, as the model gets there.

[Note: issuing]
An instruction is issued as soon as all it waits for has been: it is then put on its queue's stream behind the events
of what it waits for on other queues. So moves are issued as early as the plan allows, whatever moment they are for.
A moment is special: it is issued when the model begins it, and is over when the next one begins. Work of the CPU's
queue is done by the host thread when its turn comes. What an instruction does is in `_execution.instructions`, and
there is the note on what happens when a plan does not hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ps_core._errors import PlanMismatch
from ps_core._plan import Instr, Queue, Run, Step
from ps_core._program import SegmentName
from ps_core.engine._devices.device import Event
from ps_core.engine._devices.disk.streams import DISK_QUEUES, DiskEvent
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.instructions import Diverged, InstructionExecutor
from ps_core.engine._gradients.store import GradientStore
from ps_core.engine._optim.group_step import SettingsOf
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._parameters.state import ParamGroup, ParamState
from ps_core.engine._parameters.transitions import SlotContents
from ps_core.engine._support.counters import Counters


class PlanDriver:
    """One segment on its way."""

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentName,
        residency: Residency,
        gradients: GradientStore,
        counters: Counters,
        prefetch: int | None,
        *,
        tracked: bool = False,
    ) -> None:
        self.tracked = tracked
        """Whether non-model bytes are counted meanwhile."""
        self._plan = plan
        self._segment = segment
        self._lines = plan.lines[segment]
        self._residency, self._counters = residency, counters
        self._store, self._device = residency.store, residency.store.device
        self._prefetch, self._has_disk = prefetch, residency.store.file is not None
        self._carrier = InstructionExecutor(plan, segment, residency, gradients, counters)
        self._at = dict.fromkeys(Queue, 0)
        self._done: set[int] = set()
        self._events: dict[int, Event] = {}
        self._running: Instr | None = None
        self._next_run = 0
        for queue in (*self._store.queues, Queue.CPU):
            residency.transfers.wait_for_other_queues(
                queue
            )  # segments join here; whatever came before is done with all addresses
        if self._lines.runs:
            self._store.arena.return_pages(plan.plan.tiers[0].capacity_bytes - plan.program.trace.peak_nonmodel_bytes)

    # The driver.

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """The next moment, which must be the one the plan has next."""
        self._residency.transfers.check_disk()
        if self._next_run >= len(self._lines.runs):
            raise Diverged(f"{name} comes after the last moment of {self._segment.value}")
        visit = self._lines.runs[self._next_run]
        beat = self._plan.beats[visit]
        if any(each.group.index not in beat.reads for each in reads) or any(g.index not in beat.gains for g in gains):
            raise Diverged(f"{name} where the plan has {beat.name}")
        if any(record.contents is not SlotContents.WEIGHT for record in reads):
            raise Diverged(f"{name}, whose parameters a gradient lies over")
        self._end_run()
        self._carrier.reach(visit)
        self._pump(self._run_is_ready)
        instr = self._lines.by_queue[Queue.COMPUTE][self._at[Queue.COMPUTE]]
        if not isinstance(instr.op, Run) or not self._ready(instr):
            raise PlanMismatch(f"{self._segment.value}: moment {visit} waits for something that does not come")
        self._start_run(instr, instr.op)
        self._next_run += 1

    def take(self, record: ParamState, gradient: torch.Tensor) -> bool:
        """Put a gradient where the plan has room for it; False: it has none."""
        return self._carrier.take(record, gradient)

    def finish(self) -> None:
        """The segment's end: everything is at home."""
        if self._next_run < len(self._lines.runs):
            raise Diverged(f"the pass ends before {self._plan.beats[self._lines.runs[self._next_run]].name}")
        self._end_run()
        self._pump(lambda: False)
        if len(self._done) < self._lines.count:
            raise PlanMismatch(f"{self._segment.value}: {self._lines.count - len(self._done)} instructions never come")
        self._carrier.settle_homes()
        self._events.clear()  # a device uses them again

    def step(self, settings_of: SettingsOf, factor: float) -> None:
        """Carry out the step segment; where that breaks off, what was stepped stays so."""
        self._carrier.prepare_steps(settings_of, factor)
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Finish what was issued and keep what is of use to demand; slots of the plan's own are given back."""
        self._device.synchronize()
        self._carrier.abandon()

    # Issuing.

    def _ready(self, instr: Instr) -> bool:
        return self._done.issuperset(instr.after)

    def _pump(self, enough: Callable[[], bool]) -> None:
        """Issue all that can be; what the host thread would have to wait for the disk for only until that is enough."""
        while self._sweep(patient=False) or (not enough() and self._sweep(patient=True)):
            pass

    def _sweep(self, *, patient: bool) -> bool:
        """Once through all queues; whether anything was issued. A patient one waits for the disk, and issues one."""
        moved = False
        for queue, line in self._lines.by_queue.items():
            while (at := self._at[queue]) < len(line) and self._may_issue(line[at], patient=patient):
                instr = line[at]
                self._await(instr)
                self._carrier.carry_out(instr)
                self._complete(instr)
                self._at[queue] = at + 1
                moved = True
                if patient:
                    return True
                if queue is Queue.CPU or (queue is Queue.COMPUTE and isinstance(instr.op, Step)):
                    break  # the host has worked for a while, and copies may wait for what it did
        return moved

    def _run_is_ready(self) -> bool:
        line, at = self._lines.by_queue[Queue.COMPUTE], self._at[Queue.COMPUTE]
        return at < len(line) and isinstance(line[at].op, Run) and self._ready(line[at])

    def _may_issue(self, instr: Instr, *, patient: bool) -> bool:
        if isinstance(instr.op, Run) or not self._ready(instr):
            return False
        if self._has_disk and not patient and instr.queue not in DISK_QUEUES and self._awaits_disk(instr):
            return False
        if self._prefetch is None or instr.queue not in (Queue.H2D, Queue.DISK_R) or not self._lines.runs:
            return True
        return instr.visit <= self._carrier.moment + self._prefetch

    def _awaits_disk(self, instr: Instr) -> bool:
        """Whether the instruction comes after something that the disk has not done yet."""
        events = [self._events.get(wait) for wait in instr.after]
        return any(isinstance(event, DiskEvent) and not event.done for event in events)

    def _await(self, instr: Instr) -> None:
        events = [event for wait in instr.after if (event := self._events.get(wait)) is not None]
        if events:
            started = time.perf_counter()
            for event in events:
                self._device.wait(instr.queue, event)
            self._counters.waited(time.perf_counter() - started)

    def _complete(self, instr: Instr) -> None:
        self._done.add(instr.id)
        if instr.id in self._lines.watched and instr.queue is not Queue.CPU:
            self._events[instr.id] = self._device.record(instr.queue)

    # Moments.

    def _start_run(self, instr: Instr, op: Run) -> None:
        self._await(instr)
        self._carrier.begin(op)
        self._at[Queue.COMPUTE] += 1
        self._running = instr
        self._store.ledger.set_nonmodel(op.nonmodel_bytes)
        self._store.ledger.update_peaks()

    def _end_run(self) -> None:
        instr, self._running = self._running, None
        if instr is not None:
            self._complete(instr)
            self._store.ledger.set_nonmodel(0)

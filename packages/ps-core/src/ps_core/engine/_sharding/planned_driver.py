"""Carry out one segment of the plan that all ranks follow."""

from __future__ import annotations

import torch

from ps_core._extents import SegmentName
from ps_core._plan import Instr, Queue
from ps_core.engine._execution.driver_protocols import PassDriver
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._execution.segment_queues import PlannedMoment
from ps_core.engine._parameters.param_state import ParamGroup, ParamState
from ps_core.engine._sharding.collective_streams import ORDERED_QUEUES
from ps_core.engine._sharding.planned_collectives import RanksExecutor
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.counters import Counters


class RanksPlanDriver(PlanDriver):
    """Drives one rank's pass, or step, by one segment of the plan."""

    _executor_class = RanksExecutor
    _residency: ShardedResidency
    _executor: RanksExecutor

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentName,
        residency: ShardedResidency,
        gradients: ShardedGradients,
        counters: Counters,
        *,
        tracked: bool = False,
    ) -> None:
        self._plan = plan
        self._touched: set[int] = set()
        """Groups that this rank used in forward."""
        self._reading = set[int]()
        """Groups that the present moment reads, by index."""
        super().__init__(plan, segment, residency, gradients, counters, tracked=tracked)
        self._collectives = {instr.id: instr for instr in self._segment.by_queue[Queue.COLL]}
        """Instructions of the collective queue, by id."""
        if self._executor.waits is not None:
            self._recorded -= self._collectives.keys()  # the other thread records events there
            self._executor.waits.before_next(residency.ordering.ready())

    def _wait_for_others(self, instr: Instr) -> None:
        """Make the instruction's queue wait, without launching anything on the stream of collectives."""
        if self._executor.waits is None:
            super()._wait_for_others(instr)
            return
        waits = self._waits[instr.id]
        events = [self._events[wait] for wait in waits if wait not in self._collectives]
        if instr.queue is Queue.COLL:
            self._executor.waits.before_next(events)
            return
        self._wait(instr.queue, events)
        if instr.queue in ORDERED_QUEUES:  # others work on memory that no collective uses
            for wait in waits:
                if wait in self._collectives:
                    self._executor.delay_behind(self._collectives[wait], instr.queue)

    def begin(self, reads: list[ParamState], gains: list[ParamGroup], name: str) -> None:
        """Begin the moment that the plan has for these, going through other ranks' moments before it."""
        backward = torch._C._current_graph_task_id() != -1
        groups = {record.group.index for record in reads}
        gaining = {group.index for group in gains}
        self._touched |= groups if not backward else set()
        for place in range(self._begun, len(self._segment.moments)):
            moment = self._segment.moments[place]
            if self._plan.recording.moments[moment.visit].backward is backward and (
                groups <= moment.reads and gaining <= moment.gains
            ):
                for _ in range(place - self._begun):
                    self._pass_over(name)
                break
            if not self._may_skip(moment):
                break
        super().begin(reads, gains, name)
        self._reading = groups

    def _pass_over(self, name: str) -> None:
        """Go through another rank's moment: slots are taken and given back, and nothing is computed."""
        super().begin([], [], name)
        if self._counters.recorder is not None:
            self._counters.recorder.end_moment()

    def _may_skip(self, moment: PlannedMoment) -> bool:
        """Return True if this rank can go through a moment without a part in it: no gradient of it will come."""
        learning = self._plan.learning
        return not any(
            use.group.index in self._touched and learning[use.group]
            for use in moment.uses
            if use.gains or not use.holds_weight
        )

    def finish(self) -> None:
        """End the segment, after the other ranks' moments that are left."""
        rest = self._segment.moments[self._begun :]
        if all(map(self._may_skip, rest)):
            for moment in rest:
                self._pass_over(moment.name)
        super().finish()
        self._executor.end_all()

    def abandon(self) -> PassDriver:
        """Leave the plan's moves; return what goes on with its collectives."""
        self._device.synchronize()
        if self._counters.recorder is not None:
            self._counters.recorder.leave_plan()
        driver = self._executor.hand_over()
        driver.needed.update(self._residency.groups[index] for index in self._reading)
        return driver

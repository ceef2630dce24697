"""Carry out one segment of the plan that all ranks follow."""

from __future__ import annotations

from ps_core._program import SegmentName
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._execution.plan_driver import PlanDriver
from ps_core.engine._execution.protocols import PassDriver
from ps_core.engine._execution.segment_queues import SegmentQueues
from ps_core.engine._gradients.gradient_store import GradientStore
from ps_core.engine._parameters.residency import Residency
from ps_core.engine._sharding.following_driver import FollowingDriver
from ps_core.engine._sharding.planned_collectives import RanksExecutor
from ps_core.engine._sharding.sharded_gradients import ShardedGradients
from ps_core.engine._sharding.sharded_residency import ShardedResidency
from ps_core.engine._support.counters import Counters


class RanksPlanDriver(PlanDriver):
    """Drives one rank's pass, or step, by one segment of the plan."""

    def __init__(
        self,
        plan: EnginePlan,
        segment: SegmentName,
        shards: ShardedResidency,
        sums: ShardedGradients,
        counters: Counters,
        *,
        tracked: bool = False,
    ) -> None:
        self._plan, self._shards, self._sums = plan, shards, sums
        super().__init__(plan, segment, shards, sums, counters, tracked=tracked)

    def _make_executor(
        self,
        plan: EnginePlan,
        segment: SegmentQueues,
        residency: Residency,
        gradients: GradientStore,
        counters: Counters,
    ) -> RanksExecutor:
        self._ranks = RanksExecutor(plan, segment, residency, gradients, counters)
        return self._ranks

    def abandon(self) -> PassDriver:
        """Leave the plan's moves; return what goes on with its collectives."""
        self._device.synchronize()
        follower = FollowingDriver(
            self._ranks.leave(), self._plan.learning, self._shards, self._sums, self._counters
        )
        follower.adopt(self._shards.groups)
        return follower

"""Plan the segments that run no moments: steps, skipped steps, and weights that are rebuilt from their masters."""

from __future__ import annotations

from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Cast, Segment, worker
from ps_core._planner.placement import work_tier
from ps_core._planner.segment_walker import Walker
from ps_core._planner.tier_division import Frame


class Updates(Walker):
    """Plan a step, a skipped step, or the prologue: one pass over the groups in the next forward's order."""

    def __init__(self, frame: Frame, name: SegmentName) -> None:
        super().__init__(frame, name, {})

    def walk(self) -> Segment:
        if self.segment is SegmentName.STEP:
            for group in self.program.stepped:
                if group not in self.early:
                    self.step(group)
        for group in self.program.casts(self.segment, self.early):
            self._cast(group)
        return self.finish()

    def _cast(self, group: int) -> None:
        tiers = self.frame.tiers
        master, weight = Extent(Kind.P32, group), Extent(Kind.P16, group)
        tier = work_tier(tiers, self.home_tier(master))
        queue = worker(tiers, tier)
        source = self.at(master, tier)
        with self.pinned([(master, tier)]):
            target = self.room(weight, tier, queue)
        self.emit(queue, Cast(group, source, target), reads=(source,), writes=(target,))
        self.wrote(weight, tier, self.program.rebuilt(group))
        self.bring_home(weight)

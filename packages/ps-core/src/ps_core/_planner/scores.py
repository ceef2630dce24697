"""Plan, simulate and score placements; find the best number of groups to keep resident.

The score is the step time as the engine runs a plan. A segment that two placements have in common is planned once.

A placement is a choice of a few numbers. One says how many groups stay wholly on the compute tier. These are the first
of a forward pass: no upload delays its beginning, and no gradient transfer backward's end. The other says which of the
remaining groups copy their optimizer states to the accelerator for a step there. The CPU steps the rest. Where steps
may begin within backward, states go up beside it. That needs memory, which fewer resident groups leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ps_core._extents import Extent, SegmentName
from ps_core._plan import Queue, Tier
from ps_core._planner.bounds import lower_bounds
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.make_plan import make_segment
from ps_core._planner.placement import Placement, above_disk, filled, halves
from ps_core._planner.tier_division import Frame, NoRoom, make_frame
from ps_core._program import Program
from ps_core._simulate.engine_timing import Issuing, Priced
from ps_core._simulate.machine import Machine

_SIXTEENTHS = (1, 2, 4, 8, 16)
"""Parts of the groups that are not resident, in sixteenths: so many are tried as groups to step on the compute tier."""
_LESS = (2, 1)
"""So many fewer groups stay resident, so that states have room within backward; the larger number is tried first."""
_GRID = 4
"""Number of evenly spaced trials of how many groups to keep resident."""
_MANY_INSTRS = 2_500
"""Number of instructions in the first candidates above which no others are planned if these are equally fast."""
_SAME = 1.005
"""Step times within this factor count as equal: moved bytes decide."""

Score = tuple[float, int]
"""Predicted seconds a step, and moved bytes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement that works, and its score."""

    score: Score
    resident: int
    sixteenths: int
    """The part of the groups that are not resident, in sixteenths, that steps on the compute tier."""
    within: bool = False
    """True: they do so within backward."""


class Scorer:
    """Plan and simulate placements of one program, each once."""

    def __init__(
        self,
        program: Program,
        tiers: tuple[Tier, ...],
        machine: Machine,
        *,
        policy: Policy,
        ranks_per_node: int | None,
        in_backward: bool = False,
        undoable: bool = False,
    ) -> None:
        """``in_backward``: groups may be stepped while backward goes on, ``undoable``: in a way that can be undone; see
        `_simulate.steps_in_backward`.
        """
        self.program = program
        self.tiers = tiers
        self._policy = policy
        self._issuing = Issuing(program, tiers, machine, ranks_per_node, in_backward=in_backward, undoable=undoable)
        self._may_step_on_device = self._issuing.within_backward and not undoable
        """True: steps on the compute tier of groups from below are part of the backward pass."""
        self._passes: dict[tuple[int, int, SegmentName], Priced] = {}
        """Costs of segments; passes by the number of resident groups, and of groups that step within them."""
        self._known: dict[tuple[int, int, bool], Score | NoRoom] = {}
        self.planned_instrs = 0
        """Number of instructions in all segments planned so far."""
        self._floor_s = float("inf")  # the least step time of any placement: the compute queue's work

    def placement(self, resident: int, sixteenths: int, within: bool = False) -> Placement:
        """Place the first groups resident; so many sixteenths of the others step on the compute tier.

        ``within``: within backward. If the next tier is the disk: the first `halves` are resident.
        """
        if self._next_is_disk:
            return above_disk(self.program, resident)
        groups = len(self.program.layout.groups)
        below = groups - resident
        count = self._stepped_above(resident, sixteenths)
        chosen = frozenset(resident + below * place // count for place in range(count))
        lower = None
        if len(self.tiers) == 3:
            sizes = [self._bytes(group) for group in range(groups)]
            host = self.tiers[1].capacity_bytes
            lower = host if sum(sizes[resident:]) <= host else host - 3 * max(sizes, default=0)
        return filled(
            self.program,
            self.tiers,
            resident=resident,
            lower_bytes=lower,
            streamed=chosen,
            in_backward=within,
        )

    def _stepped_above(self, resident: int, sixteenths: int) -> int:
        """Return how many groups that are not resident step on the compute tier."""
        return -(-(len(self.program.layout.groups) - resident) * sixteenths // 16)

    @property
    def _next_is_disk(self) -> bool:
        return len(self.tiers) == 2 and self.tiers[1].name == "disk"

    def _bytes(self, group: int) -> int:
        return sum(self.program.bytes_of(Extent(kind, group)) for kind in self.program.home_kinds(group))

    def score(self, resident: int, sixteenths: int = 0, within: bool = False) -> Score | NoRoom:
        """Return the predicted step time and moved bytes, or which tier is too small."""
        key = (resident, self._stepped_above(resident, sixteenths), within)
        if key not in self._known:
            try:
                self._known[key] = self._planned(resident, sixteenths, within)
            except NoRoom as refusal:
                self._known[key] = refusal.with_traceback(None)  # see [Note: what an exception holds]
        return self._known[key]

    def _priced(self, resident: int, sixteenths: int, within: bool) -> tuple[Frame, list[Priced]]:
        frame = make_frame(self.program, self.tiers, self.placement(resident, sixteenths, within), self._policy)
        passes = resident, self._stepped_above(resident, sixteenths) * within
        return frame, [self._segment(frame, name, passes) for name in self.program.iteration()]

    def _planned(self, resident: int, sixteenths: int, within: bool) -> Score:
        frame, priced = self._priced(resident, sixteenths, within)
        timed = self._issuing.time(frame.home, priced)
        self._floor_s = min(self._floor_s, sum(each.busy_s[Queue.COMPUTE] for each in timed))
        moved = sum(sum(each.work.copied_bytes) + each.work.wire_bytes for each in priced)
        return sum(each.seconds for each in timed), moved

    def _without_cpu_steps(self, found: Found) -> float:
        """Return the step time of a placement if the CPU stepped in no time: stepping elsewhere is not faster."""
        frame, (*passes, step) = self._priced(found.resident, found.sixteenths, found.within)
        rows = zip(step.segment.instrs, step.work.seconds, strict=True)
        free = [0.0 if instr.queue is Queue.CPU else seconds for instr, seconds in rows]
        step = step._replace(work=step.work._replace(seconds=free))
        return sum(timed.seconds for timed in self._issuing.time(frame.home, [*passes, step]))

    def _segment(self, frame: Frame, name: SegmentName, passes: tuple[int, int]) -> Priced:
        key = *passes, name
        if name is SegmentName.STEP or key not in self._passes:
            segment = make_segment(frame, name)
            self.planned_instrs += len(segment.instrs)
            self._passes[key] = self._issuing.price(frame.home, segment)
        return self._passes[key]

    def refuse(self, found: Found, refusal: NoRoom) -> None:
        """Replace the score of a placement that failed later."""
        count = self._stepped_above(found.resident, found.sixteenths)
        self._known[found.resident, count, found.within] = refusal.with_traceback(None)

    @cached_property
    def _sizes(self) -> list[int]:
        """Return the bytes of each group, or half, that may be resident."""
        if self._next_is_disk:
            return [row[2] for row in halves(self.program)]
        return [self._bytes(group) for group in range(len(self.program.layout.groups))]

    def all_resident(self) -> Found | None:
        """Everything on the compute tier, where nothing moves; None: there is no room."""
        if sum(self._sizes) > self.tiers[0].capacity_bytes:
            return None
        return self._better(None, len(self._sizes), 0)

    def moves_nothing(self, found: Found) -> bool:
        """Return True if a placement keeps everything on the compute tier."""
        return found.resident == len(self._sizes)

    @cached_property
    def limits(self) -> tuple[int, int]:
        """Return the fewest groups (or halves) that must, and the most that can, be resident, by home slots alone."""
        sizes = self._sizes
        if len(self.tiers) == 1:
            return len(sizes), len(sizes)
        needed = lower_bounds(self.program, self.tiers)[0].needed_bytes
        if self._next_is_disk:  # then whatever a moment uses is resident
            needed = max((visit.nonmodel_bytes for visit in self.program.visits), default=0)
        above = self.tiers[0].capacity_bytes - needed
        most = 0
        while most < len(sizes) and sizes[most] <= above:
            above -= sizes[most]
            most += 1
        below = sum(tier.capacity_bytes for tier in self.tiers[1:])
        least = len(sizes)
        while least and sizes[least - 1] <= below:
            least -= 1
            below -= sizes[least]
        return least, max(least, most)

    def glance(self) -> Found | None:
        """Return a good number of resident groups, after trying few."""
        least, most = self.limits
        return self._grid(least, max(least, most - (most - least) // 4), 2)

    def explore(self, known: Found) -> Found:
        """Return the best number of resident groups, from a grid and then near its best point."""
        if self.planned_instrs > _MANY_INSTRS and self._all_equal():
            return known
        least, most = self.limits
        grid = self._grid(least, most, _GRID)
        best = grid if grid is not None and beats(grid.score, known.score) else known
        if self._all_equal():
            return best
        step = (most - least) // (_GRID - 1)
        while step > 1:
            step = -(-step // 2)
            for resident in (best.resident - step, best.resident + step):
                if least <= resident <= most:
                    best = self._better(best, resident, 0) or best
        return best

    def _all_equal(self) -> bool:
        """Return True if the step time is equal for all numbers of resident groups that were tried and work."""
        times = [score[0] for score in self._known.values() if not isinstance(score, NoRoom)]
        return max(times, default=0.0) <= _SAME * min(times, default=0.0)

    def _grid(self, least: int, most: int, points: int) -> Found | None:
        """Return the best of evenly spaced numbers; if none works, search between too few and too many."""
        places = sorted({least + (most - least) * place // (points - 1) for place in range(points)})
        best: Found | None = None
        for resident in places:
            best = self._better(best, resident, 0)
        low = max((place for place in places if self._lacks(place, below=True)), default=least)
        high = min((place for place in places if self._lacks(place, below=False)), default=most)
        return self._grid(low, high, 3) if best is None and high - low > 1 else best

    def _lacks(self, resident: int, *, below: bool) -> bool:
        score = self.score(resident)
        return isinstance(score, NoRoom) and (score.tier > 0) is below

    def _better(self, best: Found | None, resident: int, sixteenths: int, within: bool = False) -> Found | None:
        score = self.score(resident, sixteenths, within)
        if isinstance(score, NoRoom):
            return best
        found = Found(score, resident, sixteenths, within)
        return found if best is None or beats(found.score, best.score) else best

    def stream(self, best: Found) -> Found:
        """Return the best placement with some of the lower groups stepped on the compute tier, if that helps."""
        if self.tiers[0].name != "device" or best.score[0] <= self._floor_s * _SAME:
            return best
        if best.score[0] <= self._without_cpu_steps(best) * _SAME:
            return best
        found = best
        for sixteenths in _SIXTEENTHS:
            found = self._nearby(found, best.resident, sixteenths, within=False)
        for less in _LESS if self._may_step_on_device else ():
            if found.within:
                break
            for sixteenths in _SIXTEENTHS[1:]:
                found = self._nearby(found, best.resident - less, sixteenths, within=True)
        if found.within:
            for more in (2, -2):
                found = self._nearby(found, found.resident + more, found.sixteenths, within=True)
        for sixteenths in (found.sixteenths * 3 // 4, found.sixteenths * 3 // 2):
            found = self._nearby(found, found.resident, sixteenths, within=found.within)
        if found.within:
            for more, part in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                found = self._nearby(found, found.resident + more, found.sixteenths + part, within=True)
        return found

    def _nearby(self, best: Found, resident: int, sixteenths: int, *, within: bool) -> Found:
        """Return the better of ``best`` and this placement, whose numbers are first brought into range."""
        return self._better(best, max(resident, self.limits[0]), min(max(sixteenths, int(within)), 16), within) or best


def beats(score: Score, other: Score) -> bool:
    """Return True if the first is clearly faster, or equally fast and moves less."""
    if score[0] > other[0] * _SAME:
        return False
    return score[0] * _SAME < other[0] or (score[1], score[0]) < (other[1], other[0])

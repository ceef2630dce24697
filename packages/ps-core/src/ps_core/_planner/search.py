"""Finding a good plan: group size, what stays on the accelerator, and where optimizer steps run.

Candidates are planned and simulated; the one with the least predicted step time wins, moved bytes deciding between
equals. What a placement chooses is few numbers: how many groups live wholly on the compute tier (the first ones of a
forward pass: no upload before it, no gradient to send after it), and which of the others have their optimizer states
streamed up for a step on the accelerator while the CPU steps the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._layout import Layout, lay_out, units
from ps_core._plan import Plan, Tier, check_tiers
from ps_core._planner.bounds import check_fits, largest_extent_bytes, lower_bounds
from ps_core._planner.frame import NoRoom, make_frame
from ps_core._planner.placement import Placement, above_disk, filled, halves
from ps_core._planner.policy import Policy
from ps_core._planner.segments import make_plan
from ps_core._planner.tight import tight_plan
from ps_core._program import Extent, Precision, Program
from ps_core._simulate.clock import Prediction, simulate
from ps_core._simulate.machine import Machine
from ps_core._trace import Trace
from ps_core._verify import verify

_GROUP_FACTORS = (1.52, 1.01, 0.52, 3.04, 6.08, 12.2)
"""Group sizes tried, in units of the trace's typical unit (for a GPT its feed-forward half: 1.5 is a layer)."""
_QUICK_FACTORS = (1.52, 0.52)
_MOST_GROUPS = 700
_STREAM_STRIDES = (16, 8, 4, 2, 1)
_GRID = 4
"""Points of the first look at how many groups to keep resident."""
_SAME = 1.02
"""Step times this near are equal: moved bytes decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a trace is to be trained; what `find_plan` may not change."""

    ranks: int = 1
    ranks_per_node: int | None = None
    """None: all processes share one node."""
    precision: Precision = Precision.BF16
    accumulate: int = 1
    training: bool = True
    policy: Policy = Policy.BELADY
    group_numel: int | None = None
    """None: searched."""
    nonmodel_overhead: float = 0.0
    quick: bool = False
    """Look at few candidates: for asking whether something fits, and roughly how fast it is."""

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision) or not isinstance(self.policy, Policy):
            raise InvalidInput(f"precision and policy are enums, found {self.precision!r} and {self.policy!r}")
        if not isinstance(self.ranks, int) or not 0 <= self.nonmodel_overhead <= 10:
            found = f"{self.ranks!r} and {self.nonmodel_overhead!r}"
            raise InvalidInput(f"ranks is a whole number, nonmodel_overhead a part of at most 10; found {found}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A verified plan and what it promises."""

    program: Program
    plan: Plan
    prediction: Prediction
    placement: Placement | None
    """None: the tight planner's, which keeps no fixed placement of work."""


def find_plan(
    trace: Trace, tiers: tuple[Tier, ...], machine: Machine, *, setup: Setup, layout: Layout | None = None
) -> Planned:
    """The best plan found for a trace on these tiers, verified; `DoesNotFit` if there is none.

    With a ``layout`` the parameters are packed already, and only what moves when is searched for.
    """
    check_tiers(tiers)
    programs = _programs(trace, setup) if layout is None else [_program(trace, layout, setup)]
    scorers = [_Scorer(program, tiers, machine, setup) for program in programs]
    while (best := _best(scorers, setup)) is not None:
        scorer, found = best
        placement = scorer.placement(found.resident, found.stride)
        try:
            plan = make_plan(make_frame(scorer.program, tiers, placement, setup.policy))
        except NoRoom as refusal:  # in a segment that scoring leaves out
            scorer.refuse(found, refusal)
        else:
            return _checked(scorer.program, plan, machine, setup, placement)
    return _tight([scorer.program for scorer in scorers], tiers, machine, setup)


def plan_with(
    placement: Placement | None,
    trace: Trace,
    tiers: tuple[Tier, ...],
    machine: Machine,
    *,
    setup: Setup,
    layout: Layout,
) -> Planned:
    """The plan of a placement that a search found earlier, verified (None: the tight planner's)."""
    check_tiers(tiers)
    program = _program(trace, layout, setup)
    if placement is None:
        return _tight([program], tiers, machine, setup)
    try:
        plan = make_plan(make_frame(program, tiers, placement, setup.policy))
    except NoRoom:
        raise InvalidInput("there is no room for this placement") from None
    return _checked(program, plan, machine, setup, placement)


def with_policy(planned: Planned, policy: Policy, machine: Machine, setup: Setup) -> Planned:
    """The same layout and placement under another eviction policy, to compare."""
    if planned.placement is None:
        raise InvalidInput("a plan for tight memory has no policy to exchange")
    plan = make_plan(make_frame(planned.program, planned.plan.tiers, planned.placement, policy))
    return _checked(planned.program, plan, machine, replace(setup, policy=policy), planned.placement)


def _checked(program: Program, plan: Plan, machine: Machine, setup: Setup, placement: Placement | None) -> Planned:
    verify(program, plan)
    prediction = simulate(program, plan, machine, ranks_per_node=setup.ranks_per_node)
    return Planned(program=program, plan=plan, prediction=prediction, placement=placement)


# Layouts.


def _programs(trace: Trace, setup: Setup) -> Iterator[Program]:
    seen: set[tuple[int, ...]] = set()
    for numel in group_sizes(trace, setup):
        layout = lay_out(trace, group_numel=numel, ranks=setup.ranks)
        shape = tuple(group.numel for group in layout.groups)
        if shape not in seen:
            seen.add(shape)
            yield _program(trace, layout, setup)


def _program(trace: Trace, layout: Layout, setup: Setup) -> Program:
    return Program(
        trace=trace,
        layout=layout,
        precision=setup.precision,
        accumulate=setup.accumulate,
        training=setup.training,
        nonmodel_overhead=setup.nonmodel_overhead,
    )


def group_sizes(trace: Trace, setup: Setup) -> list[int]:
    """Elements of a group, as tried: around the trace's typical unit, and not so few that groups become too many."""
    if setup.group_numel is not None:
        return [setup.group_numel]
    sizes = sorted(sum(trace.tensors[index].numel for index in unit) for _, unit in units(trace))
    covered = zip(sizes, accumulate(sizes), strict=True)
    typical = next((size for size, total in covered if 2 * total >= trace.parameters), 1)
    factors = _QUICK_FACTORS if setup.quick else _GROUP_FACTORS
    least = trace.parameters / _MOST_GROUPS
    return sorted({max(1, int(max(typical * factor, least))) for factor in factors})


# Placements.

_Score = tuple[float, int]


@dataclass(frozen=True, slots=True)
class _Found:
    """A placement that works, and how well."""

    score: _Score
    resident: int
    stride: int


class _Scorer:
    """Placements of one program, each planned and simulated once."""

    def __init__(self, program: Program, tiers: tuple[Tier, ...], machine: Machine, setup: Setup) -> None:
        self.program = program
        self.tiers = tiers
        self._machine = machine
        self._setup = setup
        self._known: dict[tuple[int, int], _Score | NoRoom] = {}
        self._floor_s = float("inf")  # no placement has the compute queue do less

    def placement(self, resident: int, stride: int) -> Placement:
        """The first groups resident; of the others, every ``stride``-th steps on the compute tier (0: none does).

        Where the next tier is the disk: the first `halves` resident.
        """
        if self._next_is_disk:
            return above_disk(self.program, resident)
        groups = len(self.program.layout.groups)
        streamed = frozenset(range(resident, groups, stride)) if stride else frozenset()
        lower = None
        if len(self.tiers) == 3:
            sizes = [self._bytes(group) for group in range(groups)]
            host = self.tiers[1].capacity_bytes
            lower = host if sum(sizes[resident:]) <= host else host - 3 * max(sizes, default=0)
        return filled(self.program, self.tiers, resident=resident, lower_bytes=lower, streamed=streamed)

    @property
    def _next_is_disk(self) -> bool:
        return len(self.tiers) == 2 and self.tiers[1].name == "disk"

    def _bytes(self, group: int) -> int:
        return sum(self.program.bytes_of(Extent(kind, group)) for kind in self.program.home_kinds(group))

    def score(self, resident: int, stride: int = 0) -> _Score | NoRoom:
        """Predicted step time and moved bytes, or which tier is too small."""
        key = (resident, stride)
        if key not in self._known:
            try:
                frame = make_frame(self.program, self.tiers, self.placement(*key), self._setup.policy)
                plan = make_plan(frame, dict.fromkeys(self.program.iteration()))
            except NoRoom as refusal:
                self._known[key] = refusal
            else:
                per_node = self._setup.ranks_per_node
                told = simulate(self.program, plan, self._machine, ranks_per_node=per_node)
                self._known[key] = told.step_time_s, sum(told.moved_bytes.values())
                self._floor_s = min(self._floor_s, told.step_time_s - told.stalled_s)
        return self._known[key]

    def refuse(self, found: _Found, refusal: NoRoom) -> None:
        """What looked good turned out not to work."""
        self._known[found.resident, found.stride] = refusal

    @cached_property
    def limits(self) -> tuple[int, int]:
        """The fewest groups (or halves) that must, and the most that can, be resident, as far as home alone tells."""
        groups = range(len(self.program.layout.groups))
        sizes = [row[2] for row in halves(self.program)] if self._next_is_disk else [self._bytes(g) for g in groups]
        if len(self.tiers) == 1:
            return len(sizes), len(sizes)
        needed = lower_bounds(self.program, self.tiers)[0].needed_bytes
        if self._next_is_disk:  # what a moment uses is then among what stays
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

    def glance(self) -> _Found | None:
        """A good number of resident groups, looking at few."""
        least, most = self.limits
        return self._grid(least, max(least, most - (most - least) // 4), 2)

    def explore(self, known: _Found) -> _Found:
        """The best number of resident groups, from a grid and then nearer to its best point."""
        least, most = self.limits
        grid = self._grid(least, most, _GRID)
        best = grid if grid is not None and _beats(grid.score, known.score) else known
        step = (most - least) // (_GRID - 1)
        while step > 1:
            step = -(-step // 2)
            for resident in (best.resident - step, best.resident + step):
                if least <= resident <= most:
                    best = self._better(best, resident, 0) or best
        return best

    def _grid(self, least: int, most: int, points: int) -> _Found | None:
        """The best of evenly spread numbers; where none works, between the last too few and the first too many."""
        places = sorted({least + (most - least) * place // (points - 1) for place in range(points)})
        best: _Found | None = None
        for resident in places:
            best = self._better(best, resident, 0)
        low = max((place for place in places if self._lacks(place, below=True)), default=least)
        high = min((place for place in places if self._lacks(place, below=False)), default=most)
        return self._grid(low, high, 3) if best is None and high - low > 1 else best

    def _lacks(self, resident: int, *, below: bool) -> bool:
        score = self.score(resident)
        return isinstance(score, NoRoom) and (score.tier > 0) is below

    def _better(self, best: _Found | None, resident: int, stride: int) -> _Found | None:
        score = self.score(resident, stride)
        if isinstance(score, NoRoom):
            return best
        found = _Found(score, resident, stride)
        return found if best is None or _beats(found.score, best.score) else best

    def stream(self, best: _Found) -> _Found:
        """Whether stepping some of the lower groups on the compute tier helps, where the compute queue stands idle."""
        if self.tiers[0].name != "device" or best.score[0] <= self._floor_s * _SAME:
            return best
        found: _Found | None = best
        for stride in _STREAM_STRIDES:
            found = self._better(found, best.resident, stride)
        return found or best


def _beats(score: _Score, other: _Score) -> bool:
    if score[0] > other[0] * _SAME:
        return False
    return score[0] * _SAME < other[0] or (score[1], score[0]) < (other[1], other[0])


def _best(scorers: list[_Scorer], setup: Setup) -> tuple[_Scorer, _Found] | None:
    leader: tuple[_Scorer, _Found] | None = None
    for scorer in scorers:
        found = scorer.glance()
        if found is not None and (leader is None or _beats(found.score, leader[1].score)):
            leader = scorer, found
    if leader is None:
        return None
    scorer, found = leader
    return scorer, scorer.stream(found if setup.quick else scorer.explore(found))


def _tight(programs: list[Program], tiers: tuple[Tier, ...], machine: Machine, setup: Setup) -> Planned:
    """The plan for tight memory, with the smallest groups first; `DoesNotFit` names the least that is lacking."""
    refusals = []
    for program in sorted(programs, key=largest_extent_bytes):
        try:
            check_fits(program, tiers)
            return _checked(program, tight_plan(program, tiers), machine, setup, None)
        except DoesNotFit as error:
            refusals.append(error)
    raise min(refusals, key=lambda error: error.needed_bytes - error.available_bytes)

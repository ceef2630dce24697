"""Find a good plan: group size, what stays on the accelerator, and where optimizer steps run.

Candidates are planned and simulated (`scores`). The one with the least predicted step time wins. Moved bytes decide
between equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._extents import Precision, SegmentName
from ps_core._layout import Layout, lay_out, units
from ps_core._plan import Plan, Tier, check_tiers
from ps_core._planner.bounds import check_fits, largest_extent_bytes
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.low_memory_plan import tight_plan
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import Placement
from ps_core._planner.scores import Found, Scorer, beats
from ps_core._planner.tier_division import NoRoom, make_frame
from ps_core._program import Program, check_training
from ps_core._simulate.clock import Prediction, simulate
from ps_core._simulate.engine_timing import Issuing, Priced
from ps_core._simulate.machine import Machine
from ps_core._simulate.steps_in_backward import EarlySteps, check_steps_in_backward
from ps_core._trace import Trace
from ps_core._units import check_flag, check_whole
from ps_core._verify import verify

_GROUP_FACTORS = (1.52, 1.01, 0.52, 3.04, 6.08, 12.2)
"""Group sizes tried, in units of the trace's typical unit (for a GPT its feed-forward half: 1.5 is a layer)."""
_QUICK_FACTORS = (1.52, 0.52)
_MOST_GROUPS = 700
_ENOUGH_INSTRS = 40_000
"""Number of instructions in candidates after which no other group size is examined closely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Say how a trace is to be trained: what `find_plan` may not change."""

    ranks: int = 1
    """Processes that divide one copy of the model."""
    copies: int = 1
    """Copies of the model that train together."""
    ranks_per_node: int | None = None
    """Processes of a node; None: all."""
    precision: Precision = Precision.BF16
    accumulate: int = 1
    training: bool = True
    states: int = 2
    """Tensors in fp32 that the optimizer keeps for each parameter besides its master."""
    policy: Policy = Policy.BELADY
    group_numel: int | None = None
    """Elements of a group; None: searched."""
    nonmodel_overhead: float = 0.0
    step_in_backward: bool = False
    """Step groups as soon as their gradients are complete; see `_simulate.steps_in_backward`."""
    speculative: bool = False
    """With ``step_in_backward``: in a way that can be undone, if gradients must be clipped."""
    quick: bool = False
    """Try few candidates, to learn whether something fits, and roughly how fast it is."""

    def __post_init__(self) -> None:
        check_training(self.precision, self.states, self.accumulate, self.copies, self.nonmodel_overhead)
        if not isinstance(self.policy, Policy):
            raise InvalidInput(f"policy must be a Policy, found {self.policy!r}")
        check_whole("ranks", self.ranks, 1)
        for name in ("ranks_per_node", "group_numel"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for name in ("training", "step_in_backward", "speculative", "quick"):
            check_flag(name, getattr(self, name))
        if self.training:
            check_steps_in_backward(
                self.precision,
                self.accumulate,
                self.ranks * self.copies,
                in_backward=self.step_in_backward,
                undoable=self.speculative,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A verified plan and its prediction."""

    program: Program
    plan: Plan
    prediction: Prediction
    placement: Placement | None
    """Where groups are; None: the tight planner's plan, whose steps are on no fixed tier."""
    early: EarlySteps = field(default_factory=dict)
    """Steps that begin within backward."""
    speculative: bool = False
    """True if those can be undone."""


def find_plan(
    trace: Trace, tiers: tuple[Tier, ...], machine: Machine, *, setup: Setup, layout: Layout | None = None
) -> Planned:
    """Return the best plan found for a trace on these tiers, verified; raise `DoesNotFit` if there is none.

    With a ``layout`` the parameters are packed already, and only the moves are searched for.
    """
    search = Search(trace, tiers, machine, setup=setup, layout=layout)
    return search.roomy() or search.tight()


class TooSlow(Exception):
    """Say that a plan would take longer than wanted, so it was not completed."""

    def __init__(self, step_time_s: float) -> None:
        super().__init__(f"{step_time_s:.3g} s a step")
        self.step_time_s = step_time_s


class Search:
    """Search for one plan. With several ways to train, ask each for a roomy plan before a tight one."""

    def __init__(
        self,
        trace: Trace,
        tiers: tuple[Tier, ...],
        machine: Machine,
        *,
        setup: Setup,
        layout: Layout | None = None,
        slowest_s: float = float("inf"),
    ) -> None:
        """Begin; ``slowest_s``: raise `TooSlow` as soon as a step is known to be slower."""
        check_tiers(tiers)
        self._tiers, self._machine, self._setup, self._slowest_s = tiers, machine, setup, slowest_s
        programs = _programs(trace, setup) if layout is None else [_program(trace, layout, setup)]
        self._scorers = [
            Scorer(
                program,
                tiers,
                machine,
                policy=setup.policy,
                ranks_per_node=setup.ranks_per_node,
                in_backward=setup.step_in_backward,
                undoable=setup.speculative,
            )
            for program in programs
        ]

    def roomy(self) -> Planned | None:
        """Return the best plan whose moves overlap; None: memory is too small for one."""
        while (best := _best(self._scorers, self._setup)) is not None:
            scorer, found = best
            self._check_speed(found.score[0])
            placement = scorer.placement(found.resident, found.sixteenths, found.within)
            try:
                plan = make_plan(make_frame(scorer.program, self._tiers, placement, self._setup.policy))
            except NoRoom as refusal:  # raised by a segment that scoring leaves out
                scorer.refuse(found, refusal)
            else:
                return _checked(scorer.program, plan, self._machine, self._setup, placement)
        return None

    def glance_s(self) -> float | None:
        """Return the step's seconds of the best plan with overlapping moves, not completed; None: there is none."""
        best = _best(self._scorers, self._setup)
        return None if best is None else best[1].score[0]

    def beats(self, other: Search) -> bool:
        """Return True if a few candidates of this search are better than as many of the other's, which has a plan.

        Both pack the same parameters; the group size that is best in the other search is compared.
        """
        scorer, found = _rough(other._scorers)[0]
        own = _rough([self._scorers[other._scorers.index(scorer)]])
        return bool(own) and beats(own[0][1].score, found.score)

    def tight(self) -> Planned:
        """Return the plan for tight memory, smallest groups first; `DoesNotFit` names the least that is missing."""
        programs = [scorer.program for scorer in self._scorers]
        return _tight(programs, self._tiers, self._machine, self._setup, self._check_step)

    def _check_step(self, program: Program, plan: Plan) -> None:
        setup = self._setup
        issuing = _issuing(program, self._tiers, self._machine, setup)
        self._check_speed(sum(timed.seconds for timed in issuing.time(plan.home, _priced(issuing, program, plan))))

    def _check_speed(self, step_time_s: float) -> None:
        if step_time_s > self._slowest_s:
            raise TooSlow(step_time_s)


def plan_with(
    placement: Placement | None,
    trace: Trace,
    tiers: tuple[Tier, ...],
    machine: Machine,
    *,
    setup: Setup,
    layout: Layout,
) -> Planned:
    """Return the plan of a placement that an earlier search found, verified (None: the tight planner's)."""
    check_tiers(tiers)
    program = _program(trace, layout, setup)
    if placement is None:
        return _tight([program], tiers, machine, setup)
    try:
        plan = make_plan(make_frame(program, tiers, placement, setup.policy))
    except NoRoom:
        raise InvalidInput("there is no room for this placement") from None
    return _checked(program, plan, machine, setup, placement)


def passes_alone_s(planned: Planned, machine: Machine, *, setup: Setup) -> float:
    """Return the seconds that the forward and backward passes of a training step take if no optimizer step is made."""
    program, plan = planned.program, planned.plan
    issuing = _issuing(program, plan.tiers, machine, setup)
    passes = [priced for priced in _priced(issuing, program, plan) if priced.segment.name is not SegmentName.STEP]
    return sum(timed.seconds for timed in issuing.time(plan.home, passes))


def adopted(plan: Plan, trace: Trace, layout: Layout, machine: Machine, *, setup: Setup) -> Planned:
    """Verify a plan that another process found for the same trace, and return it."""
    return _checked(_program(trace, layout, setup), plan, machine, setup, None)


def with_policy(planned: Planned, policy: Policy, machine: Machine, setup: Setup) -> Planned:
    """Return a plan with the same layout and placement under another eviction policy, for comparison."""
    if planned.placement is None:
        raise InvalidInput("a plan for tight memory has no policy to exchange")
    plan = make_plan(make_frame(planned.program, planned.plan.tiers, planned.placement, policy))
    return _checked(planned.program, plan, machine, replace(setup, policy=policy), planned.placement)


def _checked(program: Program, plan: Plan, machine: Machine, setup: Setup, placement: Placement | None) -> Planned:
    verify(program, plan)
    prediction = simulate(
        program,
        plan,
        machine,
        ranks_per_node=setup.ranks_per_node,
        step_in_backward=setup.step_in_backward,
        speculative=setup.speculative,
    )
    early: EarlySteps = {}
    if setup.step_in_backward:
        issuing = _issuing(program, plan.tiers, machine, setup)
        early = issuing.early_steps(plan.home, _priced(issuing, program, plan))
    speculative = setup.speculative
    return Planned(
        program=program, plan=plan, prediction=prediction, placement=placement, early=early, speculative=speculative
    )


def _issuing(program: Program, tiers: tuple[Tier, ...], machine: Machine, setup: Setup) -> Issuing:
    early, undoable = setup.step_in_backward, setup.speculative
    return Issuing(program, tiers, machine, setup.ranks_per_node, in_backward=early, undoable=undoable)


def _priced(issuing: Issuing, program: Program, plan: Plan) -> list[Priced]:
    """Return the segments of one training step with their costs."""
    return [issuing.price(plan.home, plan.segment(name)) for name in program.iteration()]


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
        states=setup.states,
        copies=setup.copies,
    )


def group_sizes(trace: Trace, setup: Setup) -> list[int]:
    """Return the group sizes to try: around the trace's typical unit, and not so small that there are too many."""
    if setup.group_numel is not None:
        return [setup.group_numel]
    sizes = sorted(sum(trace.tensors[index].numel for index in unit) for _, unit in units(trace))
    covered, parameters = zip(sizes, accumulate(sizes), strict=True), trace.parameters
    typical = next((size for size, total in covered if 2 * total >= parameters), 1)
    factors = _QUICK_FACTORS if setup.quick else _GROUP_FACTORS
    least = parameters / _MOST_GROUPS
    return sorted({max(1, int(max(typical * factor, least))) for factor in factors})


# The best of them.


def _best(scorers: list[Scorer], setup: Setup) -> tuple[Scorer, Found] | None:
    """Return the best placement of all programs; one that moves nothing wherever there is room for it."""
    rough = _rough(scorers)
    if not rough or rough[0][0].moves_nothing(rough[0][1]):
        return rough[0] if rough else None
    best: tuple[Scorer, Found] | None = None
    for scorer, found in rough:
        if best is not None and (setup.quick or sum(each.planned_instrs for each in scorers) > _ENOUGH_INSTRS):
            break
        refined = scorer.stream(found if setup.quick else scorer.explore(found))
        if best is None or beats(refined.score, best[1].score):
            best = scorer, refined
    return best


def _rough(scorers: list[Scorer]) -> list[tuple[Scorer, Found]]:
    """Return a good placement of each program after trying few, the best first; if any moves nothing, only those."""
    found = [(scorer, one) for scorer in scorers if (one := scorer.all_resident()) is not None]
    if found:
        return sorted(found, key=lambda row: row[1].score)
    found = [(scorer, one) for scorer in scorers if (one := scorer.glance()) is not None]
    for place in range(1, len(found)):  # the leader first: "clearly better" is no order to sort by
        if beats(found[place][1].score, found[0][1].score):
            found[0], found[place] = found[place], found[0]
    return [*found[:1], *sorted(found[1:], key=lambda row: row[1].score)]


def _tight(
    programs: list[Program],
    tiers: tuple[Tier, ...],
    machine: Machine,
    setup: Setup,
    check: Callable[[Program, Plan], None] = lambda program, plan: None,
) -> Planned:
    refusals = []
    for program in sorted(programs, key=largest_extent_bytes):
        try:
            check_fits(program, tiers)
            return _checked(program, tight_plan(program, tiers, partial(check, program)), machine, setup, None)
        except DoesNotFit as error:
            refusals.append(error)
    try:
        raise min(refusals, key=lambda error: error.needed_bytes - error.available_bytes)
    finally:
        refusals.clear()  # see [Note: what an exception holds]

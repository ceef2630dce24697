"""Compute how long a plan's training step takes, and what it moves, without running it.

Two step times are predicted: what the engine takes (`engine_timing`), and what the plan itself would allow. All other
figures are about the first.

[Note: the clock]
This note is about what a plan allows. Every queue does one thing at a time, in list order. An instruction starts when
its queue is free and everything in ``after`` is complete. How long it takes is in [Note: cost model]. In a later
segment an instruction also waits for earlier segments' instructions on the same bytes, non-model bytes included. These
waits are kept per *cell*, a range of a tier's addresses that no slot begins or ends inside. Two things matter of a
segment: when each cell was last touched, and which instruction touches it first. A slot that is reserved and released
within the segment waits at its `Reserve` and is left at its `Release`. A correct plan has all its other uses between
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ps_core._errors import PatrickStarError, PlanMismatch
from ps_core._plan import Copy, Gather, Plan, Queue, ReduceScatter, Run, Segment, check_tiers
from ps_core._program import Program
from ps_core._simulate.engine_timing import Issuing, Timed
from ps_core._simulate.machine import Machine
from ps_core._simulate.memory_spans import Cells, Scan
from ps_core._simulate.steps_in_backward import check_steps_in_backward
from ps_core._trace import Phase
from ps_core._units import check_whole

QUEUE_NAMES = {
    Queue.COMPUTE: "compute",
    Queue.H2D: "host->device",
    Queue.D2H: "device->host",
    Queue.DISK_R: "disk->host",
    Queue.DISK_W: "host->disk",
    Queue.COLL: "collectives",
    Queue.CPU: "cpu",
}
LINKS = (Queue.H2D, Queue.D2H, Queue.DISK_R, Queue.DISK_W)
WIRE = "wire"
"""The entry of ``moved_bytes`` for what one process sends to the others."""
NETWORK = "network"
"""The entry of ``moved_bytes`` for what of it crosses between nodes; only where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction for one training step, on one process, once steps follow each other steadily."""

    step_time_s: float
    """Seconds of a step as the engine carries the plan out; see [Note: as the engine issues]."""
    bound_step_time_s: float
    """Seconds of a step if segments overlapped wherever the plan's addresses allow it; see [Note: the clock]."""
    forward_s: float
    """Seconds to the start of backward, with what the first moment waits for."""
    backward_s: float
    """Seconds of backward, to the end of the last moment."""
    update_s: float
    """Seconds of the rest of the step: optimizer, and moves that neither pass hides."""
    stalled_s: float
    """Seconds of the step in which the compute queue has nothing to do."""
    launching_s: float
    """Seconds of the host thread to launch the step's work on an accelerator, which are no part of ``busy_s``."""
    elapsed_s: float
    """Seconds of all steps simulated for the bound."""
    busy_s: Mapping[str, float]
    """Seconds by queue, in a step."""
    moved_bytes: Mapping[str, int]
    """Bytes by link, in a step; ``wire`` is what one process sends to the others.

    ``network``, with several nodes, is what crosses between them, divided by the number of processes.
    """
    evictions: int
    """Copies to a slower tier in a step."""
    peak_bytes: Mapping[str, int]
    """Bytes by tier, non-model bytes included, with instructions taken in list order."""

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON and logs."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in plain.items()}


def simulate(
    program: Program,
    plan: Plan,
    machine: Machine,
    *,
    ranks_per_node: int | None = None,
    iterations: int = 3,
    step_in_backward: bool = False,
    speculative: bool = False,
) -> Prediction:
    """Predict a training step (without training: one evaluation).

    ``iterations`` steps are simulated for the bound, which is taken from the last of them. ``ranks_per_node`` None: all
    processes share one node. ``speculative``: steps within backward can be undone. A wrong plan raises `PlanMismatch`
    if this function notices it; only `verify` finds every fault.
    """
    check_whole("iterations", iterations, 1)
    check_tiers(plan.tiers)
    if program.training:
        processes, accumulate = program.ranks * program.copies, program.accumulate
        check_steps_in_backward(
            program.precision, accumulate, processes, in_backward=step_in_backward, undoable=speculative
        )
    issuing = Issuing(program, plan.tiers, machine, ranks_per_node, in_backward=step_in_backward, undoable=speculative)
    try:
        return _simulate(program, plan, issuing, iterations, alone=machine.played_copy_bandwidth > 0)
    except PatrickStarError:
        raise
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        raise PlanMismatch(f"not a plan of this program; verify says why: {type(error).__name__}: {error}") from error


def _simulate(program: Program, plan: Plan, issuing: Issuing, iterations: int, *, alone: bool) -> Prediction:
    """Predict a training step; ``alone``: one thread does everything, so nothing overlaps but what it launched."""
    plan = plan.numbered_by_place()
    names = program.iteration()
    scans = {name: Scan(plan, plan.segment(name)) for name in dict.fromkeys(names)}
    priced = {name: issuing.price(plan.home, plan.segment(name)) for name in scans}
    timed = issuing.time(plan.home, [priced[name] for name in names])
    steps = [_Stage(plan.segment(name), scans[name], each) for name, each in zip(names, timed, strict=True)]
    stages = dict(zip(names, steps, strict=True))
    elapsed = bound = sum(stage.timed.seconds for stage in steps)
    if alone:
        elapsed *= iterations
    else:
        clock = _Clock(Cells(plan, scans.values()), stages.values())
        rounds = [[clock.run(stages[name]) for name in names] for _ in range(iterations)]
        elapsed = max(clock.free)
        bound = _period(steps, rounds, elapsed)
    return _predict(program, plan, steps, bound, elapsed)


def moved_bytes(program: Program, plan: Plan) -> dict[str, int]:
    """Return the bytes over each link in one training step, without a clock."""
    counts = [0] * len(Queue)
    wire = 0
    for name in program.iteration():
        for instr in plan.segment(name).instrs:
            if isinstance(instr.op, Copy):
                counts[instr.queue] += instr.op.bytes
            elif isinstance(instr.op, Gather | ReduceScatter):
                sums, group = isinstance(instr.op, ReduceScatter), instr.op.group
                wire += program.sum_bytes(group) + program.across_bytes(group) if sums else program.gather_bytes(group)
    return _links(plan, counts, wire)


def peak_bytes(program: Program, plan: Plan) -> dict[str, int]:
    """Return the most bytes of each tier in use at once in a training step, non-model bytes included."""
    return _peaks(plan, [Scan(plan, plan.segment(name)).peaks for name in dict.fromkeys(program.iteration())])


def _links(plan: Plan, counts: list[int], wire: int, network: int = 0) -> dict[str, int]:
    names = [tier.name for tier in plan.tiers]
    moved = {}
    for queue in LINKS:
        source, target = QUEUE_NAMES[queue].split("->")
        if counts[queue] or (source in names and target in names):
            moved[QUEUE_NAMES[queue]] = counts[queue]
    return {**moved, WIRE: wire, **({NETWORK: network} if network else {})}


def _peaks(plan: Plan, rows: list[list[int]]) -> dict[str, int]:
    return {tier.name: max(row[index] for row in rows) for index, tier in enumerate(plan.tiers)}


class _Stage:
    """A segment with what it touches, and its timing when it runs alone."""

    def __init__(self, segment: Segment, scan: Scan, timed: Timed) -> None:
        self.instrs, self.scan, self.timed = segment.instrs, scan, timed
        self.runs = [(place, instr.op.visit) for place, instr in enumerate(segment.instrs) if isinstance(instr.op, Run)]

    def begin(self, place: int, ends: list[float]) -> float:
        """Return when an instruction begins."""
        return ends[place] - self.timed.work.seconds[place]


Joins = dict[int, list[tuple[int, int, int]]]
Leaves = list[tuple[int, int, int, tuple[int, ...]]]


class _Clock:
    """Track when each queue is free, and when each cell of memory was last touched; see [Note: the clock]."""

    def __init__(self, cells: Cells, stages: Iterable[_Stage]) -> None:
        self.free = [0.0] * len(Queue)
        self._settled = [[0.0] * count for count in cells.counts]
        self._cells: dict[_Stage, tuple[Joins, Leaves]] = {
            stage: (
                {place: [cells.of(span) for span in spans] for place, spans in stage.scan.joins.items()},
                [(*cells.of(span), tuple(last.values())) for span, last in stage.scan.leaves.items()],
            )
            for stage in stages
        }

    def run(self, stage: _Stage) -> list[float]:
        """Run a segment; return when each of its instructions ends."""
        free, settled = self.free, self._settled
        joins, leaves = self._cells[stage]
        ends: list[float] = []
        for place, (instr, seconds) in enumerate(zip(stage.instrs, stage.timed.work.seconds, strict=True)):
            begin = free[instr.queue]
            for earlier in instr.after:
                if ends[earlier] > begin:  # noqa: PLR1730 - max() costs more than all else here
                    begin = ends[earlier]
            for tier, low, high in joins.get(place, ()):
                begin = max(begin, max(settled[tier][low:high], default=0.0))
            free[instr.queue] = end = begin + seconds
            ends.append(end)
        for tier, low, high, last in leaves:
            when = max([ends[place] for place in last])
            row = settled[tier]
            for cell in range(low, high):
                if row[cell] < when:  # noqa: PLR1730
                    row[cell] = when
        return ends


def _predict(program: Program, plan: Plan, steps: list[_Stage], bound: float, elapsed: float) -> Prediction:
    timed = [stage.timed for stage in steps]
    busy = [sum(each.busy_s[queue] for each in timed) for queue in Queue]
    step = sum(each.seconds for each in timed)
    forward, backward = _passes(program, steps)
    launching_s = sum(each.work.launching_s for each in timed)
    copied = [sum(each.work.copied_bytes[queue] for each in timed) for queue in Queue]
    return Prediction(
        step_time_s=step,
        # The bound waits for all of ``after``, streams for less.
        bound_step_time_s=min(step, max(bound, *busy, launching_s)),
        forward_s=forward,
        backward_s=backward,
        update_s=max(0.0, step - forward - backward),
        stalled_s=max(0.0, step - busy[Queue.COMPUTE]),
        launching_s=launching_s,
        elapsed_s=elapsed,
        busy_s={QUEUE_NAMES[queue]: busy[queue] for queue in Queue},
        moved_bytes=_links(
            plan,
            copied,
            sum(each.work.wire_bytes for each in timed),
            sum(each.work.network_bytes for each in timed),
        ),
        evictions=sum(each.work.evictions for each in timed),
        peak_bytes=_peaks(plan, [stage.scan.peaks for stage in steps]),
    )


def _period(steps: list[_Stage], rounds: list[list[list[float]]], elapsed: float) -> float:
    """Return the time between the first moments of the last two steps."""
    first = next((number for number, stage in enumerate(steps) if stage.runs), None)
    if len(rounds) == 1 or first is None:
        return elapsed / len(rounds)
    place = steps[first].runs[0][0]
    before, last = (steps[first].begin(place, ends[first]) for ends in rounds[-2:])
    return last - before


def _passes(program: Program, steps: list[_Stage]) -> tuple[float, float]:
    """Return the seconds of a step's forward and backward passes, each to the next part's start, or its own end."""
    forward = backward = 0.0
    for stage in steps:
        if not stage.runs:
            continue
        ends = stage.timed.ends
        turn = finish = ends[stage.runs[-1][0]] - stage.timed.begin
        for place, visit in stage.runs:
            if program.visits[visit].phase is Phase.BACKWARD:
                turn = stage.begin(place, ends) - stage.timed.begin
                break
        forward += turn
        backward += finish - turn
    return forward, backward

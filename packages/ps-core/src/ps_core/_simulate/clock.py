"""Running a plan against a clock instead of memory: how long a training step takes, and what it moves.

[Note: the clock]
Every queue does one thing at a time, in list order; an instruction starts when its queue is free and everything in
``after`` is complete; see [Note: cost model] for how long it then takes. Where one segment follows another, the
instruction also waits for every earlier segment's instruction that touched bytes it touches, non-model bytes of the
tide included. That join is kept per *cell*, a stretch of a tier's addresses that no slot begins or ends inside: what
matters of a segment is when each cell was last touched, and for each instruction the cells it is the first (of its
queue) to touch. A slot that is reserved and released within the segment joins at its `Reserve` and is left at its
`Release`: a sound plan puts all its other users between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Copy, Gather, Plan, Queue, ReduceScatter, Run, Segment
from ps_core._program import Program
from ps_core._simulate.costs import Costs, Work
from ps_core._simulate.machine import Machine
from ps_core._simulate.played import OneThread
from ps_core._simulate.scan import Cells, Scan
from ps_core._trace import Phase

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What simulating a plan says of one training step, on one process, once steps follow each other steadily."""

    step_time_s: float
    forward_s: float
    backward_s: float
    update_s: float
    """The rest of the step: optimizer, and moves that neither pass hides."""
    stalled_s: float
    """Of the step, how long the compute queue has nothing to do."""
    elapsed_s: float
    """All simulated steps from a standing start."""
    busy_s: Mapping[str, float]
    """Per queue and step."""
    moved_bytes: Mapping[str, int]
    """Per link and step; ``wire`` is what one process sends to the others."""
    evictions: int
    """Copies to a slower tier, a step."""
    peak_bytes: Mapping[str, int]
    """Per tier, non-model bytes included, with instructions taken in list order."""

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON and logs."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in plain.items()}


def simulate(
    program: Program, plan: Plan, machine: Machine, *, ranks_per_node: int | None = None, iterations: int = 3
) -> Prediction:
    """Predict a training step (without training: one evaluation) from its last simulated repetition.

    ``ranks_per_node`` None: all processes share one node. Damaged plans raise `PlanMismatch` where the damage shows;
    only `verify` promises to find it.
    """
    if iterations < 1:
        raise InvalidInput(f"iterations must be at least 1, found {iterations}")
    per_node = program.ranks if ranks_per_node is None else ranks_per_node
    if per_node < 1 or program.ranks % per_node:
        raise InvalidInput(f"{program.ranks} ranks cannot be spread over nodes of {per_node}")
    costs = Costs(program, plan.tiers, machine, per_node)
    names = program.iteration()
    scans = {name: Scan(plan, plan.segment(name)) for name in dict.fromkeys(names)}
    works = {name: costs.price(plan.segment(name).instrs, scan.slot_bytes) for name, scan in scans.items()}
    cells = Cells(plan, scans.values())
    stages = {name: _Stage(plan.segment(name), scan, works[name], cells) for name, scan in scans.items()}
    clock: _Clock | _Played = _Played() if machine.played_copy_bandwidth else _Clock(cells.counts)
    rounds = [[(stages[name], clock.run(stages[name])) for name in names] for _ in range(iterations)]
    return _predict(program, plan, rounds, max(clock.free))


def moved_bytes(program: Program, plan: Plan) -> dict[str, int]:
    """Bytes over each link in one training step, without a clock."""
    counts = [0] * len(Queue)
    wire = 0
    for name in program.iteration():
        for instr in plan.segment(name).instrs:
            if isinstance(instr.op, Copy):
                counts[instr.queue] += instr.op.bytes
            elif isinstance(instr.op, Gather | ReduceScatter):
                shard = program.layout.groups[instr.op.group].shard_numel
                wire += shard * (program.ranks - 1) * program.weight_bytes
    return _links(plan, counts, wire)


def peak_bytes(program: Program, plan: Plan) -> dict[str, int]:
    """The most bytes of each tier in use at once in a training step, non-model bytes included, without a clock."""
    return _peaks(plan, [Scan(plan, plan.segment(name)).peaks for name in dict.fromkeys(program.iteration())])


def _links(plan: Plan, counts: list[int], wire: int) -> dict[str, int]:
    names = [tier.name for tier in plan.tiers]
    moved = {}
    for queue in LINKS:
        source, target = QUEUE_NAMES[queue].split("->")
        if counts[queue] or (source in names and target in names):
            moved[QUEUE_NAMES[queue]] = counts[queue]
    return {**moved, WIRE: wire}


def _peaks(plan: Plan, rows: list[list[int]]) -> dict[str, int]:
    return {tier.name: max(row[index] for row in rows) for index, tier in enumerate(plan.tiers)}


Row = tuple[int, float, tuple[int, ...], "list[tuple[int, int, int]] | None"]


class _Stage:
    """A segment ready for the clock."""

    def __init__(self, segment: Segment, scan: Scan, work: Work, cells: Cells) -> None:
        self.work, self.segment = work, segment
        joins = {place: [cells.of(span) for span in spans] for place, spans in scan.joins.items()}
        instrs = segment.instrs
        self.rows: list[Row] = [
            (instr.queue, seconds, instr.after, joins.get(place))
            for place, (instr, seconds) in enumerate(zip(instrs, work.seconds, strict=True))
        ]
        self.leaves = [(*cells.of(span), tuple(last.values())) for span, last in scan.leaves.items()]
        self.peaks = scan.peaks
        self.runs = [(place, instr.op.visit) for place, instr in enumerate(instrs) if isinstance(instr.op, Run)]
        self.busy = [0.0] * len(Queue)
        for instr, seconds in zip(instrs, work.seconds, strict=True):
            self.busy[instr.queue] += seconds


class _Clock:
    """When each queue is free, and when each cell of memory was last touched."""

    def __init__(self, cells: list[int]) -> None:
        self.free = [0.0] * len(Queue)
        self._settled = [[0.0] * count for count in cells]

    def run(self, stage: _Stage) -> list[float]:
        """Run a segment; when each of its instructions ends."""
        free, settled = self.free, self._settled
        ends: list[float] = []
        note = ends.append
        try:
            for queue, seconds, after, joins in stage.rows:
                begin = free[queue]
                for earlier in after:
                    if ends[earlier] > begin:  # noqa: PLR1730 - max() costs more than all else here
                        begin = ends[earlier]
                if joins:
                    for tier, low, high in joins:
                        ready = max(settled[tier][low:high], default=0.0)
                        if ready > begin:  # noqa: PLR1730
                            begin = ready
                free[queue] = end = begin + seconds
                note(end)
        except IndexError as error:
            raise PlanMismatch("an instruction waits for one that comes later") from error
        for tier, low, high, last in stage.leaves:
            when = max([ends[place] for place in last])
            row = settled[tier]
            for cell in range(low, high):
                if row[cell] < when:  # noqa: PLR1730
                    row[cell] = when
        return ends


class _Played:
    """The same where the CPU plays the accelerator."""

    def __init__(self) -> None:
        self._thread = OneThread()
        self.free = self._thread.free

    def run(self, stage: _Stage) -> list[float]:
        """Run a segment; when each of its instructions ends."""
        return self._thread.run(stage.segment, stage.work.seconds, stage.work.thread_s)


Round = list[tuple["_Stage", list[float]]]
"""One simulated step: each segment with when its instructions end."""


def _predict(program: Program, plan: Plan, rounds: list[Round], elapsed: float) -> Prediction:
    stages = [stage for stage, _ in rounds[-1]]
    busy = [sum(stage.busy[queue] for stage in stages) for queue in Queue]
    whole = max(0, len(rounds) - 2)
    forward, backward = _passes(program, rounds[whole])
    step = max(_period(rounds, elapsed), *busy)
    copied = [sum(stage.work.copied_bytes[queue] for stage in stages) for queue in Queue]
    return Prediction(
        step_time_s=step,
        forward_s=forward,
        backward_s=backward,
        update_s=max(0.0, step - forward - backward),
        stalled_s=step - busy[Queue.COMPUTE],
        elapsed_s=elapsed,
        busy_s={QUEUE_NAMES[queue]: busy[queue] for queue in Queue},
        moved_bytes=_links(plan, copied, sum(stage.work.wire_bytes for stage in stages)),
        evictions=sum(stage.work.evictions for stage in stages),
        peak_bytes=_peaks(plan, [stage.peaks for stage in stages]),
    )


def _period(rounds: list[Round], elapsed: float) -> float:
    """From the first moment of the last step but one to that of the last."""
    begins = [
        next((ends[place] - stage.rows[place][1] for stage, ends in steps for place, _ in stage.runs[:1]), None)
        for steps in rounds
    ]
    if len(begins) == 1 or begins[-1] is None or begins[-2] is None:
        return elapsed / len(rounds)
    return begins[-1] - begins[-2]


def _passes(program: Program, steps: Round) -> tuple[float, float]:
    """Seconds of a step's forward and backward passes, each to the start of what follows, or its own last end."""
    forward = backward = 0.0
    for stage, ends in steps:
        if not stage.runs:
            continue
        begin, finish = ends[stage.runs[0][0]] - stage.rows[stage.runs[0][0]][1], ends[stage.runs[-1][0]]
        turn = finish
        for place, visit in stage.runs:
            if program.visits[visit].phase is Phase.BACKWARD:
                turn = ends[place] - stage.rows[place][1]
                break
        forward += turn - begin
        backward += finish - turn
    return forward, backward

"""Execute a plan on real bytes, in any order the plan allows, as a reference.

Simulated processes share nothing but collectives. The next instruction to complete is any that `after` and the queues
allow. A seeded generator chooses it, or moves are preferred, or computation; see [Note: what a plan means] in `_plan`.
In every order the result must equal that of `train_unconstrained`, bit for bit.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ps_core._errors import PlanMismatch
from ps_core._extents import Extent, Kind, Precision, SegmentName
from ps_core._plan import (
    Decide,
    Gather,
    Instr,
    Op,
    Plan,
    Queue,
    ReduceScatter,
    Run,
    slots_of,
)
from ps_core._program import Program
from ps_core._reference.floats import Floats, pack
from ps_core._reference.operations import carry_out, gather, reduce_scatter
from ps_core._reference.process_memory import Range, slot_ranges
from ps_core._reference.simulated_process import Leg, Process
from ps_core._reference.state_lifecycle import Lifecycle
from ps_core._reference.training_rules import Decision, Network, Scaler, Trained, Training, check_network


class Order(StrEnum):
    """Name how the next instruction to complete is chosen."""

    RANDOM = "random"
    EARLIEST = "earliest"
    """Moves as early as allowed, moments as late as possible."""
    LATEST = "latest"
    """Moves only when nothing can be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One instruction that has just been carried out."""

    rank: int
    iteration: int
    segment: SegmentName
    instr: Instr
    used_bytes: tuple[int, ...]
    """Bytes of slots, by tier."""
    nonmodel_bytes: int
    """Non-model bytes on the compute tier; during a moment's own event, those it ran with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Options of executing a plan."""

    order: Order = Order.RANDOM
    seed: int = 0
    overlap: bool = False
    """True: a segment begins while the one before still moves, ordered by address. False: one after the other."""
    observer: Callable[[Observed], None] | None = None


def execute(
    network: Network, program: Program, plan: Plan, training: Training, execution: Execution | None = None
) -> Trained:
    """Train by the plan; raise `PlanMismatch` or `IllegalTransition` if the plan is wrong."""
    check_network(network, program)
    return _Reference(network, program, plan, training, execution or Execution()).train()


@dataclass(slots=True)
class _Flight:
    """One segment that is running on one process."""

    leg: Leg
    queues: dict[Queue, deque[Instr]]
    left: dict[int, list[Range]]
    """Instructions that are not complete, with the addresses that they touch."""

    def ready(self, instr: Instr) -> bool:
        return not any(other in self.left for other in instr.after)


@dataclass(slots=True)
class _Reference:
    network: Network
    program: Program
    plan: Plan
    training: Training
    execution: Execution
    scaler: Scaler = field(init=False)
    processes: list[Process] = field(init=False)
    flights: list[list[_Flight]] = field(init=False)
    """Running segments of each process, oldest first."""
    legs: list[Leg] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        alike = all(not group.fp32 for group in self.program.layout.groups)  # the states' rules are for one precision
        ranks, watched = range(self.program.ranks), alike and not self.execution.overlap
        self.scaler = Scaler(self.training, self.program.precision)
        self.rng = random.Random(self.execution.seed)
        self.processes = [
            Process(
                rank=rank,
                network=self.network,
                program=self.program,
                plan=self.plan,
                training=self.training,
                lifecycle=Lifecycle(self.program, self.plan.stepped_in_backward) if watched else None,
            )
            for rank in ranks
        ]
        self.flights = [[] for _ in ranks]

    # The course of training.

    def train(self) -> Trained:
        norms, skipped = [], []
        if self.program.training and SegmentName.PROLOGUE in self.program.segments:
            self._launch(SegmentName.PROLOGUE, -1, 0)
        for iteration in range(self.training.iterations):
            if self.program.training:
                decision = self._iterate(iteration)
                norms.append(decision.norm)
                if decision.skip:
                    skipped.append(iteration)
            if not self.program.training or iteration in self.training.evaluate_after:
                self._launch(SegmentName.EVAL, iteration, -1)
        self._land(0)
        for process in self.processes if self.legs else ():
            self._check_home(process, self.legs[-1])
        return self._result(tuple(norms), tuple(skipped))

    def _iterate(self, iteration: int) -> Decision:
        for micro, name in enumerate(self.program.iteration()[:-1]):
            self._launch(name, iteration, micro)
        while len(self.decisions) <= iteration:
            self._complete_one()
        decision = self.decisions[iteration]
        self._launch(SegmentName.SKIP if decision.skip else SegmentName.STEP, iteration, 0, decision)
        return decision

    def _launch(self, name: SegmentName, iteration: int, micro: int, decision: Decision | None = None) -> None:
        """Begin a segment on every process, once at most one other is running (none without overlap)."""
        self._land(1 if self.execution.overlap else 0)
        leg = Leg(
            serial=len(self.legs),
            name=name,
            iteration=iteration,
            micro=micro,
            loss_scale=self.scaler.loss_scale,
            decision=decision,
        )
        self.legs.append(leg)
        instrs = self.plan.segment(name).instrs
        ranges = slot_ranges(self.plan, instrs)
        for process, flights in zip(self.processes, self.flights, strict=True):
            process.legs.append(name)
            queues: dict[Queue, deque[Instr]] = {queue: deque() for queue in Queue}
            left = {}
            for instr in instrs:
                queues[instr.queue].append(instr)
                left[instr.id] = self._touched(instr.op, ranges) if self.execution.overlap else []
            flights.append(_Flight(leg, queues, left))

    def _touched(self, op: Op, ranges: dict[int, list[Range]]) -> list[Range]:
        touched = [row for slot in slots_of(op) for row in ranges.get(slot, ())]
        if isinstance(op, Run):
            top = self.plan.tiers[0].capacity_bytes
            touched.append((0, top - op.nonmodel_bytes, top))
        return touched

    def _land(self, most: int) -> None:
        """Continue until at most ``most`` segments are running."""
        while max(map(len, self.flights)) > most:
            self._complete_one()

    # What completes next.

    def _complete_one(self) -> None:
        choices = list(self._choices())
        if not choices:
            self._remove_completed()
            if not any(self.flights):
                return
            stuck = [instr.id for flight in self.flights[0] for line in flight.queues.values() for instr in [*line][:1]]
            raise PlanMismatch(f"deadlock: each of the instructions {stuck} waits for another")
        order = self.execution.order
        if order is not Order.RANDOM:
            wanted = [choice for choice in choices if (choice[2].queue is Queue.COMPUTE) is (order is Order.LATEST)]
            choices = wanted or choices
        rank, place, instr = self.rng.choice(choices)
        if isinstance(instr.op, Gather | ReduceScatter | Decide):
            self._together(place, instr)
        else:
            carry_out(self.processes[rank], self.flights[rank][place].leg, instr.op)
            self._completed(rank, place, instr)
        self._remove_completed()

    def _choices(self) -> Iterator[tuple[int, int, Instr]]:
        """Yield what may complete now: process, index of the segment among those running, instruction."""
        heads = [list(self._heads(rank)) for rank in range(self.program.ranks)]
        for rank, rows in enumerate(heads):
            for place, instr in rows:
                joint = isinstance(instr.op, Gather | ReduceScatter | Decide)
                if not joint or (rank == 0 and self._met(place, instr, heads[1:])):
                    yield rank, place, instr

    def _met(self, place: int, instr: Instr, heads: list[list[tuple[int, Instr]]]) -> bool:
        """Return True if every other process has reached the same collective."""
        serial = self.flights[0][place].leg.serial
        return all(
            any(found is instr and self.flights[rank][other].leg.serial == serial for other, found in rows)
            for rank, rows in enumerate(heads, start=1)
        )

    def _heads(self, rank: int) -> Iterator[tuple[int, Instr]]:
        flights = self.flights[rank]
        for queue in Queue:
            for place, flight in enumerate(flights):
                if flight.queues[queue]:
                    instr = flight.queues[queue][0]
                    if flight.ready(instr) and not any(_collide(flight, instr, older) for older in flights[:place]):
                        yield place, instr
                    break

    def _together(self, place: int, instr: Instr) -> None:
        leg = self.flights[0][place].leg
        if isinstance(instr.op, Gather):
            gather(self.processes, leg, instr.op)
        elif isinstance(instr.op, ReduceScatter):
            reduce_scatter(self.processes, leg, instr.op)
        else:
            self._decide()
        for rank, flights in enumerate(self.flights):
            mine = next(index for index, flight in enumerate(flights) if flight.leg.serial == leg.serial)
            self._completed(rank, mine, instr)

    def _decide(self) -> None:
        parts: list[tuple[int, bool]] = []
        for process in self.processes:
            if sorted(process.parts) != list(self.program.stepped):
                raise PlanMismatch(f"norms of groups {sorted(process.parts)} decide for {list(self.program.stepped)}")
            parts += process.parts.values()
        self.decisions.append(self.scaler.decide(sum(part[0] for part in parts), all(part[1] for part in parts)))

    def _completed(self, rank: int, place: int, instr: Instr) -> None:
        flight, bank = self.flights[rank][place], self.processes[rank].bank
        flight.queues[instr.queue].popleft()
        del flight.left[instr.id]
        if self.execution.observer is not None:
            self.execution.observer(
                Observed(
                    rank=rank,
                    iteration=flight.leg.iteration,
                    segment=flight.leg.name,
                    instr=instr,
                    used_bytes=tuple(bank.used_bytes(tier) for tier in range(len(bank.tiers))),
                    nonmodel_bytes=instr.op.nonmodel_bytes if isinstance(instr.op, Run) else bank.nonmodel_bytes,
                )
            )

    def _remove_completed(self) -> None:
        """Remove segments that are complete, and check how they ended."""
        for rank, flights in enumerate(self.flights):
            while flights and not flights[0].left:
                self._check_end(self.processes[rank], flights.pop(0).leg)

    def _check_end(self, process: Process, leg: Leg) -> None:
        if process.lifecycle is None:
            return  # the next segment may have changed home slots already, and checks what it reads
        self._check_home(process, leg)
        process.lifecycle.end(leg.name)

    def _check_home(self, process: Process, leg: Leg) -> None:
        """Check that home slots are in place with what the segment must leave there, and that no other slot exists."""
        if len(process.bank.slots) != len(self.plan.home):
            raise PlanMismatch(
                f"{leg.name.value} ends with {len(process.bank.slots)} slots, not {len(self.plan.home)} of home"
            )
        for held in self.plan.home:
            version = self.program.exit(leg.name, process.early).get(held.extent)
            process.check(leg, process.bank.home(held), held.extent, version)

    # What came of it.

    def _result(self, norms: tuple[float, ...], skipped: tuple[int, ...]) -> Trained:
        tensors = self.program.trace.tensors
        learning = [index for index, tensor in enumerate(tensors) if tensor.trainable and self.program.training]
        fp32 = Precision.FP32
        return Trained(
            losses=self._losses(micro=True),
            evaluations=self._losses(micro=False),
            norms=norms,
            skipped=skipped,
            weights=tuple(
                pack(self._tensor(self.program.weight_of(group), index), self.program.precision_of(group))
                for index, group in enumerate(self.program.layout.group_of)
            ),
            masters=tuple(pack(self._tensor(Kind.P32, index), fp32) for index in learning),
            momenta=tuple(pack(self._state(Kind.M, index), fp32) for index in learning),
            variances=tuple(pack(self._state(Kind.V, index), fp32) for index in learning),
        )

    def _losses(self, *, micro: bool) -> tuple[float, ...]:
        return tuple(
            loss
            for leg in self.legs
            if leg.name.is_micro is micro
            for process in self.processes
            for loss in process.losses.get(leg.serial, ())
        )

    def _state(self, kind: Kind, tensor: int) -> Floats:
        """Return a tensor's optimizer state; zeros if the program has none of this kind."""
        if kind in self.program.state_kinds:
            return self._tensor(kind, tensor)
        return array("f", bytes(4 * self.program.trace.tensors[tensor].numel))

    def _tensor(self, kind: Kind, tensor: int) -> Floats:
        """Return a tensor's values, put together from every process's home slots."""
        group = self.program.layout.groups[self.program.layout.group_of[tensor]]
        extent, whole = Extent(kind, group.index), array("f")
        held = next(held for held in self.plan.home if held.extent == extent)
        for process in self.processes:
            whole.extend(process.read(process.bank.home(held), extent))
        start = group.offsets[group.tensors.index(tensor)]
        return whole[start : start + self.program.trace.tensors[tensor].numel]


def _collide(flight: _Flight, instr: Instr, older: _Flight) -> bool:
    """Return True if an older segment has yet to touch bytes that an instruction touches."""
    mine = flight.left[instr.id]
    return any(
        a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for theirs in older.left.values() for b in theirs for a in mine
    )

"""Train with unlimited memory: every planned execution must equal the result bit for bit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ps_core._extents import Precision
from ps_core._options import for_parameter
from ps_core._program import Program
from ps_core._reference.floats import Floats, add, pack, rounded
from ps_core._reference.optim import step_run
from ps_core._reference.training_rules import (
    Call,
    Network,
    Scaler,
    Trained,
    Training,
    check_network,
    contribute,
    measure,
    overflowed,
    reduce,
)
from ps_core._trace import Phase


def train_unconstrained(network: Network, program: Program, training: Training) -> Trained:
    """Train with separate memory for every extent.

    Of the program only precisions, processes, micro-batches and whether it trains matter; its groups do not.
    """
    check_network(network, program)
    return _Oracle(network, program, training).train()


@dataclass(slots=True)
class _Oracle:
    network: Network
    program: Program
    training: Training
    scaler: Scaler = field(init=False)
    weights: list[Floats] = field(init=False)
    masters: list[Floats] = field(init=False)
    momenta: list[Floats] = field(init=False)
    variances: list[Floats] = field(init=False)
    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaler = Scaler(self.training, self.program.precision)
        tensors = range(len(self.network.trace.tensors))
        self.masters = [self.network.initial(index) for index in tensors]
        self.weights = [rounded(master, self._precision(index)) for index, master in enumerate(self.masters)]
        self.momenta = [array("f", bytes(4 * len(master))) for master in self.masters]
        self.variances = [array("f", bytes(4 * len(master))) for master in self.masters]

    def train(self) -> Trained:
        for iteration in range(self.training.iterations):
            if self.program.training:
                self._iterate(iteration)
            if not self.program.training or iteration in self.training.evaluate_after:
                for rank in range(self.program.ranks):
                    self._pass(iteration, -1, rank, self.evaluations)
        return self._result()

    def _iterate(self, iteration: int) -> None:
        totals = dict[int, Floats]()
        rounds = self.program.overwrites or not self.program.sharded
        for micro in range(self.program.accumulate):
            ranks = [self._pass(iteration, micro, rank, self.losses) for rank in range(self.program.ranks)]
            for tensor in ranks[0]:
                summed = self._precision(tensor) if rounds else Precision.FP32
                gradient = reduce([local[tensor] for local in ranks], summed)
                totals[tensor] = add(totals[tensor], gradient) if micro else gradient
        parts = [measure(gradient) for gradient in totals.values()]
        decision = self.scaler.decide(sum(part[0] for part in parts), all(part[1] for part in parts))
        self.norms.append(decision.norm)
        if decision.skip:
            self.skipped.append(iteration)
            return
        for tensor, gradient in totals.items():
            optimizer = for_parameter(self.training.optimizer, self.network.trace.tensors[tensor].name)
            stepped = step_run(
                optimizer,
                decision.step,
                decision.grad_scale,
                self.masters[tensor],
                self.momenta[tensor],
                self.variances[tensor],
                gradient,
            )
            self.masters[tensor] = stepped[0]
            self.weights[tensor] = rounded(stepped[0], self._precision(tensor))
            kept = zip((self.momenta, self.variances), stepped[1:], strict=True)
            for rows, values in list(kept)[: self.program.states]:
                rows[tensor] = values

    def _pass(self, iteration: int, micro: int, rank: int, losses: list[float]) -> dict[int, Floats]:
        """Run all moments (an evaluation's for micro-batch -1) on one process; return the gradients."""
        learns = micro >= 0
        batch = self.training.batch(iteration, micro, rank)
        gradients: dict[int, Floats] = {}
        activations: dict[int, bytes] = {}
        saved: dict[str, object] = {}
        for index, moment in enumerate(self.network.trace.moments):
            if not learns and moment.phase is Phase.BACKWARD:
                break
            call = Call(
                moment=index,
                weights={tensor: self.weights[tensor] for tensor in moment.reads},
                activations={name: activations[name] for name in moment.takes},
                saved=saved,
                batch=batch,
                loss_scale=self.scaler.loss_scale,
                training=learns,
            )
            outcome = self.network.run(call)
            saved = dict(outcome.saved)
            activations.update(outcome.activations)
            if outcome.loss is not None:
                losses.append(outcome.loss)
            arrived = outcome.grads
            if rank == 0 and iteration in self.training.overflow_at:
                arrived = overflowed(moment, arrived)
            for tensor in moment.grads:
                gradients[tensor] = contribute(gradients.get(tensor), arrived[tensor], self._precision(tensor))
        return gradients

    def _precision(self, tensor: int) -> Precision:
        return self.program.precision_of(self.program.layout.group_of[tensor])

    def _result(self) -> Trained:
        fp32 = Precision.FP32
        tensors = self.network.trace.tensors
        learning = [index for index, tensor in enumerate(tensors) if tensor.trainable and self.program.training]
        return Trained(
            losses=tuple(self.losses),
            evaluations=tuple(self.evaluations),
            norms=tuple(self.norms),
            skipped=tuple(self.skipped),
            weights=tuple(pack(weight, self._precision(index)) for index, weight in enumerate(self.weights)),
            masters=tuple(pack(self.masters[index], fp32) for index in learning),
            momenta=tuple(pack(self.momenta[index], fp32) for index in learning),
            variances=tuple(pack(self.variances[index], fp32) for index in learning),
        )

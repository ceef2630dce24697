"""Define the mathematics of training that no plan may change: networks, sums of gradients, decisions to step.

[Note: why placement cannot change the result]
Every operation is elementwise with one order of operands, or an exact sum. Contributions to a gradient are added in the
order of the moments and rounded to the weights' precision each time. Processes are summed in rank order in fp32.
Squares are summed exactly. So neither the cut into groups and shards nor the order of moves changes a bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._options import AdamW, Optimizer
from ps_core._program import Program
from ps_core._reference.floats import Floats, add, all_finite, norm_of, rounded, single, square_sum
from ps_core._trace import Moment, Trace

Saved: TypeAlias = Mapping[str, object]
"""What a process keeps between moments besides weights and listed activations; never changed in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Hold everything that a moment may read."""

    moment: int
    weights: Mapping[int, Floats]
    """The weights that the moment reads."""
    activations: Mapping[int, bytes]
    """The activations that the moment takes."""
    saved: Saved
    batch: bytes
    loss_scale: float
    """The factor of the loss's gradient."""
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold everything that a moment produces."""

    grads: Mapping[int, Floats] = field(default_factory=dict)
    activations: Mapping[int, bytes] = field(default_factory=dict)
    saved: Saved = field(default_factory=dict)
    """The next moment's ``Call.saved``."""
    loss: float | None = None


class Network(Protocol):
    """Protocol of what can be trained. Each moment is a pure function of its `Call`."""

    @property
    def trace(self) -> Trace:
        """Return what the moments read, change, make and take."""

    def initial(self, tensor: int) -> Floats:
        """Return a tensor's first value, unrounded."""

    def run(self, call: Call) -> Outcome:
        """Run one moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Say how a network is trained: data, optimizer, clipping, loss scale, and simulated failures."""

    batch: Callable[[int, int, int], bytes]
    """A function that returns the data of an iteration, micro-batch and process. Evaluations have micro-batch -1."""
    iterations: int = 3
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=0.01))
    max_grad_norm: float | None = None
    loss_scale: float = 1.0
    """The first loss scale in fp16; other precisions use none."""
    growth_interval: int = 2000
    """Steps without overflow after which the loss scale doubles."""
    evaluate_after: frozenset[int] = frozenset()
    """Iterations followed by an evaluation."""
    overflow_at: frozenset[int] = frozenset()
    """Iterations in which a gradient of process 0 gets an infinity."""

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.growth_interval < 1 or not self.loss_scale > 0:
            raise InvalidInput("iterations must be at least 0, growth_interval at least 1, loss_scale above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of a training; two runs of the same training are equal in every field, bit for bit."""

    losses: tuple[float, ...]
    """Losses by iteration, micro-batch and process."""
    evaluations: tuple[float, ...]
    """Losses of evaluations by evaluation and process."""
    norms: tuple[float, ...]
    """Gradient norm of each iteration, unscaled; infinite where the step was skipped."""
    skipped: tuple[int, ...]
    """Iterations without a step."""
    weights: tuple[bytes, ...]
    """Each tensor as moments read it, in the weights' precision."""
    masters: tuple[bytes, ...]
    """Each trainable tensor in fp32, then likewise:"""
    momenta: tuple[bytes, ...]
    variances: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The consequence of an iteration's gradients: a factor for them, or no step."""

    grad_scale: float
    skip: bool
    step: int
    """The number of the step, from 1."""
    norm: float


@dataclass(slots=True)
class Scaler:
    """Clip by the global norm, adapt the loss scale, and count steps."""

    training: Training
    precision: Precision
    loss_scale: float = 1.0
    steps: int = 0
    _since_overflow: int = 0

    def __post_init__(self) -> None:
        if self.precision is Precision.FP16:
            self.loss_scale = self.training.loss_scale

    def decide(self, square_sums: int, finite: bool) -> Decision:
        """Decide from the exact sum of squares of all finite gradients, and whether all are finite."""
        if not finite:
            self._since_overflow = 0
            if self.precision is Precision.FP16:
                self.loss_scale = max(1.0, self.loss_scale / 2)
            return Decision(0.0, True, self.steps, float("inf"))
        norm = norm_of(square_sums) / self.loss_scale
        most = self.training.max_grad_norm
        clip = 1.0 if most is None else min(1.0, most / (norm + 1e-6))
        decision = Decision(single(clip / self.loss_scale), False, self.steps + 1, norm)
        self.steps += 1
        self._since_overflow += 1
        if self.precision is Precision.FP16 and self._since_overflow % self.training.growth_interval == 0:
            self.loss_scale *= 2
        return decision


def measure(gradient: Floats) -> tuple[int, bool]:
    """Return the exact sum of squares of a piece of gradient, and whether all of it is finite."""
    return (square_sum(gradient), True) if all_finite(gradient) else (0, False)


def contribute(so_far: Floats | None, more: Floats, precision: Precision) -> Floats:
    """Add one contribution to a gradient, in the weights' precision."""
    fresh = rounded(more, precision)
    return fresh if so_far is None else rounded(add(so_far, fresh), precision)


def reduce(gradients: list[Floats], precision: Precision) -> Floats:
    """Sum every process's gradient in rank order in fp32; return it in the weights' precision."""
    total = gradients[0]
    for gradient in gradients[1:]:
        total = add(total, gradient)
    return rounded(total, precision)


def overflowed(moment: Moment, gradients: Mapping[int, Floats]) -> Mapping[int, Floats]:
    """Return a moment's gradients, with an infinity among them."""
    if not moment.grads:
        return gradients
    victim = moment.grads[0]
    return {**gradients, victim: array("f", [float("inf"), *gradients[victim][1:]])}


def last_reads(trace: Trace) -> tuple[int, ...]:
    """Return, for each tensor, the last moment that reads it (-1: none)."""
    last = [-1] * len(trace.tensors)
    for index, moment in enumerate(trace.moments):
        for tensor in moment.reads:
            last[tensor] = index
    return tuple(last)


def check_network(network: Network, program: Program) -> None:
    """Raise for a program made for another network."""
    if program.trace != network.trace:
        raise InvalidInput("the program was made for another network's trace")

"""From a model and a machine to what training it there would be like.

[Note: two ways of counting TFLOPS]
The published figures this field compares count 8 operations per parameter and token: 2 forward, 4 backward, 2 for the
forward that activation checkpointing repeats, and nothing for attention or for the head's width. *Model FLOPs* count
what the mathematics needs: three times the forward moments' operations, attention included, repetition excluded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._layout import lay_out
from ps_core._planner.bounds import Need, largest_extent_bytes, lower_bounds
from ps_core._planner.policy import Policy
from ps_core._planner.search import Planned, Setup, find_plan
from ps_core._program import Precision, Program
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import Machine
from ps_core._trace import Phase, Trace
from ps_core._units import ALIGNMENT_BYTES
from ps_core._workloads.analytic import Workload, analytic_trace
from ps_core._workloads.shapes import TransformerShape

_STALLED = 0.05
"""A plan that leaves the compute queue idle longer than this part of a step is worth a second try."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is to be trained, and on what."""

    cluster: Cluster
    machine: Machine
    batch: int = 4
    seq: int = 1024
    precision: Precision = Precision.BF16
    accumulate: int = 1
    checkpointing: bool = True
    offload_checkpoints: bool | None = False
    """None: whichever is faster, or fits."""
    chunked_loss: bool = False
    policy: Policy = Policy.BELADY
    group_bytes: int | None = None
    """Of computed weights; None: searched."""
    quick: bool = False

    def __post_init__(self) -> None:
        for key in ("batch", "seq", "accumulate"):
            if getattr(self, key) < 1:
                raise InvalidInput(f"{key} must be at least 1, found {getattr(self, key)}")
        if self.group_bytes is not None and self.group_bytes < self.weight_bytes:
            raise InvalidInput(f"a group of {self.group_bytes} bytes cannot hold one parameter")
        if self.offload_checkpoints and not self.checkpointing:
            raise InvalidInput("--offload-checkpoints needs --checkpointing")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one computed weight."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def peak_flops(self) -> float:
        """The machine's rate for this precision."""
        return self.machine.matmul_flops_fp32 if self.precision is Precision.FP32 else self.machine.matmul_flops

    def workload(self, *, offload: bool) -> Workload:
        """What one process computes in a micro-batch."""
        return Workload(
            batch=self.batch,
            seq=self.seq,
            precision_bytes=self.weight_bytes,
            checkpointing=self.checkpointing,
            offload_checkpoints=offload,
            chunked_loss=self.chunked_loss,
        )

    def setup(self) -> Setup:
        """The same for the planner."""
        return Setup(
            ranks=self.cluster.gpus,
            ranks_per_node=self.cluster.ranks_per_node,
            precision=self.precision,
            accumulate=self.accumulate,
            policy=self.policy,
            group_numel=None if self.group_bytes is None else self.group_bytes // self.weight_bytes,
            nonmodel_overhead=self.cluster.nonmodel_overhead,
            quick=self.quick,
        )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A verified plan, and the speed it promises."""

    training: Training
    trace: Trace
    planned: Planned
    offloads: bool
    """Whether checkpoints may leave the compute tier."""

    @property
    def step_time_s(self) -> float:
        """Of one optimizer step, all micro-batches included."""
        return self.planned.prediction.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """All processes together."""
        return self._per_s(self.trace.tokens) * self.training.cluster.gpus

    @property
    def tflops_per_gpu(self) -> float:
        """By the published convention; see [Note: two ways of counting TFLOPS]."""
        return self._per_s(8 * self.trace.parameters * self.trace.tokens) / 1e12

    @property
    def model_tflops_per_gpu(self) -> float:
        """What the mathematics needs; see [Note: two ways of counting TFLOPS]."""
        forward = sum(moment.flops for moment in self.trace.moments if moment.phase is Phase.FORWARD)
        return self._per_s(3 * forward) / 1e12

    def _per_s(self, count: float) -> float:
        return count * self.training.accumulate / self.step_time_s if self.step_time_s else 0.0


Subject: TypeAlias = TransformerShape | Trace
"""What is to be trained: a shape, or a recorded trace, whose checkpoints and loss are as they were recorded."""


def forecast(subject: Subject, training: Training) -> Forecast:
    """Plan the training of a model; `DoesNotFit` if there is no plan."""
    asked = training.offload_checkpoints
    if isinstance(subject, Trace) or asked is not None or not _may_offload(training):
        return _forecast(trace_of(subject, training, offload=bool(asked)), training)
    offloading = replace(training, offload_checkpoints=True)
    try:
        plain = _forecast(trace_of(subject, training, offload=False), training)
    except DoesNotFit:
        return forecast(subject, offloading)
    told = plain.planned.prediction
    if told.stalled_s <= _STALLED * told.step_time_s:
        return plain
    try:
        return min(plain, forecast(subject, offloading), key=lambda found: found.step_time_s)
    except DoesNotFit:
        return plain


def bounds(subject: Subject, training: Training) -> tuple[Need, ...]:
    """What any plan with small groups needs at the least."""
    return lower_bounds(_bound_program(subject, training), training.cluster.tiers())


def surely_fits(subject: Subject, training: Training) -> bool | None:
    """Whether there is a plan, by the planner's promise; None: too near the bound to say without planning."""
    program, tiers = _bound_program(subject, training), training.cluster.tiers()
    slack = largest_extent_bytes(program) + ALIGNMENT_BYTES
    margins = [-need.missing_bytes for need in lower_bounds(program, tiers)]
    if min(margins) < 0:
        return False
    compute, whole, *step = margins
    return True if compute >= slack and whole >= slack * len(tiers) and min(step, default=slack) >= slack else None


def trace_of(subject: Subject, training: Training, *, offload: bool) -> Trace:
    """The moments of one micro-batch."""
    return subject if isinstance(subject, Trace) else analytic_trace(subject, training.workload(offload=offload))


def _may_offload(training: Training) -> bool:
    return training.checkpointing and len(training.cluster.tiers()) > 1


def _bound_program(subject: Subject, training: Training) -> Program:
    trace = trace_of(subject, training, offload=bool(training.offload_checkpoints))
    setup = training.setup()
    numel = setup.group_numel or max(1, int(1.05 * _typical_numel(trace)))
    return Program(
        trace=trace,
        layout=lay_out(trace, group_numel=numel, ranks=setup.ranks),
        precision=setup.precision,
        accumulate=setup.accumulate,
        nonmodel_overhead=setup.nonmodel_overhead,
    )


def _typical_numel(trace: Trace) -> int:
    """The size of tensor that half of the parameters are not above."""
    left, sizes = trace.parameters / 2, sorted(tensor.numel for tensor in trace.tensors)
    for size in sizes:
        left -= size
        if left <= 0:
            return size
    return 1


def _forecast(trace: Trace, training: Training) -> Forecast:
    planned = find_plan(trace, training.cluster.tiers(), training.machine, setup=training.setup())
    return Forecast(training=training, trace=trace, planned=planned, offloads=bool(trace.activations))

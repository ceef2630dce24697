"""Predict what training a model on a machine would be like.

[Note: two ways of counting TFLOPS]
The usual published figures count 8 operations per parameter and token. Those are 2 in forward, 4 in backward, and 2 for
the forward that activation checkpointing repeats. Attention and the head's width are not counted. By contrast, *model
FLOPs* count what the mathematics needs: three times the forward moments' operations. Attention is included, repetition
is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from ps_core._command.tables import HostTable
from ps_core._errors import DoesNotFit, InvalidInput
from ps_core._extents import Precision
from ps_core._layout import lay_out
from ps_core._plan import Tier
from ps_core._planner.bounds import ALL_TIERS, Need, largest_extent_bytes, lower_bounds
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.search import Planned, Search, Setup, passes_alone_s
from ps_core._program import Program
from ps_core._simulate.clock import Prediction
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import Machine
from ps_core._trace import Phase, Trace
from ps_core._units import ALIGNMENT_BYTES
from ps_core._workloads.head_and_token_table import check_apart
from ps_core._workloads.shapes import Family, TransformerShape, tensors
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

_STALLED = 0.05
"""If a plan leaves the compute queue idle for a larger fraction of a step, another one is tried."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Describe how a model is to be trained, and on what machine."""

    cluster: Cluster
    machine: Machine
    batch: int = 4
    seq: int = 1024
    precision: Precision = Precision.BF16
    accumulate: int = 1
    optimizer_states: int = 2
    """Number of fp32 tensors that the optimizer keeps for each parameter besides its master."""
    checkpointing: bool = True
    offload_checkpoints: bool | None = False
    """True: offload inputs of recomputed blocks; None: whichever is faster, or fits."""
    chunked_loss: bool = True
    """True: compute the loss in chunks, as ps_models does."""
    untied_head: bool = False
    """Give a model whose head is its token table a head of its own."""
    cpu_embedding: bool = False
    """Keep the token table in host memory; see `keeps_table_apart`."""
    head_tiles: int = 1
    policy: Policy = Policy.BELADY
    step_in_backward: bool = False
    """True: step groups during backward, as ``Options(step="in_backward")``."""
    speculative: bool = False
    """True, with that: in a way that can be undone, as ``Options(step="speculative")``."""
    group_bytes: int | None = None
    """Bytes of a group's computed weights; None: searched."""
    quick: bool = False

    def __post_init__(self) -> None:
        for key in ("batch", "seq", "accumulate", "head_tiles"):
            if getattr(self, key) < 1:
                raise InvalidInput(f"{key} must be at least 1, found {getattr(self, key)}")
        if self.group_bytes is not None and self.group_bytes < self.weight_bytes:
            raise InvalidInput(f"a group of {self.group_bytes} bytes cannot hold one parameter")
        if self.offload_checkpoints and not self.checkpointing:
            raise InvalidInput("--offload-checkpoints needs --checkpointing")

    @property
    def keeps_table_apart(self) -> bool:
        """Return True if ``cpu_embedding`` has an effect: one process, and an accelerator.

        Otherwise the table is a parameter like others.
        """
        return self.cpu_embedding and self.cluster.gpus == 1 and self.cluster.device_memory > 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of one computed weight."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def peak_flops(self) -> float:
        """Return the machine's rate for this precision."""
        return self.machine.matmul_flops_fp32 if self.precision is Precision.FP32 else self.machine.matmul_flops

    def workload(self, *, offload: bool) -> Workload:
        """Return the work of one process in a micro-batch."""
        return Workload(
            batch=self.batch,
            seq=self.seq,
            precision_bytes=self.weight_bytes,
            checkpointing=self.checkpointing,
            offload_checkpoints=offload,
            chunked_loss=self.chunked_loss,
            cpu_embedding=self.keeps_table_apart,
            head_tiles=self.head_tiles,
        )

    def setup(self) -> Setup:
        """Return the setup of the training for the planner."""
        return Setup(
            ranks=self.cluster.gpus // self.cluster.copies,
            copies=self.cluster.copies,
            ranks_per_node=self.cluster.ranks_per_node,
            precision=self.precision,
            accumulate=self.accumulate,
            states=self.optimizer_states,
            policy=self.policy,
            step_in_backward=self.step_in_backward,
            speculative=self.speculative,
            group_numel=None if self.group_bytes is None else self.group_bytes // self.weight_bytes,
            nonmodel_overhead=self.cluster.nonmodel_overhead,
            quick=self.quick,
        )


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A verified plan, and the speed that it predicts."""

    training: Training
    trace: Trace
    planned: Planned
    offloads: bool
    """True if inputs of recomputed blocks may leave the compute tier."""
    table: HostTable | None = None
    """The token table if it is in host memory: the plan does not contain it."""

    @cached_property
    def prediction(self) -> Prediction:
        """Return the plan's prediction, with the time and bytes of the table added."""
        told = self.planned.prediction
        return told if self.table is None else self.table.added_to(told, self.training.machine)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers, the table's part included."""
        return self.training.cluster.tiers()

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return self.trace.parameters + (self.table.numel if self.table is not None else 0)

    @property
    def step_time_s(self) -> float:
        """Return the seconds of one optimizer step, all micro-batches included, as the engine runs the plan."""
        return self.prediction.step_time_s

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of all processes together."""
        return self._per_s(self.trace.tokens) * self.training.cluster.gpus

    @property
    def passes_alone_s(self) -> float:
        """Return the seconds of forward and backward passes, if optimizer steps took no time."""
        return passes_alone_s(self.planned, self.training.machine, setup=self.training.setup())

    @property
    def bound_tokens_per_s(self) -> float:
        """Return the tokens a second if segments overlapped as the plan allows."""
        return self.tokens_per_s * self.step_time_s / (self.prediction.bound_step_time_s or 1.0)

    @property
    def tflops_per_gpu(self) -> float:
        """Return TFLOPS by the published convention; see [Note: two ways of counting TFLOPS]."""
        return self._per_s(8 * self.parameters * self.trace.tokens) / 1e12

    @property
    def model_tflops_per_gpu(self) -> float:
        """Return TFLOPS of the mathematics; see [Note: two ways of counting TFLOPS]."""
        forward = sum(moment.flops for moment in self.trace.moments if moment.phase is Phase.FORWARD)
        return self._per_s(3 * forward) / 1e12

    def _per_s(self, count: float) -> float:
        return count * self.training.accumulate / self.step_time_s if self.step_time_s else 0.0


Subject: TypeAlias = TransformerShape | Trace
"""What is to be trained: a shape, or a recorded trace, whose checkpoints and loss are as they were recorded."""


def forecast(subject: Subject, training: Training) -> Forecast:
    """Plan the training of a model; raise `DoesNotFit` if there is no plan."""
    asked = training.offload_checkpoints
    if isinstance(subject, Trace) or asked is not None or not _may_offload(training):
        way = Way(subject, training, offload=bool(asked))
        return way.roomy() or way.tight()
    keeping, offloading = (Way(subject, training, offload=offload) for offload in (False, True))
    plain = keeping.roomy()
    if plain is not None:
        stalled = plain.prediction.stalled_s > _STALLED * plain.step_time_s
        if not stalled or not offloading.beats(keeping):
            return plain
    found = [one for one in (plain, offloading.roomy()) if one is not None] or _tight((keeping, offloading))
    return min(found, key=lambda one: one.step_time_s)


def _tight(ways: tuple[Way, ...]) -> list[Forecast]:
    """Return plans for tight memory; raise the last way's `DoesNotFit` if there are none."""
    found, last = [], ways[-1]
    for way in ways:
        try:
            found.append(way.tight())
        except DoesNotFit:
            if way is last and not found:
                raise
    return found


class Way:
    """Plan one way to train a model: with or without inputs of recomputed blocks that may leave the compute tier."""

    def __init__(self, subject: Subject, training: Training, *, offload: bool, slowest_s: float = float("inf")) -> None:
        """Begin; ``slowest_s``: raise `TooSlow` as soon as a step is known to be slower."""
        self._training, self._slowest_s = training, slowest_s
        self._trace, self._table = trace_of(subject, training, offload=offload), table_of(subject, training)

    def roomy(self) -> Forecast | None:
        """Return the best plan whose moves overlap; None: memory is too small for one."""
        planned = None if self._lacks_table else self._search.roomy()
        return None if planned is None else self._forecast(planned)

    def tokens_per_s(self) -> float | None:
        """Return the speed of all processes, roughly; None: memory is too small for a plan whose moves overlap."""
        step_s = None if self._lacks_table else self._search.glance_s()
        if step_s is None:
            return None
        training = self._training
        waited_s = 0.0 if self._table is None else sum(self._table.seconds(training.machine))
        return self._trace.tokens * training.accumulate * training.cluster.gpus / (step_s + waited_s)

    def beats(self, other: Way) -> bool:
        """Return True if a few plans of this way are clearly better than as many of the other's."""
        return self._search.beats(other._search)

    def tight(self) -> Forecast:
        """Return the plan for tight memory; raise `DoesNotFit` if there is none."""
        table, tiers = self._table, self._training.cluster.tiers()
        if table is not None:
            _need_of(table, tiers).check()
        try:
            return self._forecast(self._search.tight())
        except DoesNotFit as refusal:
            held = table.held_bytes if table is not None and refusal.tier == ALL_TIERS else 0
            raise DoesNotFit(
                tier=refusal.tier,
                moment=refusal.moment,
                needed_bytes=refusal.needed_bytes + held,
                available_bytes=refusal.available_bytes + held,
                proven=refusal.proven,
            ) from None

    @property
    def _lacks_table(self) -> bool:
        return self._table is not None and _need_of(self._table, self._training.cluster.tiers()).missing_bytes > 0

    @cached_property
    def _search(self) -> Search:
        training, tiers = self._training, self._training.cluster.tiers()
        left = tiers if self._table is None else self._table.left(tiers)
        return Search(self._trace, left, training.machine, setup=training.setup(), slowest_s=self._slowest_s)

    def _forecast(self, planned: Planned) -> Forecast:
        offloads = bool(self._trace.activations)
        return Forecast(
            training=self._training, trace=self._trace, planned=planned, offloads=offloads, table=self._table
        )


def bounds(subject: Subject, training: Training) -> tuple[Need, ...]:
    """Return the least bytes that any plan with small groups needs, with those of a table on the host."""
    table, tiers = table_of(subject, training), training.cluster.tiers()
    if table is None:
        return lower_bounds(_bound_program(subject, training), tiers)
    own = _need_of(table, tiers)
    if own.missing_bytes > 0:
        return (own,)
    compute, whole, *step = lower_bounds(_bound_program(subject, training), table.left(tiers))
    both = whole.needed_bytes + table.held_bytes, whole.available_bytes + table.held_bytes
    return (compute, Need(whole.where, whole.moment, *both), *step)


def surely_fits(subject: Subject, training: Training) -> bool | None:
    """Return True if a plan surely exists, False if none can; None: only planning can tell."""
    compute, *others = bounds(subject, training)
    if max(need.missing_bytes for need in (compute, *others)) > 0:
        return False
    whole, *more = others
    slack = largest_extent_bytes(_bound_program(subject, training)) + ALIGNMENT_BYTES
    step = [-need.missing_bytes for need in more]
    table, tiers = table_of(subject, training), training.cluster.tiers()
    lower = [tier.capacity_bytes for tier in (table.left(tiers) if table is not None else tiers)[1:]]
    roomy = -compute.missing_bytes >= slack and -whole.missing_bytes >= slack * len(tiers)
    return True if roomy and min((*lower, *step), default=slack) >= slack else None


def model_of(subject: Subject, training: Training) -> Subject:
    """Return the subject with the requested head."""
    apart = training.untied_head, training.cpu_embedding, training.head_tiles > 1
    if isinstance(subject, Trace):
        if any(apart):
            raise InvalidInput(
                "--untied-head, --cpu-embedding and --head-tiles make another model, and a trace is of the model it "
                "was recorded of: give a NAME or --hf"
            )
        return subject
    if training.untied_head and subject.family is Family.BERT:
        raise InvalidInput(f"--untied-head: the head of {subject.name} is its token table, as every BERT's is here")
    return replace(subject, tied_head=subject.tied_head and not training.untied_head)


def table_of(subject: Subject, training: Training) -> HostTable | None:
    """Return the token table if it stays in host memory; else None."""
    if isinstance(subject, Trace) or not training.keeps_table_apart:
        return None
    return HostTable(
        numel=tensors(subject)[0].numel,
        width=subject.hidden,
        tokens=training.batch * training.seq,
        element_bytes=training.weight_bytes,
        accumulate=training.accumulate,
        states=training.optimizer_states,
    )


def trace_of(subject: Subject, training: Training, *, offload: bool) -> Trace:
    """Return the moments of one micro-batch."""
    subject = model_of(subject, training)
    if isinstance(subject, Trace):
        return subject
    # Also if the options have no effect: building a model that cannot have them would fail.
    check_apart(subject, head_tiles=training.head_tiles, cpu_embedding=training.cpu_embedding)
    return analytic_trace(subject, training.workload(offload=offload))


def computing_s(subject: Subject, training: Training) -> float:
    """Return the seconds of a step's computing alone, on one GPU."""
    fp32 = training.precision is Precision.FP32
    trace = trace_of(subject, training, offload=False)
    return training.accumulate * sum(training.machine.computing_s(moment, fp32=fp32) for moment in trace.moments)


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
        states=setup.states,
        copies=setup.copies,
    )


def _typical_numel(trace: Trace) -> int:
    """Return the size of a typical tensor: half of all parameters are in tensors that are no larger."""
    left, sizes = trace.parameters / 2, sorted(tensor.numel for tensor in trace.tensors)
    for size in sizes:
        left -= size
        if left <= 0:
            return size
    return 1


def _need_of(table: HostTable, tiers: tuple[Tier, ...]) -> Need:
    room = sum(tier.capacity_bytes for tier in tiers if tier.name == "host")
    return Need("host", "between steps, with the token table", table.held_bytes, room)

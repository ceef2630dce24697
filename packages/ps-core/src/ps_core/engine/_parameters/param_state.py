"""Record what the engine knows of each parameter and each group; this module moves no bytes."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from ps_core._errors import IllegalTransition, UnsupportedParameter
from ps_core._extents import STATES, Extent, Kind
from ps_core.engine._devices.hide_from_modes import hidden_from_modes
from ps_core.engine._memory.chunk import Chunk, SlotView
from ps_core.engine._memory.common_memory import CommonWeights
from ps_core.engine._parameters.assigned_gradient import AssignedGradient
from ps_core.engine._parameters.state_transitions import (
    TRANSITIONS,
    GradientPlace,
    ParamEvent,
    SlotContents,
    legal_events,
)

HOST = 1
"""The number of the host tier."""
ALIGNED_NUMEL = 32
"""A parameter begins at a multiple of this, so of 64 bytes: elsewhere a BLAS library may round products otherwise."""
TAIL_NUMEL = 64
"""A group's elements are padded to a multiple of this, so that chunks are multiples of 128 bytes."""


@dataclass(slots=True, eq=False, repr=False)
class ParamState:
    """The engine's record of one managed parameter."""

    index: int
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    """Type that the parameter is computed in."""
    numel: int
    trainable: bool
    given: tuple[type[nn.Parameter], torch.dtype]
    """Class and type that the parameter came with; `release` restores them."""
    owners: WeakSet[type[nn.Module]] = field(default_factory=WeakSet)
    """Classes of the modules that the parameter belongs to. Parametrized modules have classes that refer to them."""
    offset: int = 0
    """First element in the group."""
    group: ParamGroup = field(init=False)
    placeholder: torch.Tensor = field(init=False)
    bound: SlotView | None = None
    contents: SlotContents = SlotContents.WEIGHT
    gradient: GradientPlace = GradientPlace.NONE
    own_gradient: torch.Tensor | None = None
    """The gradient if ``gradient`` is OWN_TENSOR, else None. Only methods of this class write these four attributes."""
    overwrite_pending: bool = False
    """True if `own_gradient` is to be written into the weight slot once nothing may read the weight any more."""
    factor: float = 1.0
    """The factor that the user multiplied the gradient by (clipping); the step applies it."""
    staged_factor: float | None = None
    """The factor of a gradient that is not yet in its sum; None: there is no such gradient.

    `factor` is the earlier sum's meanwhile. `mark_summed` makes this one the new sum's.
    """
    assigned: bool = False
    """True if the gradient was given by ``parameter.grad = ...``."""
    source: AssignedGradient | None = None
    """The tensor that was assigned, if it may change yet; see [Note: assigned tensors]."""
    dropped: bool = False
    """True if a gradient came that no optimizer steps, until ``zero_grad``: reading ``.grad`` reports it."""
    grad_proxy: torch.Tensor | None = None
    """The `ManagedGrad` that ``parameter.grad`` returned for this gradient."""
    norm_part: torch.Tensor | None = None
    """Sum of squares and non-finite flag of the gradient, once measured."""
    steps: int = 0
    scalars: tuple[tuple[str, float], ...] = ()
    """The values that a `TorchOptimizer` keeps for the whole parameter, by name; empty before its first step."""
    saved_token: object = field(default_factory=object)
    """An object that every saved tensor of this parameter refers to."""
    saved_token_uses: int = 0
    """Reference count of `saved_token` without saved tensors."""
    compiled_block: list[ParamState] = field(default_factory=list)
    """The parameters of the same compiled block, which backward needs together; empty: there is no such block."""
    update_count: int = 0
    """Number of times that a step or the user wrote another weight; tensors saved before do not match any more."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `UnsupportedParameter`: an ordinary parameter of `materialized` refers to its record, too."""
        raise UnsupportedParameter(
            f"{self.name!r} is under management and cannot be pickled: save model.state_dict(), or inside "
            "`with materialized(model):` pickle copy.deepcopy(model)"
        )

    counted_version: int = 0
    """PyTorch's ``_version`` as the engine left it: a different one means that the user changed the parameter."""
    own_version: bool = True
    """True if no other parameter shares the version; see `managed_parameter.find_shared_versions`."""
    tied: list[ParamState] = field(default_factory=list)
    """The parameters that shared memory before `chunked`, this one included, all in one group; empty: none did."""

    def __post_init__(self) -> None:
        self.saved_token_uses = sys.getrefcount(self.saved_token)
        self.live_on(torch.device("cpu"))

    @hidden_from_modes
    def live_on(self, device: torch.device) -> None:
        """Make a placeholder on ``device``: not-a-number in the right shape, with memory for one element only."""
        self.placeholder = torch.full((), float("nan"), dtype=self.dtype, device=device).expand(self.shape)

    @property
    def span(self) -> slice:
        """Return the parameter's elements in the group."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def handles(self) -> int:
        """Return the number of saved tensors that refer to the parameter, which Python counts itself."""
        return sys.getrefcount(self.saved_token) - self.saved_token_uses

    @property
    def busy(self) -> bool:
        """Return True if backward or an alias may still read the weight in its slot: write nothing there."""
        if sys.getrefcount(self.saved_token) > self.saved_token_uses:
            return True
        bound = self.bound  # `SlotView.aliased`, inlined: backward asks for every parameter
        return bound is not None and torch._C._storage_Use_Count(bound.storage._cdata) > bound.uses

    @property
    def piece(self) -> slice:
        """Return the parameter's elements in this rank's shard of the group; with one rank, all of them."""
        return self.group.clip(self.span)

    def rename(self, name: str) -> None:
        """Change the name, which messages and files have."""
        self.name = name

    def set_progress(self, steps: int, scalars: tuple[tuple[str, float], ...] = ()) -> None:
        """Set the number of steps, and `scalars` after them, from a state that is loaded."""
        self.steps, self.scalars = steps, scalars

    def watch(self, source: AssignedGradient | None) -> None:
        """Note the tensor that was assigned, if it may change yet."""
        self.source = source

    def train(self) -> None:
        """Note that a frozen parameter now gets gradients, and a master in its group."""
        self.trainable = True

    def number_after(self, count: int) -> None:
        """Number the parameter after the ``count`` parameters that were there before."""
        self.index += count

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of a group's chunk with the parameter's elements, in its shape and strides."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    @property
    def first(self) -> ParamState:
        """Return the first of the parameters that share memory; the parameter itself where none does."""
        return self.tied[0] if self.tied else self

    @property
    def others(self) -> list[ParamState]:
        """Return the other parameters that share memory, and have the same elements at all times."""
        return [other for other in self.tied if other is not self]

    # Transitions; see [Note: contents and gradient] in `_parameters.state_transitions`. Each is one method with one
    # look into the table, and without helpers: backward and the step call them for every parameter.

    def keep_gradient(self, gradient: torch.Tensor, *, overwrite_pending: bool = False) -> None:
        """Store the gradient in its own tensor; ``overwrite_pending``: it goes into the weight slot later."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.KEPT, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.KEPT) from None
        self.own_gradient, self.overwrite_pending = gradient, overwrite_pending

    def expect_sum(self) -> None:
        """Note that the gradient's sum over ranks is requested, and not done yet."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.SUM_EXPECTED, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.SUM_EXPECTED) from None

    def mark_overwritten(self) -> None:
        """Note that the gradient, or its sum over ranks, was written over the weight."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.OVERWRITTEN, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.OVERWRITTEN) from None
        self.own_gradient, self.overwrite_pending = None, False

    def mark_summed(self) -> None:
        """Note that the gradient is in the group's fp32 sum."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.SUMMED, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.SUMMED) from None
        self.own_gradient, self.overwrite_pending = None, False
        if self.staged_factor is not None:
            self.factor, self.staged_factor = self.staged_factor, None

    def mark_slot_taken(self) -> None:
        """Note that the weight slot was given to gradients and does not hold the weight."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.SLOT_TAKEN, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.SLOT_TAKEN) from None

    def mark_rebuilt(self) -> None:
        """Note that the weight slot holds the weight again."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.REBUILT, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.REBUILT) from None

    def mark_replaced(self) -> None:
        """Note that another weight was written: references that autograd saved earlier are stale."""
        self.mark_rebuilt()
        count_updates([self])
        self.group.forget_moment()

    def note_raised(self, before: int) -> None:
        """Note the parameter's version, which was raised by one, and by more if another parameter shares it."""
        self.counted_version = self.parameter._version
        self.own_version = self.counted_version == before + 1

    def mark_discarded(self) -> None:
        """Forget the gradient; if it was in the weight slot, the weight must be rebuilt next."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.DISCARDED, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.DISCARDED) from None
        self.own_gradient = self.norm_part = self.grad_proxy = self.source = None
        self.overwrite_pending = self.assigned = self.dropped = False
        self.factor = 1.0

    def mark_stepped(self, scalars: tuple[tuple[str, float], ...] = ()) -> None:
        """Note that the optimizer used the gradient up; ``scalars``: as `scalars` says. `count_updates` comes next."""
        try:
            self.contents, self.gradient = TRANSITIONS[ParamEvent.STEPPED, self.contents, self.gradient]
        except KeyError:
            raise self._illegal(ParamEvent.STEPPED) from None
        self.own_gradient = self.norm_part = self.grad_proxy = self.source = None
        self.overwrite_pending = self.assigned = self.dropped = False
        self.factor = 1.0
        self.steps, self.scalars = self.steps + 1, scalars

    def _illegal(self, event: ParamEvent) -> IllegalTransition:
        return IllegalTransition(
            subject=self.name,
            state=f"({self.contents.name}, {self.gradient.name})",
            event=event.value,
            expected=tuple(legal.value for legal in legal_events(self.contents, self.gradient)),
        )


def count_updates(records: Collection[ParamState]) -> None:
    """Note that these weights are other ones: what saved the earlier ones for backward raises, as in PyTorch.

    A parameter's version tells each `torch.autograd.Function` that saved it where no hook of the engine was on.
    """
    parameters = []
    for record in records:
        record.update_count += 1
        if record.own_version:
            record.counted_version += 1
            parameters.append(record.parameter)
    torch._C._increment_version(parameters)


@dataclass(slots=True, eq=False, repr=False)
class ParamGroup:
    """One group: whole tensors that move together, and the chunk of each kind of their data."""

    index: int
    weight: Kind
    """The kind that the model computes with: P16 or P32."""
    dtype: torch.dtype
    trainable: bool
    fixed_tier: int | None = None
    """The tier where the whole group stays, outside every plan; None: the group moves.

    Tier 0 has parameters kept in fp32. Tier 1 has embedding tables on the host, of which only rows are copied.
    """
    tensors: list[ParamState] = field(default_factory=list)
    numel: int = 0
    chunks: dict[Kind, Chunk] = field(default_factory=dict)
    weight_chunk: Chunk = field(init=False)
    """The chunk that parameters are bound to: the weight's, or with several ranks the gathered one."""
    last_read_moment: int = -1
    """Serial number of the last moment that reads the group; -1: the next use begins a moment."""
    last_grad_moment: int = -1
    """Serial number of the last moment with gradients of the group."""
    states: int = 2
    """The number of `STATES` that the optimizer keeps for each parameter."""
    gathered: bool = False
    """True if chunks hold one of ``ranks`` equal shards, and parameters are bound to a copy gathered from all ranks."""
    rank: int = 0
    ranks: int = 1
    chunk_numel: int = TAIL_NUMEL
    """The number of elements of the whole group, padding included."""
    shard_numel: int = TAIL_NUMEL
    """The number of elements of the group that this rank keeps."""
    common: CommonWeights | None = None
    """The weights, where every rank of the computer reads the other ranks' shards; None: they are copied."""

    def forget_moment(self) -> None:
        """Reset the group's last read, so that its next use begins a new moment."""
        self.last_read_moment = -1

    @property
    def pinned(self) -> bool:
        """Return True if the group stays on one tier: plans do not move it."""
        return self.fixed_tier is not None

    @property
    def on_host(self) -> bool:
        """Return True if the group stays on the host tier: only rows of it are copied to the compute tier."""
        return self.fixed_tier == HOST

    def number_after(self, count: int) -> None:
        """Number the group after the ``count`` groups that were there before; it has no chunks yet."""
        self.index += count

    def map_weights(self, common: CommonWeights) -> None:
        """Take the weights in memory that all ranks map; the group has no chunks yet."""
        self.common = common

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the optimizer's states."""
        return STATES[: self.states]

    def add(self, record: ParamState) -> None:
        """Append a parameter to the group."""
        record.group, record.offset = self, aligned(self.numel)
        self.tensors.append(record)
        self.numel = record.offset + record.numel
        self._measure()

    def share(self, rank: int, ranks: int) -> None:
        """Keep one rank's shard of the group, which has no chunks yet; none of it stays outside the plans."""
        self.gathered, self.fixed_tier, self.rank, self.ranks = True, None, rank, ranks
        self._measure()

    def _measure(self) -> None:
        """Round the group up to shards of equal size."""
        tail = TAIL_NUMEL * self.ranks
        self.chunk_numel = max(tail, -(-self.numel // tail) * tail)
        self.shard_numel = self.chunk_numel // self.ranks

    def clip(self, span: slice) -> slice:
        """Return the elements of this rank's shard that are in a span of the group."""
        numel = self.shard_numel
        first = self.rank * numel
        return slice(min(max(span.start - first, 0), numel), min(max(span.stop - first, 0), numel))

    def add_chunk(self, kind: Kind, chunk: Chunk) -> None:
        """Store the chunk of one kind of this group's data."""
        self.chunks[kind] = chunk
        if kind is (Kind.FULL if self.gathered else self.weight):
            self.weight_chunk = chunk

    def extent(self, kind: Kind) -> Extent:
        """Return the extent of one kind of this group."""
        return Extent(kind, self.index)

    def dtype_of(self, kind: Kind) -> torch.dtype:
        """Return the type that a kind is stored in."""
        return self.dtype if kind in (self.weight, Kind.FULL, Kind.GRAD) else torch.float32

    @property
    def aliased(self) -> bool:
        """Return True if an alias of any parameter's memory is alive: leave the group's slot where it is."""
        return any(record.bound is not None and record.bound.aliased for record in self.tensors)

    @property
    def name(self) -> str:
        """Return the first parameter's name, for messages."""
        return self.tensors[0].name


def aligned(numel: int) -> int:
    """Round a number of elements up to a multiple of `ALIGNED_NUMEL`, at which the next parameter may begin."""
    return -(-numel // ALIGNED_NUMEL) * ALIGNED_NUMEL


def has_saved(records: list[ParamState]) -> bool:
    """Return True if a saved tensor refers to any of the parameters; see `ParamState.handles`."""
    for record in records:  # noqa: SIM110 - `any` of a generator is a call for each parameter
        if sys.getrefcount(record.saved_token) > record.saved_token_uses:
            return True
    return False

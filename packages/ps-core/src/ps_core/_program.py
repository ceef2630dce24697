"""Define what must happen in each segment of training, for all that plan, check or run it.

Versions are explained in [Note: extents and versions] in `_extents`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ps_core._errors import InvalidInput
from ps_core._extents import STATES, Extent, Kind, Precision, SegmentName, Use
from ps_core._layout import Layout
from ps_core._trace import Phase, Trace
from ps_core._units import align_up, check_flag, check_number, check_whole

WIRE_BYTES = 256 * 2**20
"""The most scratch bytes in a reduce-scatter: longer shards are exchanged and summed piece by piece."""

MOST_MICRO_BATCHES = 1024
"""The most micro-batches of a step; an iteration is written out, so more would only cost time."""


def check_training(precision: Precision, states: int, accumulate: int, copies: int, nonmodel_overhead: float) -> None:
    """Raise `InvalidInput` for a way to train that no program can have."""
    if not isinstance(precision, Precision):
        raise InvalidInput(f"precision must be a Precision, found {precision!r}")
    check_whole("states", states, 0, len(STATES))
    check_whole("accumulate", accumulate, 1, MOST_MICRO_BATCHES)
    check_whole("copies", copies, 1)
    check_number("nonmodel_overhead", nonmodel_overhead, 0, 10)


class Visit(NamedTuple):
    """A moment of the trace in terms of groups; ``index`` is the moment's."""

    index: int  # type: ignore[assignment]  # as in Extent
    name: str
    phase: Phase
    reads: tuple[int, ...]
    grads: tuple[int, ...]
    makes: tuple[int, ...]
    takes: tuple[int, ...]
    holds: tuple[int, ...]
    nonmodel_bytes: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """A trace over a layout, and how it is trained. All methods derive from these data."""

    trace: Trace
    layout: Layout
    precision: Precision = Precision.BF16
    accumulate: int = 1
    training: bool = True
    """False: no optimizer, no gradients; evaluation and generation only."""
    nonmodel_overhead: float = 0.0
    """The fraction of every moment's non-model bytes that is added to them (fragmentation)."""
    states: int = 2
    """The number of `STATES` that the optimizer keeps for each parameter."""
    copies: int = 1
    """How many copies of the model train together; the processes of each copy divide its groups."""

    def __post_init__(self) -> None:
        check_flag("training", self.training)
        check_training(self.precision, self.states, self.accumulate, self.copies, self.nonmodel_overhead)

    @property
    def ranks(self) -> int:
        """Return how many processes share the model."""
        return self.layout.ranks

    @property
    def sharded(self) -> bool:
        """Return True if several processes train: groups are gathered, and gradients are summed over processes."""
        return self.ranks * self.copies > 1

    @property
    def overwrites(self) -> bool:
        """Return True if gradients are written over the 16-bit parameters (14 bytes a parameter)."""
        return self.precision is not Precision.FP32 and self.accumulate == 1

    def overwritten(self, group: int) -> bool:
        """Return True if the gradients of a group are written over its weight."""
        return self.accumulate == 1 and self._weights[group] is Kind.P16

    def gradient_of(self, group: int) -> Kind:
        """Return the kind that a moment writes a group's gradients to: if ``overwritten``, over what it reads."""
        return self.compute_weight_of(group) if self.overwritten(group) else Kind.GRAD

    @property
    def weight(self) -> Kind:
        """Return the kind that weights are computed from, in groups that are not kept in fp32."""
        return Kind.P32 if self.precision is Precision.FP32 else Kind.P16

    def weight_of(self, group: int) -> Kind:
        """Return the kind that a group's weights are computed from."""
        return self._weights[group]

    @cached_property
    def _weights(self) -> tuple[Kind, ...]:
        """Return the results of `weight_of`, which is called nearly as often as `bytes_of`."""
        return tuple(Kind.P32 if group.fp32 else self.weight for group in self.layout.groups)

    def precision_of(self, group: int) -> Precision:
        """Return the type that a group's parameters are computed in."""
        return self.precision if self.weight_of(group) is Kind.P16 else Precision.FP32

    def element_bytes(self, group: int) -> int:
        """Return the bytes of one element of a group's computed weight, or of its gradient."""
        return 2 if self.weight_of(group) is Kind.P16 else 4

    def compute_weight_of(self, group: int) -> Kind:
        """Return the kind that a moment reads: the chunk itself, or the gathered group."""
        return Kind.FULL if self.sharded else self.weight_of(group)

    @property
    def local_gradient(self) -> Kind:
        """Return the kind that is added to the accumulator, without ``overwrites``."""
        return Kind.RGRAD if self.sharded else Kind.GRAD

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Return all moments, forward then backward, tensors replaced by their groups."""
        owner = self.layout.group_of
        rows = tuple(
            Visit(
                index,
                moment.name,
                moment.phase,
                tuple(dict.fromkeys(owner[tensor] for tensor in moment.reads)),
                tuple(dict.fromkeys(owner[tensor] for tensor in moment.grads)) if self.training else (),
                moment.makes if self.training else (),
                moment.takes if self.training else (),
                tuple(dict.fromkeys(owner[tensor] for tensor in moment.holds)),
                moment.nonmodel_bytes + int(moment.nonmodel_bytes * self.nonmodel_overhead),
                moment.flops,
            )
            for index, moment in enumerate(self.trace.moments)
        )
        return self._with_late_reads(rows) if self.training and self.overwrites else rows

    def _with_late_reads(self, rows: tuple[Visit, ...]) -> tuple[Visit, ...]:
        """Return the moments; a gradient also arrives at a weight's last read, if an earlier one was delayed until
        then.
        """
        last_gradient = {group: row.index for row in rows for group in row.grads if self.overwritten(group)}
        last_read = {group: row.index for row in rows for group in row.reads}
        late: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for group, index in last_gradient.items():
            if last_read.get(group, -1) > index:
                late[last_read[group]] += (group,)
        return tuple(row._replace(grads=(*row.grads, *late[row.index])) for row in rows)

    @cached_property
    def gradient_visits(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each group, the moments at which a gradient (or a part of one) arrives."""
        found: dict[int, list[int]] = defaultdict(list)
        for visit in self.visits:
            for group in visit.grads:
                found[group].append(visit.index)
        return tuple(tuple(found[group.index]) for group in self.layout.groups)

    @cached_property
    def last_reads(self) -> tuple[int, ...]:
        """Return, for each group, the last moment that reads its weight (-1: none)."""
        last = [-1] * len(self.layout.groups)
        for visit in self.visits:
            for group in visit.reads:
                last[group] = visit.index
        return tuple(last)

    @cached_property
    def completions(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each moment, the groups whose gradients are complete and free to leave behind it."""
        done: list[list[int]] = [[] for _ in self.trace.moments]
        for group in self.stepped:
            done[self.gradient_visits[group][-1]].append(group)
        return tuple(map(tuple, done))

    @cached_property
    def last_takes(self) -> tuple[int, ...]:
        """Return, for each activation, the moment after which it is not needed."""
        last = [-1] * len(self.trace.activations)
        for visit in self.visits:
            for activation in visit.takes:
                last[activation] = visit.index
        return tuple(last)

    @cached_property
    def stepped(self) -> tuple[int, ...]:
        """Return the groups that get a gradient, and so a step, in order of first use."""
        return tuple(group for group, visits in enumerate(self.gradient_visits) if visits)

    def casts(self, segment: SegmentName, early: Collection[int] = ()) -> tuple[int, ...]:
        """Return the groups whose 16-bit weight a segment rebuilds from its master without a step.

        ``early``: groups that the last pass has stepped.
        """
        if segment is SegmentName.PROLOGUE and self.training:
            trainable = (group.index for group in self.layout.groups if group.trainable)
            return tuple(group for group in trainable if self.weight_of(group) is Kind.P16)
        if segment is not SegmentName.SKIP:
            return ()
        return tuple(group for group in self.stepped if self.overwritten(group) and group not in early)

    def rebuilt(self, group: int) -> int:
        """Return the version of a 16-bit weight rebuilt from its master."""
        return (len(self.gradient_visits[group]) if self.overwritten(group) else 0) + 1

    def bytes_of(self, extent: Extent) -> int:
        """Return the bytes of a slot that can hold the extent, on one process; a multiple of the alignment."""
        size = self._sizes.get(extent)
        if size is None:
            size = self._sizes[extent] = self._bytes_of(*extent)
        return size

    @cached_property
    def _sizes(self) -> dict[Extent, int]:
        """Return the results of `bytes_of`, which is called more often than anything else."""
        return {}

    def _bytes_of(self, kind: Kind, index: int) -> int:
        if kind is Kind.ACT:
            return align_up(self.trace.activations[index].bytes)
        numel = self.layout.groups[index].shard_numel
        if kind is Kind.FULL and self.layout.groups[index].common:
            return align_up(1)
        if kind in (Kind.FULL, Kind.GRAD, Kind.WIRE):
            size = numel * self.ranks * self.element_bytes(index)
            if kind is not Kind.WIRE:
                return size
            return min(size if self.copies == 1 else size + 8 * numel, WIRE_BYTES)
        return numel * (2 if kind is Kind.P16 else 4)

    def gather_bytes(self, group: int) -> int:
        """Return the bytes that a process receives of a group that is gathered."""
        return 0 if self.layout.groups[group].common else self.sum_bytes(group)

    def sum_bytes(self, group: int) -> int:
        """Return the bytes that a process receives from the other shards' ranks for a sum of a group."""
        return self.layout.groups[group].shard_numel * (self.ranks - 1) * self.element_bytes(group)

    def across_bytes(self, group: int) -> int:
        """Return the bytes of a sum that a process receives from other copies of the model.

        It adds its part of the shard, which comes in fp32 from each copy. Then it receives the other parts.
        """
        numel = self.layout.groups[group].shard_numel
        return numel * (self.copies - 1) // self.copies * (4 + (2 if self.overwritten(group) else 4))

    @property
    def state_kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of the optimizer's states."""
        return STATES[: self.states]

    def home_kinds(self, group: int) -> tuple[Kind, ...]:
        """Return the kinds of a group that have a home slot, computed weight first."""
        if not (self.training and self.layout.groups[group].trainable):
            return (self.weight_of(group),)
        states = (Kind.P32, *self.state_kinds)
        weights = states if self.weight_of(group) is Kind.P32 else (Kind.P16, *states)
        return weights if self.overwritten(group) else (*weights, Kind.ACC)

    @cached_property
    def segments(self) -> tuple[SegmentName, ...]:
        """Return the segments of this program, in a plan's order."""
        if not self.training:
            return (SegmentName.EVAL,)
        names = [SegmentName.PROLOGUE] if self.weight is Kind.P16 else []
        names += [SegmentName.MICRO_FIRST] if self.accumulate > 1 else []
        names += [SegmentName.MICRO_MID] if self.accumulate > 2 else []
        return (*names, SegmentName.MICRO_LAST, SegmentName.STEP, SegmentName.SKIP, SegmentName.EVAL)

    def iteration(self) -> tuple[SegmentName, ...]:
        """Return the segments of one training step, in order."""
        if not self.training:
            return (SegmentName.EVAL,)
        first = (SegmentName.MICRO_FIRST,) if self.accumulate > 1 else ()
        return (*first, *(SegmentName.MICRO_MID,) * (self.accumulate - 2), SegmentName.MICRO_LAST, SegmentName.STEP)

    def segment_visits(self, segment: SegmentName) -> tuple[Visit, ...]:
        """Return the moments a segment runs."""
        if segment.is_micro:
            return self.visits
        if segment is SegmentName.EVAL:
            return tuple(visit for visit in self.visits if visit.phase is Phase.FORWARD)
        return ()

    def nonmodel_between(self, index: int) -> int:
        """Return the non-model bytes between a moment of a micro-batch and the next one; 0 after the last."""
        counts = [visit.nonmodel_bytes for visit in self.visits[index : index + 2]]
        return min(counts) if len(counts) == 2 else 0

    def uses(self, segment: SegmentName, visit: Visit) -> tuple[Use, ...]:
        """Return the extents that a moment needs on the compute tier, and how it uses each."""
        return self._micro_uses[visit.index] if segment.is_micro else self._eval_uses[visit.index]

    @property
    def may_step_in_backward(self) -> bool:
        """Return True if a group may be stepped before all gradients are known.

        That takes one process, one micro-batch a step and no loss scale. Clipping, which a program does not know, is
        refused elsewhere.
        """
        alone = self.accumulate == 1 and not self.sharded
        return self.training and alone and self.precision is not Precision.FP16

    def entry(self, segment: SegmentName, early: Collection[int] = ()) -> dict[Extent, int]:
        """Return the versions that home slots hold when the segment begins.

        ``early``: groups that the last pass steps.
        """
        return self._versions(segment, early, at_exit=False)

    def exit(self, segment: SegmentName, early: Collection[int] = ()) -> dict[Extent, int]:
        """Return the versions that home slots must hold when the segment ends; ``early`` as for `entry`."""
        return self._versions(segment, early, at_exit=True)

    def accumulates_first(self, segment: SegmentName) -> bool:
        """Return True if the segment's gradients start the accumulator; False if they are added to it."""
        return segment is SegmentName.MICRO_FIRST or self.accumulate == 1

    @cached_property
    def _eval_uses(self) -> tuple[tuple[Use, ...], ...]:
        return tuple(
            tuple(
                Use(Extent(self.compute_weight_of(group), group), 0, 0, group in visit.holds) for group in visit.reads
            )
            for visit in self.visits
        )

    @cached_property
    def _micro_uses(self) -> tuple[tuple[Use, ...], ...]:
        arrived = [0] * len(self.layout.groups)
        rows = []
        for visit in self.visits:
            rows.append(self._training_uses(visit, arrived))
            for group in visit.grads:
                arrived[group] += 1
        return tuple(rows)

    def _training_uses(self, visit: Visit, arrived: list[int]) -> tuple[Use, ...]:
        uses = []
        for group in dict.fromkeys((*visit.reads, *visit.grads)):
            count, gains, held = arrived[group], group in visit.grads, group in visit.holds
            weight = self.compute_weight_of(group)
            if self.overwritten(group):
                dead = count == 0 and visit.index > self.last_reads[group]
                uses.append(Use(Extent(weight, group), None if dead else count, count + gains, held))
                continue
            if group in visit.reads:
                uses.append(Use(Extent(weight, group), 0, 0, held))
            if gains:
                uses.append(Use(Extent(Kind.GRAD, group), count or None, count + 1))
        uses += [Use(Extent(Kind.ACT, index), None, 0) for index in visit.makes]
        uses += [Use(Extent(Kind.ACT, index), 0, 0) for index in visit.takes]
        return tuple(uses)

    def _versions(self, segment: SegmentName, early: Collection[int], *, at_exit: bool) -> dict[Extent, int]:
        versions: dict[Extent, int] = {}
        stepped = (SegmentName.STEP, SegmentName.SKIP, *((SegmentName.MICRO_LAST,) if at_exit else ()))
        for group in range(len(self.layout.groups)):
            over = group in early and segment in stepped
            for kind in self.home_kinds(group):
                version = self._version(SegmentName.STEP if over else segment, kind, group, at_exit or over)
                if version is not None:
                    versions[Extent(kind, group)] = version
        return versions

    def _version(self, segment: SegmentName, kind: Kind, group: int, at_exit: bool) -> int | None:
        stepped = bool(self.gradient_visits[group])
        if kind is Kind.ACC:
            return self._acc_version(segment, at_exit) if stepped else None
        if kind is Kind.P16:
            return self._p16_version(segment, group, at_exit, stepped)
        return int(segment is SegmentName.STEP and at_exit and stepped)

    def _acc_version(self, segment: SegmentName, at_exit: bool) -> int | None:
        if segment in (SegmentName.STEP, SegmentName.SKIP):
            return None if at_exit else 1
        if not segment.is_micro:
            return None
        if self.accumulates_first(segment):
            return 1 if at_exit else None
        return 2 if at_exit else 1

    def _p16_version(self, segment: SegmentName, group: int, at_exit: bool, stepped: bool) -> int | None:
        if segment is SegmentName.PROLOGUE and self.layout.groups[group].trainable:
            return self.rebuilt(group) if at_exit else None
        if not stepped:
            return 0
        gradient = len(self.gradient_visits[group]) if self.overwrites else 0
        if segment is SegmentName.MICRO_LAST and at_exit:
            return gradient
        if segment is SegmentName.STEP:
            return self.rebuilt(group) if at_exit else gradient
        if segment is SegmentName.SKIP:
            return self.rebuilt(group) if at_exit and self.overwrites else gradient
        return 0

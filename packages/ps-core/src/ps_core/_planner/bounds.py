"""Compute the least bytes that any plan needs, to prove that something cannot fit.

[Note: the lower bound]
The compute tier needs a moment's non-model bytes and the extents that the moment uses. It needs gathered groups and
incomplete gradients, which have no home. Where gradients are complete it needs what each reduce-scatter uses, beside
the non-model bytes that stay until the next moment.
All tiers together need every extent with a home, all others that are alive, and the non-model bytes. Some tier with a
processor needs a group's step, its accumulation, the rebuilding of its weight.

A plan is always found if each tier has more than the bound by one largest extent (and alignment). In between a plan may
be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from ps_core._errors import DoesNotFit
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import Tier
from ps_core._program import Program

ALL_TIERS = "all tiers together"
"""The name of all tiers together in `DoesNotFit`."""
STEP_TIER = "one tier with a processor"
"""The name of the tier of a step in `DoesNotFit`."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes needed somewhere at some moment, and the capacity there."""

    where: str
    moment: str
    needed_bytes: int
    available_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that are missing; at most 0 if none are."""
        return self.needed_bytes - self.available_bytes

    def check(self) -> None:
        """Raise `DoesNotFit` if any bytes are missing: no plan can exist then."""
        if self.missing_bytes > 0:
            raise DoesNotFit(
                tier=self.where,
                moment=self.moment,
                needed_bytes=self.needed_bytes,
                available_bytes=self.available_bytes,
                proven=True,
            )


def lower_bounds(program: Program, tiers: tuple[Tier, ...]) -> tuple[Need, ...]:
    """Return the greatest need of the compute tier, of the whole hierarchy, and of a step."""
    compute, whole = _peaks(program)
    first = tiers[0].capacity_bytes  # its last bytes are non-model data, which need no alignment
    total = first + sum(tier.capacity_bytes & -128 for tier in tiers[1:])
    needs = [
        Need(tiers[0].name, compute[0], compute[1], first),
        Need(ALL_TIERS, whole[0], whole[1], total),
    ]
    update = _update_bytes(program)
    if update:
        work = max(tier.capacity_bytes & -128 for tier in tiers if tier.name != "disk")
        needs.append(Need(STEP_TIER, "step", update, work))
    return tuple(needs)


def check_fits(program: Program, tiers: tuple[Tier, ...]) -> None:
    """Raise `DoesNotFit` if no plan can exist."""
    max(lower_bounds(program, tiers), key=lambda need: need.missing_bytes).check()


def largest_extent_bytes(program: Program) -> int:
    """Return the bytes of the largest extent the program has."""
    groups = range(len(program.layout.groups))
    sizes = [program.bytes_of(Extent(kind, group)) for group in groups for kind in program.home_kinds(group)]
    if program.sharded:
        sizes += [program.bytes_of(Extent(Kind.FULL, group)) for group in groups]
    if program.training:
        sizes += [program.bytes_of(Extent(Kind.ACT, index)) for index in range(len(program.trace.activations))]
        sizes += [program.bytes_of(Extent(Kind.GRAD, group)) for group in _accumulated(program)]
    return max(sizes, default=0)


def home_bytes(program: Program) -> int:
    """Return the bytes of every extent that has a home, on one process."""
    groups = range(len(program.layout.groups))
    return sum(program.bytes_of(Extent(kind, group)) for group in groups for kind in program.home_kinds(group))


def _update_bytes(program: Program) -> int:
    """Return what a step, an accumulation or the rebuilding of a weight needs on one tier."""
    together = [(group, program.home_kinds(group)) for group in program.stepped]
    together += [(group, (Kind.P32, Kind.P16)) for group in program.casts(SegmentName.PROLOGUE)]
    together += [(group, (Kind.ACC, program.local_gradient)) for group in _accumulated(program)]
    sizes = (sum(program.bytes_of(Extent(kind, group)) for kind in kinds) for group, kinds in together)
    return max(sizes, default=0)


def _accumulated(program: Program) -> list[int]:
    """Return the groups whose gradients are summed in fp32."""
    return [group for group in program.stepped if not program.overwritten(group)]


def in_order_of_sums(program: Program, groups: Iterable[int]) -> list[int]:
    """Return groups whose gradients are complete at once, in the order in which their sums need least memory.

    Each sum frees its source. So those that need least besides it come first.
    """
    return sorted(groups, key=lambda group: sum(map(program.bytes_of, _beside_source(program, group))))


def _beside_source(program: Program, group: int) -> tuple[Extent, Extent]:
    """Return what a reduce-scatter needs besides its source: scratch memory, and where the sum goes."""
    landing = program.weight_of(group) if program.overwritten(group) else Kind.RGRAD
    return Extent(Kind.WIRE, group), Extent(landing, group)


def _peaks(program: Program) -> tuple[tuple[str, int], tuple[str, int]]:
    segment = SegmentName.MICRO_LAST if program.training else SegmentName.EVAL
    homes = home_bytes(program)
    compute, whole = ("between segments", 0), ("between segments", homes)
    for name, nonmodel_bytes, pinned, stored_bytes in _needs(program, segment):
        homeless = sum(program.bytes_of(extent) for extent in pinned if extent.kind in _HOMELESS)
        here = nonmodel_bytes + sum(map(program.bytes_of, pinned))
        compute = max(compute, (name, here), key=lambda pair: pair[1])
        whole = max(whole, (name, nonmodel_bytes + homes + homeless + stored_bytes), key=lambda pair: pair[1])
    return compute, whole


_HOMELESS = (Kind.FULL, Kind.GRAD, Kind.RGRAD, Kind.WIRE)
"""Kinds without a home, activations apart."""


def _needs(program: Program, segment: SegmentName) -> Iterator[tuple[str, int, set[Extent], int]]:
    """Yield what must be on the compute tier at each moment, and at each sum over processes behind it.

    That is non-model bytes and extents; the last number is the bytes of all activations that are alive.
    """
    visits = program.segment_visits(segment)
    stored_bytes = 0
    partial: set[Extent] = set()
    for visit, following in zip_longest(visits, visits[1:]):
        stored_bytes += sum(program.bytes_of(Extent(Kind.ACT, index)) for index in visit.makes)
        apart = [group for group in visit.grads if program.sharded or not program.overwritten(group)]
        partial |= {Extent(program.gradient_of(group), group) for group in apart}
        used = {use.extent for use in program.uses(segment, visit)}
        yield visit.name, visit.nonmodel_bytes, used | partial, stored_bytes
        dead = (index for index in visit.takes if program.last_takes[index] == visit.index)
        stored_bytes -= sum(program.bytes_of(Extent(Kind.ACT, index)) for index in dead)
        between = program.nonmodel_between(visit.index)
        held = {Extent(program.compute_weight_of(group), group) for group in following.holds} if following else set()
        for group in in_order_of_sums(program, program.completions[visit.index] if program.training else ()):
            if program.sharded:
                yield visit.name, between, {*partial, *held, *_beside_source(program, group)}, stored_bytes
            partial.discard(Extent(program.gradient_of(group), group))

"""Decide on which tier every extent's home is, and where each group's optimizer step runs."""

from __future__ import annotations

from dataclasses import dataclass

from ps_core._extents import Extent, Kind
from ps_core._plan import Held, Tier
from ps_core._program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The tiers of each group: of its weight's home, of its optimizer's extents, and of its step."""

    weights: tuple[int, ...]
    states: tuple[int, ...]
    steps: tuple[int, ...]
    weight: Kind = Kind.P16
    """The kind that ``weights`` places. Other fp32 weights are placed with the optimizer's extents."""
    stepped_in_backward: tuple[int, ...] = ()
    """Groups with states below the compute tier that step on it, while backward goes on."""

    def home_tier(self, kind: Kind, group: int) -> int:
        """Return the home tier of one of `Program.home_kinds`."""
        return (self.weights if kind is self.weight else self.states)[group]


def work_tier(tiers: tuple[Tier, ...], tier: int) -> int:
    """Return the nearest tier at or above this one on which a processor can work."""
    return tier - 1 if tiers[tier].name == "disk" else tier


def lay_home(program: Program, placement: Placement, tiers: tuple[Tier, ...]) -> tuple[tuple[Held, ...], list[int]]:
    """Return home slots packed from the bottom of each tier, and the end of each tier's homes."""
    ends = [0] * len(tiers)
    home = []
    for group in range(len(program.layout.groups)):
        for kind in program.home_kinds(group):
            tier = placement.home_tier(kind, group)
            extent = Extent(kind, group)
            size = program.bytes_of(extent)
            home.append(Held(tier, ends[tier], size, extent))
            ends[tier] += size
    return tuple(home), ends


def filled(
    program: Program,
    tiers: tuple[Tier, ...],
    *,
    resident: int,
    lower_bytes: int | None = None,
    streamed: frozenset[int] = frozenset(),
    in_backward: bool = False,
) -> Placement:
    """Place the first ``resident`` groups wholly on the compute tier, the others as high as possible below it.

    ``lower_bytes`` limits the home slots on the tier below the compute tier. The rest goes to the last tier, optimizer
    states before weights. ``streamed`` groups step on the compute tier although their states are below it;
    ``in_backward``: while backward goes on, where the weight is not read after its gradient is complete.
    """
    groups = program.layout.groups
    last = len(tiers) - 1
    weights, states = [0] * len(groups), [0] * len(groups)
    below = [group.index for group in groups[resident:]] if last else []
    room = tiers[min(1, last)].capacity_bytes if lower_bytes is None else lower_bytes
    for kinds, homes in ((False, weights), (True, states)):
        for group in below:
            size = sum(
                program.bytes_of(Extent(kind, group))
                for kind in program.home_kinds(group)
                if (kind is not Kind.P16) is kinds
            )
            homes[group] = 1 if last == 1 or size <= room else last
            room -= size if homes[group] == 1 else 0
    steps = [-1] * len(groups)
    for group in program.stepped:
        steps[group] = 0 if group in streamed else work_tier(tiers, states[group])
    candidates = [group for group in program.stepped if in_backward and steps[group] == 0 < states[group]]
    return Placement(
        weights=tuple(weights),
        states=tuple(states),
        steps=tuple(steps),
        stepped_in_backward=tuple(
            group for group in candidates if program.last_reads[group] <= program.gradient_visits[group][-1]
        ),
    )


def halves(program: Program) -> list[tuple[int, bool, int]]:
    """Return the rows that a disk next to the compute tier may hold: all groups' weights, then their other extents.

    A row is a group, True for its weight, and bytes. In this order a byte kept above the disk saves most. A weight is
    read in forward, in backward and for the step. The rest is read for the step alone.
    """
    groups = range(len(program.layout.groups))
    return [
        (
            group,
            weight,
            sum(
                program.bytes_of(Extent(kind, group))
                for kind in program.home_kinds(group)
                if (kind is program.weight) is weight
            ),
        )
        for weight in (True, False)
        for group in groups
    ]


def above_disk(program: Program, resident: int) -> Placement:
    """Place the first ``resident`` of the `halves` on the compute tier, the others on the disk next to it."""
    tiers = {row[:2]: int(place >= resident) for place, row in enumerate(halves(program))}
    groups = range(len(program.layout.groups))
    return Placement(
        weights=tuple(tiers[group, True] for group in groups),
        states=tuple(tiers[group, False] for group in groups),
        steps=tuple(0 if program.gradient_visits[group] else -1 for group in groups),
        weight=program.weight,
    )

"""Decide which collective all ranks run next: pure rules, the same on each rank.

[Note: one order of collectives]
All processes have to begin collectives in one order. But a model may touch other groups on other processes. So before a
collective every rank sends a *proposal*: what it needs next. From the same proposals all make the same
decision. What was done in a pass is the schedule of the next one of its kind. Then a proposal tells how far a rank
follows it: far ahead of need where it has room. What every rank follows is done without another proposal. A gather goes
to the ranks that want it; to a sum, ranks without gradients for it give nothing.

A sum is taken once every rank has all its gradients. So it is the same, to the bit, as if one process had added the
parts. Only where a rank has no memory left it is taken earlier, and later gradients are added.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

WINDOW = 62
"""The most collectives of the schedule that a proposal can follow ahead."""
_HEAD = "<BB?qQ"


class ProposalKind(IntEnum):
    """The kind of collective that a rank needs next."""

    HELLO = 0
    """Its pass begins."""
    END = 1
    """Nothing: its pass is over."""
    FOLLOW = 2
    """The schedule, up to a position."""
    GATHER = 3
    """A group that is not next in the schedule."""
    SUM = 4
    """Memory, by taking a group's sum early."""
    READY = 5
    """Nothing: it tells what it has for a sum that is taken early."""


class Collective(NamedTuple):
    """A collective: the gather or the sum of a group."""

    kind: ProposalKind
    group: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """One rank's message to the others; sets are the bits of integers."""

    kind: ProposalKind
    arg: int = 0
    """FOLLOW: the first position that it does not follow; GATHER, SUM: the group; HELLO: the kind of pass."""
    wants: int = 0
    """FOLLOW: the gathers it will use, counted from the position that all are at."""
    staged: int = 0
    """Groups of which it has gradients that were not summed yet."""
    final: int = 0
    """Groups of which no more will come than it has."""
    tensors: int = 0
    """The tensors whose gradients these are."""
    room: int = 0
    """The amount of memory: `Headroom`."""
    backward: bool = False
    """True: it is in its backward pass."""

    def pack(self, groups: int, tensors: int) -> bytes:
        """Return the proposal as bytes; the length is the same on every rank."""
        masks = ((self.staged, groups), (self.final, groups), (self.tensors, tensors))
        head = struct.pack(_HEAD, self.kind, self.room, self.backward, self.arg, self.wants)
        return head + b"".join(mask.to_bytes(_bytes(count), "little") for mask, count in masks)

    @classmethod
    def unpack(cls, text: bytes, groups: int, tensors: int) -> Proposal:
        """Return the proposal that `pack` turned into these bytes."""
        kind, room, backward, arg, wants = struct.unpack_from(_HEAD, text)
        start, masks = struct.calcsize(_HEAD), []
        for count in (groups, groups, tensors):
            masks.append(int.from_bytes(text[start : start + _bytes(count)], "little"))
            start += _bytes(count)
        staged, final, present = masks
        return cls(ProposalKind(kind), arg, wants, staged, final, present, room, backward)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


class Headroom(IntEnum):
    """The room that a rank has beyond a pass in which nothing was gathered ahead."""

    TIGHT = 0
    NEXT = 1
    """The next group, while gradients of the one before wait for their sum."""
    ALL = 2
    """All groups at once."""


class Decision(NamedTuple):
    """The action that all ranks take next."""

    kind: ProposalKind
    arg: int = 0


def choose(proposals: Sequence[Proposal], ahead: int) -> Decision:
    """Return what follows from all proposals; ``ahead``: groups whose sums are still to come in the schedule."""
    if all(proposal.kind is proposals[0].kind for proposal in proposals) and proposals[0].kind in (
        ProposalKind.HELLO,
        ProposalKind.END,
        ProposalKind.READY,
    ):
        return Decision(proposals[0].kind)
    staged, final = 0, -1
    for proposal in proposals:
        staged |= proposal.staged
        final &= -1 if proposal.kind is ProposalKind.END else proposal.final
    due = staged & final & ~ahead
    if due:
        return Decision(ProposalKind.SUM, _lowest(due))
    for kind in (ProposalKind.SUM, ProposalKind.GATHER):
        asking = [proposal for proposal in proposals if proposal.kind is kind]
        if asking:
            return Decision(kind, min(asking, key=_behind).arg)
    return Decision(
        ProposalKind.FOLLOW, min(proposal.arg for proposal in proposals if proposal.kind is ProposalKind.FOLLOW)
    )


def _behind(proposal: Proposal) -> tuple[bool, int]:
    """Return a sort key: the rank that is least far comes first. Then one gather serves all that want the group."""
    return proposal.backward, -proposal.arg if proposal.backward else proposal.arg


def is_final(proposals: Sequence[Proposal], group: int) -> bool:
    """Return True if no rank expects further gradients of a group."""
    return all(proposal.kind is ProposalKind.END or proposal.final >> group & 1 for proposal in proposals)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def takers(
    proposals: Sequence[Proposal],
    collective: Collective,
    schedule: Sequence[Collective],
    base: int,
    position: int | None,
) -> list[int]:
    """Return the ranks that receive a gather: at a position of the schedule, or (None) requested out of order.

    ``base``: the position of the schedule at which the proposals were sent.
    """
    found = []
    for process, proposal in enumerate(proposals):
        if proposal.kind is ProposalKind.FOLLOW:
            asked = [place for place in _places(proposal, base) if schedule[place] == collective]
            wanted = bool(asked) if position is None else position in asked
        else:
            wanted = position is None and proposal.kind is ProposalKind.GATHER and proposal.arg == collective.group
        if wanted:
            found.append(process)
    return found


def _places(proposal: Proposal, base: int) -> list[int]:
    """Return the positions of the gathers that a rank will use."""
    return [place for place in range(base, proposal.arg) if proposal.wants >> place - base & 1]


def givers(
    proposals: Sequence[Proposal],
    collective: Collective,
    schedule: Sequence[Collective],
    base: int,
    position: int | None,
) -> list[int]:
    """Return the ranks that have gradients for a sum; positions as for `takers`.

    Where the schedule has another sum of the group after the proposals, all gradients went into that one.
    """
    if position is not None and collective in schedule[base:position]:
        return []
    return holders(proposals, collective.group)


def holders(proposals: Sequence[Proposal], group: int) -> list[int]:
    """Return the ranks with gradients of a group that were not summed yet."""
    return [process for process, proposal in enumerate(proposals) if proposal.staged >> group & 1]


def tensors_of(proposals: Sequence[Proposal]) -> int:
    """Return the tensors, as bits, whose gradients any rank has."""
    union = 0
    for proposal in proposals:
        union |= proposal.tensors
    return union


class CompletedCollective(NamedTuple):
    """A collective that took place."""

    collective: Collective
    planned: bool
    """By the schedule."""
    tensors: int = 0
    """The tensors that were summed, as bits."""


class ScheduledCollective(NamedTuple):
    """A collective of the schedule."""

    collective: Collective
    mine: bool
    """True: this rank used the gathered group; other ranks do not know."""


def next_schedule(
    done: Sequence[CompletedCollective], used: Collection[int], *, hoist: bool
) -> list[ScheduledCollective]:
    """Return the schedule after a pass; ``used``: the gathers that this rank used.

    ``hoist``: a gather requested out of order goes before the sums that it came after. Then it begins while the
    gradients for those are still computed.
    """
    made: list[ScheduledCollective] = []
    run = 0
    for index, (collective, planned, _) in enumerate(done):
        gather = collective.kind is ProposalKind.GATHER
        place = len(made) - (run if hoist and gather and not planned else 0)
        made.insert(place, ScheduledCollective(collective, gather and index in used))
        run = 0 if gather else run + 1
    return made


def gathered_once(schedule: Sequence[ScheduledCollective]) -> list[ScheduledCollective]:
    """Return the schedule in which each group is gathered once and stays until its gradients are summed."""
    mine: dict[int, bool] = {}
    for collective, is_mine in schedule:
        if collective.kind is ProposalKind.GATHER:
            mine[collective.group] = mine.get(collective.group, False) or is_mine
    made = []
    for collective, _ in schedule:
        if collective.kind is ProposalKind.SUM:
            made.append(ScheduledCollective(collective, mine=False))
        elif collective.group in mine:
            made.append(ScheduledCollective(collective, mine.pop(collective.group)))
    return made

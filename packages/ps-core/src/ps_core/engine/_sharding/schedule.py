"""What processes that share a model do next: pure rules, the same on each of them.

[Note: taking turns]
Collectives have to be begun in one order on all processes, but models may touch other groups on other processes. So
before a collective every process says a *word*: what it would have next. From the same words all draw the same choice.
What was done in a pass is the schedule of the next one of its kind: then a word says how far a process follows it, far
ahead of need where it has room, and all that every process follows is done without another word. A gather goes to those
that want it; of a sum, those that have nothing for it give nothing.

A sum is taken once everybody has all that will come, so that it is the same, to the bit, as if one process had added
the parts. Only where somebody has no room left it is taken earlier, and what comes later is added.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

WINDOW = 62
"""Collectives that a word can follow the schedule ahead."""
_HEAD = "<BB?qQ"


class ProposalKind(IntEnum):
    """What a process would have next."""

    HELLO = 0
    """Its pass begins."""
    END = 1
    """Nothing: its pass is over."""
    FOLLOW = 2
    """The schedule, up to a position."""
    GATHER = 3
    """A group that is not to be had by following."""
    SUM = 4
    """Room, by way of a group's sum."""
    READY = 5
    """To tell what it has for a sum that is taken early."""


class Collective(NamedTuple):
    """A collective: the gather or the sum of a group."""

    turn: ProposalKind
    group: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one process says; sets are bits of whole numbers."""

    turn: ProposalKind
    arg: int = 0
    """FOLLOW: the first position that it does not follow; GATHER, SUM: the group; HELLO: the kind of pass."""
    wants: int = 0
    """FOLLOW: the gathers it will use, counted from the position that all are at."""
    staged: int = 0
    """Groups of which it has gradients that were not summed yet."""
    settled: int = 0
    """Groups of which no more will come than it has."""
    tensors: int = 0
    """The tensors whose gradients these are."""
    room: int = 0
    """How much it has: `Headroom`."""
    backward: bool = False
    """Whether it is on its way back."""

    def pack(self, groups: int, tensors: int) -> bytes:
        """As bytes, as many from each process."""
        masks = ((self.staged, groups), (self.settled, groups), (self.tensors, tensors))
        head = struct.pack(_HEAD, self.turn, self.room, self.backward, self.arg, self.wants)
        return head + b"".join(mask.to_bytes(_bytes(count), "little") for mask, count in masks)

    @classmethod
    def unpack(cls, text: bytes, groups: int, tensors: int) -> Proposal:
        """What `pack` gave."""
        turn, room, backward, arg, wants = struct.unpack_from(_HEAD, text)
        start, masks = struct.calcsize(_HEAD), []
        for count in (groups, groups, tensors):
            masks.append(int.from_bytes(text[start : start + _bytes(count)], "little"))
            start += _bytes(count)
        staged, settled, present = masks
        return cls(ProposalKind(turn), arg, wants, staged, settled, present, room, backward)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


class Headroom(IntEnum):
    """What a process has room for, beyond what a pass took in which nothing was fetched ahead."""

    TIGHT = 0
    NEXT = 1
    """The next group, while gradients of the one before wait for their sum."""
    ALL = 2
    """All groups at once."""


class Decision(NamedTuple):
    """What all do next."""

    turn: ProposalKind
    arg: int = 0


def choose(words: Sequence[Proposal], ahead: int) -> Decision:
    """What follows from everybody's words; ``ahead``: groups whose sums are still to come in the schedule."""
    if all(word.turn is words[0].turn for word in words) and words[0].turn in (
        ProposalKind.HELLO,
        ProposalKind.END,
        ProposalKind.READY,
    ):
        return Decision(words[0].turn)
    staged, settled = 0, -1
    for word in words:
        staged |= word.staged
        settled &= -1 if word.turn is ProposalKind.END else word.settled
    due = staged & settled & ~ahead
    if due:
        return Decision(ProposalKind.SUM, _lowest(due))
    for turn in (ProposalKind.SUM, ProposalKind.GATHER):
        asking = [word for word in words if word.turn is turn]
        if asking:
            return Decision(turn, min(asking, key=_behind).arg)
    return Decision(ProposalKind.FOLLOW, min(word.arg for word in words if word.turn is ProposalKind.FOLLOW))


def _behind(word: Proposal) -> tuple[bool, int]:
    """Who is least far comes first, so that what more than one want is gathered for all of them."""
    return word.backward, -word.arg if word.backward else word.arg


def is_settled(words: Sequence[Proposal], group: int) -> bool:
    """Whether nobody will have more for a group's sum than it has."""
    return all(word.turn is ProposalKind.END or word.settled >> group & 1 for word in words)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def takers(
    words: Sequence[Proposal], act: Collective, schedule: Sequence[Collective], base: int, position: int | None
) -> list[int]:
    """Who gets a gather: at a position of the schedule, or (None) where it was asked for out of order.

    ``base``: where all were in the schedule when they said their words.
    """
    found = []
    for process, word in enumerate(words):
        if word.turn is ProposalKind.FOLLOW:
            asked = [place for place in _places(word, base) if schedule[place] == act]
            wanted = bool(asked) if position is None else position in asked
        else:
            wanted = position is None and word.turn is ProposalKind.GATHER and word.arg == act.group
        if wanted:
            found.append(process)
    return found


def _places(word: Proposal, base: int) -> list[int]:
    """The positions of the gathers that a process will use."""
    return [place for place in range(base, word.arg) if word.wants >> place - base & 1]


def givers(
    words: Sequence[Proposal], act: Collective, schedule: Sequence[Collective], base: int, position: int | None
) -> list[int]:
    """Who has something for a sum; positions as for `takers`.

    Where the schedule has another sum of the group behind the words, what anybody had went into that.
    """
    if position is not None and act in schedule[base:position]:
        return []
    return holders(words, act.group)


def holders(words: Sequence[Proposal], group: int) -> list[int]:
    """Who has gradients of a group that were not summed yet."""
    return [process for process, word in enumerate(words) if word.staged >> group & 1]


def tensors_of(words: Sequence[Proposal]) -> int:
    """Whose gradients anybody has."""
    union = 0
    for word in words:
        union |= word.tensors
    return union


class CompletedCollective(NamedTuple):
    """A collective that took place."""

    act: Collective
    planned: bool
    """By the schedule."""
    tensors: int = 0
    """What was summed."""


class ScheduledCollective(NamedTuple):
    """A collective of the schedule."""

    act: Collective
    mine: bool
    """Whether this process used what was gathered; the others do not know."""


def next_schedule(
    done: Sequence[CompletedCollective], used: Collection[int], *, hoist: bool
) -> list[ScheduledCollective]:
    """The schedule after a pass; ``used``: which of the gathers this process used.

    ``hoist``: a gather that was asked for goes before the sums that it came after, to be begun while the gradients for
    those are still computed.
    """
    made: list[ScheduledCollective] = []
    run = 0
    for index, (act, planned, _) in enumerate(done):
        gather = act.turn is ProposalKind.GATHER
        place = len(made) - (run if hoist and gather and not planned else 0)
        made.insert(place, ScheduledCollective(act, gather and index in used))
        run = 0 if gather else run + 1
    return made


def gathered_once(schedule: Sequence[ScheduledCollective]) -> list[ScheduledCollective]:
    """The schedule where groups stay until their gradients leave."""
    mine: dict[int, bool] = {}
    for act, is_mine in schedule:
        if act.turn is ProposalKind.GATHER:
            mine[act.group] = mine.get(act.group, False) or is_mine
    made = []
    for act, _ in schedule:
        if act.turn is ProposalKind.SUM:
            made.append(ScheduledCollective(act, mine=False))
        elif act.group in mine:
            made.append(ScheduledCollective(act, mine.pop(act.group)))
    return made

"""Put the moments that several ranks recorded together into one pass that has room for each of them.

[Note: merged moments]
Ranks mostly do the same. Where they do not (experts, layers that one leaves out), the merged pass has all their
moments. Each rank's are in its own order. A rank goes through the moments of others too. Groups that it does not use
are gathered there, and it gives nothing to their sums. In such a moment a rank's non-model bytes are those of its
moments before and after. What aliases of memory it holds meanwhile stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TypeAlias

from ps_core.engine._tracing.pass_recording import MomentRecord

_Key: TypeAlias = tuple[bool, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class _Place:
    """One moment of the merged pass."""

    key: _Key
    of: dict[int, MomentRecord]
    """By recording: the moment that it has here."""


def merged(recordings: Sequence[Sequence[MomentRecord]]) -> list[MomentRecord]:
    """Return the moments of a pass in which each recording's moments are found, in their order."""
    places: list[_Place] = []
    for backward in (False, True):
        part: list[_Place] = []
        for number, moments in enumerate(recordings):
            part = _align(part, number, [moment for moment in moments if moment.backward is backward])
        places += part
    rows = [_moments_of(number, places) for number in range(len(recordings))]
    return [_combined(each) for each in zip(*rows, strict=True)]


def _align(places: list[_Place], number: int, moments: list[MomentRecord]) -> list[_Place]:
    """Add one recording's moments to those of the recordings before."""
    keys = [(moment.backward, moment.reads, moment.grad_groups) for moment in moments]
    found: list[_Place] = []
    matcher = SequenceMatcher(None, [place.key for place in places], keys, autojunk=False)
    for tag, start, stop, first, last in matcher.get_opcodes():
        found += places[start:stop]
        for offset in range(last - first):
            moment = moments[first + offset]
            if tag == "equal":
                places[start + offset].of[number] = moment
            else:
                found.append(_Place(keys[first + offset], {number: moment}))
    return found


def _moments_of(number: int, places: list[_Place]) -> list[MomentRecord]:
    """Return what a recording has in every place; where it has no part, what it has at the time."""
    after: list[MomentRecord | None] = [None] * len(places)
    following: MomentRecord | None = None
    for index in reversed(range(len(places))):
        after[index] = following
        following = places[index].of.get(number, following)
    row: list[MomentRecord] = []
    before = 0
    for place, later in zip(places, after, strict=True):
        mine = place.of.get(number)
        if mine is None:
            stays = max(before, 0 if later is None else later.nonmodel_bytes)
            some = next(iter(place.of.values()))
            held = () if later is None or not row else later.held
            mine = replace(some, held=held, touched={}, grads={}, nonmodel_bytes=stays)
        else:
            before = mine.nonmodel_bytes
        row.append(mine)
    return row


def _combined(moments: Sequence[MomentRecord]) -> MomentRecord:
    """Return the moment that has room for those of all recordings."""
    return replace(
        moments[0],
        held=tuple(dict.fromkeys(index for moment in moments for index in moment.held)),
        touched=dict.fromkeys(index for moment in moments for index in moment.touched),
        grads=dict.fromkeys(index for moment in moments for index in moment.grads),
        nonmodel_bytes=max(moment.nonmodel_bytes for moment in moments),
    )

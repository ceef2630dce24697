"""Find which instructions of a segment are complete before others start, in every allowed order.

[Note: happens-before]
An instruction waits for the one before it on its queue and for those in ``after``. What these wait for is complete too.
So one number per queue says everything: how many of its instructions are complete before this one starts. Such a row of
numbers is a *clock*, and "a before b, always" is one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ps_core._plan import Instr, Queue
from ps_core._verify.plan_fault import Fault

Clock: TypeAlias = list[int]

START: Clock = [0] * len(Queue)
"""The clock of something that waits for nothing. Never changed."""


class Stamp(NamedTuple):
    """An instruction as others see it: the ``place``-th of its queue, counted from 1."""

    queue: int
    place: int
    id: int

    def before(self, clock: Clock) -> bool:
        """Return True if it is always complete before the clock's owner starts."""
        return clock[self.queue] >= self.place


BEGINNING = Stamp(0, 0, -1)
"""The stamp of what happened before the segment began."""


def arrange(instrs: Sequence[Instr]) -> Iterator[tuple[Instr, Stamp, Clock]]:
    """Yield the instructions in an allowed order, each with its stamp and clock; raise `Fault` if there is none."""
    places = {instr.id: index for index, instr in enumerate(instrs)}
    if len(places) != len(instrs):
        raise Fault("every id once", f"{len(instrs) - len(places)} used again")
    for instr in instrs:
        if not isinstance(instr.id, int):
            raise Fault("whole numbers as ids", repr(instr.id))
        if instr.queue not in _QUEUES:
            raise Fault("a queue", repr(instr.queue)).at("", instr.id)
        for other in instr.after:
            if other not in places:
                raise Fault("waits for instructions of the segment", f"a wait for {other}").at("", instr.id)
    stamps: list[Stamp] = []
    counts = list(START)
    for instr in instrs:
        counts[instr.queue] += 1
        stamps.append(Stamp(int(instr.queue), counts[instr.queue], instr.id))
    clocks: list[Clock] = [START] * len(instrs)
    tails: list[Clock] = [START] * len(Queue)
    for index in _sorted(instrs, places):
        instr, stamp = instrs[index], stamps[index]
        clock = tails[stamp.queue].copy()
        for other in instr.after:
            earlier = places[other]
            queue, place, _ = stamps[earlier]
            if clock[queue] < place:
                clock = [a if a > b else b for a, b in zip(clock, clocks[earlier], strict=True)]
        clock[stamp.queue] = stamp.place
        clocks[index] = tails[stamp.queue] = clock
        yield instr, stamp, clock


_QUEUES = frozenset(Queue)


def _sorted(instrs: Sequence[Instr], places: dict[int, int]) -> Sequence[int]:
    """Return indices so that each comes after all it waits for; the listed order, if that is allowed."""
    if all(places[other] < index for index, instr in enumerate(instrs) for other in instr.after):
        return range(len(instrs))
    waits = [0] * len(instrs)
    followers: list[list[int]] = [[] for _ in instrs]
    tails: dict[Queue, int] = {}
    for index, instr in enumerate(instrs):
        before = [places[other] for other in instr.after]
        if instr.queue in tails:
            before.append(tails[instr.queue])
        tails[instr.queue] = index
        waits[index] = len(before)
        for other in before:
            followers[other].append(index)
    order = [index for index, count in enumerate(waits) if count == 0]
    for index in order:  # grows as it is walked
        for follower in followers[index]:
            waits[follower] -= 1
            if waits[follower] == 0:
                order.append(follower)
    if len(order) < len(instrs):
        stuck = next(index for index, count in enumerate(waits) if count > 0)
        raise Fault("an order in which everything runs", "instructions that wait for each other").at(
            "", instrs[stuck].id
        )
    return order

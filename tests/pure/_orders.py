"""Orders in which an adversary runs a segment.

`find_fault` tries many, random and lopsided; `find_fault_directed` tries, besides, both orders of every two
instructions that touch the same bytes, one right after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from _adversary import Broken, Machine
from ps_core._plan import (
    Decide,
    Instr,
    Norm,
    Plan,
    Queue,
    Reserve,
    Run,
    Segment,
    Shift,
    slots_of,
)
from ps_core._program import Program

Choice = Callable[[list[int]], int]
"""Picks one of the places that can run now."""


def execute(program: Program, plan: Plan, segment: Segment, choose: Choice) -> str | None:
    """Run a segment in the order ``choose`` picks; what went wrong, or None."""
    machine = Machine(program, plan, segment.name)
    instrs = segment.instrs
    try:
        machine.start(instrs)
        begun: set[int] = set()
        for place in _order(instrs, choose):
            op = instrs[place].op
            if isinstance(op, Shift) and place in begun:
                machine.end_shift(op.slot)
            else:
                machine.do(instrs[place])
                begun.add(place)
        machine.finish()
    except Broken as broken:
        return str(broken)
    return None


def _order(instrs: Sequence[Instr], choose: Choice) -> Iterator[int]:
    """Places in the order chosen. Others may run while a slot is shifted, so a shift comes twice: begun, and over."""
    begun: set[int] = set()
    queues: dict[Queue, list[int]] = {}
    for place in reversed(range(len(instrs))):
        queues.setdefault(instrs[place].queue, []).append(place)
    unfinished = {instr.id for instr in instrs}
    if len(unfinished) < len(instrs):
        raise Broken("two instructions have one id")
    known = frozenset(unfinished)
    while unfinished:
        ready = [
            row[-1]
            for row in queues.values()
            if row and all(other in known and other not in unfinished for other in instrs[row[-1]].after)
        ]
        if not ready:
            raise Broken("deadlock")
        place = choose(ready)
        if isinstance(instrs[place].op, Shift) and place not in begun:
            begun.add(place)
        else:
            queues[instrs[place].queue].pop()
            unfinished.discard(instrs[place].id)
        yield place


def at_random(rng: random.Random) -> Choice:
    """Any that can run."""
    return rng.choice


def by_queue(instrs: Sequence[Instr], rng: random.Random) -> Choice:
    """One queue runs ahead of all others as far as it can, then the next: some as early, some as late as possible."""
    ranks = {queue: rng.random() for queue in Queue}
    return lambda ready: min(ready, key=lambda place: ranks[instrs[place].queue])


def by_rank(instrs: Sequence[Instr], rng: random.Random) -> Choice:
    """A random rank for every instruction."""
    ranks = [rng.random() for _ in instrs]
    return lambda ready: min(ready, key=ranks.__getitem__)


def by_delay(instrs: Sequence[Instr], rng: random.Random) -> Choice:
    """One instruction waits until nothing else can run."""
    last = rng.randrange(len(instrs))
    return lambda ready: min(ready, key=lambda place: (place == last, place))


def find_fault(program: Program, plan: Plan, segment: Segment, rng: random.Random, orders: int = 24) -> str | None:
    """What goes wrong in one of many orders; None: nothing was seen."""
    instrs = segment.instrs
    found = execute(program, plan, segment, min)
    makers = (by_queue, by_rank, by_delay, lambda _, rng: at_random(rng))
    for turn in range(orders if instrs else 0):
        if found is not None:
            return found
        found = execute(program, plan, segment, makers[turn % len(makers)](instrs, rng))
    return found


def find_fault_directed(program: Program, plan: Plan, segment: Segment) -> str | None:
    """What goes wrong when two instructions that share bytes run in either order, one right after the other."""
    instrs = segment.instrs
    if not instrs:
        return execute(program, plan, segment, min)
    before = _ancestors(instrs)
    touched = _touched(plan, instrs)
    for first in range(len(instrs)):
        for second in range(first):
            if before[first] >> second & 1 or before[second] >> first & 1:
                continue
            if not _meet(touched[first], touched[second]):
                continue
            for pair in ((first, second), (second, first)):
                found = execute(program, plan, segment, _toward(pair, before))
                if found is not None:
                    return found
    return None


def _toward(pair: tuple[int, int], before: list[int]) -> Choice:
    """First all that the two wait for, then the two, then the rest."""
    needed = before[pair[0]] | before[pair[1]]
    rank = {pair[0]: 1, pair[1]: 2}

    def choose(ready: list[int]) -> int:
        place = min(ready, key=lambda place: (0 if needed >> place & 1 else rank.get(place, 3), place))
        rank.pop(place, None)  # once begun, it may last
        return place

    return choose


def _ancestors(instrs: Sequence[Instr]) -> list[int]:
    """For each place, the set (as bits) of places that must run before it."""
    places = {instr.id: place for place, instr in enumerate(instrs)}
    before = [0] * len(instrs)
    last: dict[Queue, int] = {}
    done: list[int] = []
    try:
        done = list(dict.fromkeys(_order(instrs, min)))
    except Broken:
        return before
    queued = [-1] * len(instrs)
    for place, instr in enumerate(instrs):
        queued[place] = last.get(instr.queue, -1)
        last[instr.queue] = place
    for place in done:
        for other in (
            *(places[wait] for wait in instrs[place].after),
            *([queued[place]] if queued[place] >= 0 else []),
        ):
            before[place] |= before[other] | 1 << other
    return before


def _touched(plan: Plan, instrs: Sequence[Instr]) -> list[list[tuple[int, int, int]]]:
    """The ranges an instruction may touch: (tier, start, end); norms and decisions meet at an address of their own."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for number, held in enumerate(plan.home):
        spans.setdefault(number, []).append((held.tier, held.offset, held.offset + held.bytes))
    for instr in instrs:
        if isinstance(instr.op, Reserve):
            op = instr.op
            spans.setdefault(op.slot, []).append((op.tier, op.offset, op.offset + op.bytes))
    for instr in instrs:
        if isinstance(instr.op, Shift):
            for tier, start, end in spans.get(instr.op.slot, [])[:1]:
                spans[instr.op.slot].append((tier, instr.op.offset, instr.op.offset + end - start))
    rows = []
    for instr in instrs:
        row = [span for number in slots_of(instr.op) for span in spans.get(number, [])]
        if isinstance(instr.op, Run):
            row.append((0, plan.tiers[0].capacity_bytes - instr.op.nonmodel_bytes, plan.tiers[0].capacity_bytes))
        if isinstance(instr.op, Norm | Decide):
            row.append((-1, 0, 1))
        rows.append(row)
    return rows


def _meet(left: list[tuple[int, int, int]], right: list[tuple[int, int, int]]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in left for b in right)

"""Plans with one thing wrong, perhaps.

Every mutant changes a single instruction, slot or wait of a plan: dropped, duplicated, swapped or corrupted. Some
change nothing that matters; which, only an executor can tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from _orders import find_fault, find_fault_directed
from ps_core._extents import Extent, Kind, SegmentName
from ps_core._plan import (
    Held,
    Instr,
    Op,
    Plan,
    Queue,
    Segment,
    slots_of,
)
from ps_core._program import Program
from ps_core._verify import faults


@dataclass(frozen=True)
class Mutant:
    """A changed plan; ``segment`` is the one that changed (None: home did)."""

    plan: Plan
    how: str
    segment: SegmentName | None


def mutate(plan: Plan, rng: random.Random) -> Mutant | None:
    """One random change; None where the change drawn has nothing to change."""
    if rng.random() < 0.06:
        return _mutate_home(plan, rng)
    sizes = [len(segment.instrs) for segment in plan.segments]
    if not any(sizes):
        return None
    which = rng.choices(range(len(plan.segments)), sizes)[0]
    segment = plan.segments[which]
    how = rng.choice(tuple(_CHANGES))
    instrs = _CHANGES[how](list(segment.instrs), rng)
    if instrs is None or tuple(instrs) == segment.instrs:
        return None
    changed = Segment(segment.name, tuple(instrs))
    segments = (*plan.segments[:which], changed, *plan.segments[which + 1 :])
    return Mutant(replace(plan, segments=segments), how, segment.name)


# ---------------------------------------------------------------- instructions and waits

Change = Callable[[list[Instr], random.Random], list[Instr] | None]


def _drop(instrs: list[Instr], rng: random.Random) -> list[Instr]:
    gone = instrs.pop(rng.randrange(len(instrs)))
    if rng.random() < 0.2:
        return instrs  # whoever waits for it waits for ever
    return [replace(instr, after=_instead(instr.after, gone.id, gone.after)) for instr in instrs]


def _instead(after: tuple[int, ...], old: int, new: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(name for wait in after for name in (new if wait == old else (wait,))))


def _duplicate(instrs: list[Instr], rng: random.Random) -> list[Instr]:
    place = rng.randrange(len(instrs))
    twin = replace(instrs[place], id=max(instr.id for instr in instrs) + 1)
    where = place + 1 if rng.random() < 0.5 else rng.randint(place + 1, len(instrs))
    return [*instrs[:where], twin, *instrs[where:]]


def _swap(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    if len(instrs) < 2:
        return None
    one = rng.randrange(len(instrs) - 1)
    return _exchange(instrs, one, one + 1)


def _swap_far(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    return _exchange(instrs, *rng.sample(range(len(instrs)), 2)) if len(instrs) > 1 else None


def _exchange(instrs: list[Instr], one: int, two: int) -> list[Instr]:
    instrs[one], instrs[two] = instrs[two], instrs[one]
    return instrs


def _swap_in_queue(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    one = rng.randrange(len(instrs))
    later = [place for place in range(one + 1, len(instrs)) if instrs[place].queue is instrs[one].queue]
    return _exchange(instrs, one, later[0]) if later else None


def _swap_ops(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    if len(instrs) < 2:
        return None
    one, two = rng.sample(range(len(instrs)), 2)
    ops = instrs[one].op, instrs[two].op
    instrs[one], instrs[two] = replace(instrs[one], op=ops[1]), replace(instrs[two], op=ops[0])
    return instrs


def _drop_wait(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    place = _with_wait(instrs, rng)
    if place is None:
        return None
    after = instrs[place].after
    gone = rng.randrange(len(after))
    instrs[place] = replace(instrs[place], after=(*after[:gone], *after[gone + 1 :]))
    return instrs


def _redirect_wait(instrs: list[Instr], rng: random.Random) -> list[Instr] | None:
    place = _with_wait(instrs, rng)
    if place is None:
        return None
    after = list(instrs[place].after)
    low, high = (0, place) if rng.random() < 0.8 and place else (0, len(instrs))
    after[rng.randrange(len(after))] = instrs[rng.randrange(low, high)].id
    instrs[place] = replace(instrs[place], after=tuple(after))
    return instrs


def _with_wait(instrs: list[Instr], rng: random.Random) -> int | None:
    places = [place for place, instr in enumerate(instrs) if instr.after]
    return rng.choice(places) if places else None


def _requeue(instrs: list[Instr], rng: random.Random) -> list[Instr]:
    place = rng.randrange(len(instrs))
    instrs[place] = replace(instrs[place], queue=rng.choice(tuple(Queue)))
    return instrs


def _corrupt(instrs: list[Instr], rng: random.Random) -> list[Instr]:
    place = rng.randrange(len(instrs))
    op = instrs[place].op
    name = rng.choice([field.name for field in fields(op)])
    instrs[place] = replace(instrs[place], op=_with_other(op, name, instrs, rng))
    return instrs


def _with_other(op: Op, name: str, instrs: list[Instr], rng: random.Random) -> Op:
    """The operation with another value in one field."""
    old = getattr(op, name)
    changed: dict[str, object] = {name: old}
    if isinstance(old, bool):
        changed[name] = not old
    elif isinstance(old, Extent):
        changed[name] = other_extent(old, rng)
    elif isinstance(old, tuple):
        changed[name] = _other_slots(old, instrs, rng)
    elif name in ("slot", "source", "target", "shard", "full", "wire", "gradient", "accumulator", "master", "weight"):
        changed[name] = _other_slot(old, instrs, rng)
    elif name in ("offset", "bytes"):
        changed[name] = old + rng.choice((-128, 128, 64, -256, 1024, old, -old))
    elif name == "nonmodel_bytes":
        changed[name] = max(0, old + rng.choice((-1, 1, 128, -128, 4096)))
    else:  # visit, version, group, seq, tier
        changed[name] = old + rng.choice((-1, 1, 1, 2))
    return replace(op, **changed)


def _other_slot(old: int, instrs: list[Instr], rng: random.Random) -> int:
    named = sorted({slot for instr in instrs for slot in slots_of(instr.op)})
    return rng.choice((old - 1, old + 1, rng.choice(named), rng.choice(named)))


def _other_slots(old: tuple[int, ...], instrs: list[Instr], rng: random.Random) -> tuple[int, ...]:
    if not old:
        return (0,)
    place = rng.randrange(len(old))
    if rng.random() < 0.2:
        return (*old[:place], *old[place + 1 :])
    if len(old) > 1 and rng.random() < 0.3:
        return (*old[1:], old[0])
    return (*old[:place], _other_slot(old[place], instrs, rng), *old[place + 1 :])


def other_extent(old: Extent, rng: random.Random) -> Extent:
    """Another extent, perhaps one that is not there."""
    if rng.random() < 0.5:
        return Extent(old.kind, old.index + rng.choice((-1, 1)))
    return Extent(rng.choice(tuple(Kind)), old.index)


_CHANGES: dict[str, Change] = {
    "drop": _drop,
    "duplicate": _duplicate,
    "swap neighbours": _swap,
    "swap any two": _swap_far,
    "swap in a queue": _swap_in_queue,
    "swap operations": _swap_ops,
    "drop a wait": _drop_wait,
    "redirect a wait": _redirect_wait,
    "other queue": _requeue,
    "corrupt a field": _corrupt,
}


# ---------------------------------------------------------------- home


def _mutate_home(plan: Plan, rng: random.Random) -> Mutant | None:
    if not plan.home:
        return None
    home = list(plan.home)
    place = rng.randrange(len(home))
    held = home[place]
    match rng.choice(("drop", "duplicate", "swap", "tier", "offset", "bytes", "extent")):
        case "drop":
            home.pop(place)
        case "duplicate":
            home.insert(rng.randint(0, len(home)), held)
        case "swap":
            other = rng.randrange(len(home))
            home[place], home[other] = home[other], home[place]
        case "tier":
            home[place] = replace(held, tier=held.tier + rng.choice((-1, 1)))
        case "offset":
            home[place] = replace(held, offset=held.offset + rng.choice((-128, 128, 64, 1024)))
        case "bytes":
            home[place] = replace(held, bytes=held.bytes + rng.choice((-128, 128, 64)))
        case _:
            home[place] = Held(held.tier, held.offset, held.bytes, other_extent(held.extent, rng))
    return None if tuple(home) == plan.home else Mutant(replace(plan, home=tuple(home)), "home", None)


# ---------------------------------------------------------------- what becomes of them


def adversary_finds(
    program: Program, mutant: Mutant, rng: random.Random, orders: int = 24, *, directed: bool = False
) -> str | None:
    """What the adversary can show to be wrong with a mutant."""
    if mutant.segment is None:
        extents = {held.extent for held in mutant.plan.home}
        wanted = {
            Extent(kind, group.index) for group in program.layout.groups for kind in program.home_kinds(group.index)
        }
        if extents != wanted:
            return "home is not made of what has a home"
        if any(program.bytes_of(held.extent) > held.bytes for held in mutant.plan.home):
            return "a home is too small"
    names = [segment.name for segment in mutant.plan.segments] if mutant.segment is None else [mutant.segment]
    for name in names:
        segment = mutant.plan.segment(name)
        found = find_fault(program, mutant.plan, segment, rng, orders)
        found = found or (find_fault_directed(program, mutant.plan, segment) if directed else None)
        if found is not None:
            return found
    return None


def judge(program: Program, mutant: Mutant, rng: random.Random, orders: int = 24) -> tuple[str | None, str | None]:
    """What verify says of a mutant, and what the adversary can show."""
    said = faults(program, mutant.plan, limit=1)
    return (str(said[0]) if said else None), adversary_finds(program, mutant, rng, orders, directed=True)


@dataclass(slots=True)
class Tally:
    """How many mutants of each sort there were."""

    killed: int = 0
    survived: int = 0
    accepted: int = 0
    rejected: int = 0
    """Equivalent as far as the adversary can tell, but not for verify."""

    def add(self, verify_says: object, adversary_says: object) -> None:
        """Count one mutant."""
        if adversary_says:
            self.killed += bool(verify_says)
            self.survived += not verify_says
        else:
            self.accepted += not verify_says
            self.rejected += bool(verify_says)

    @property
    def kill_rate(self) -> float:
        """Of those that matter."""
        return self.killed / max(1, self.killed + self.survived)

    @property
    def reject_rate(self) -> float:
        """Of the equivalents."""
        return self.rejected / max(1, self.accepted + self.rejected)

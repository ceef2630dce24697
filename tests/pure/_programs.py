"""Random traces, layouts and programs, for property tests of everything that plans, checks or runs them.

Each builder draws from a `Choose`: `by_random` wraps a `random.Random` (plain loops, mutation tests), and the
Hypothesis strategies at the end wrap ``draw``, so both see the same programs and Hypothesis can shrink them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from ps_core._extents import Extent, Kind, Precision
from ps_core._layout import Layout, lay_out
from ps_core._plan import TIER_STACKS, Tier
from ps_core._planner.search import Setup
from ps_core._program import Program
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._units import ALIGNMENT_BYTES, align_up

T = TypeVar("T")

Choose = Callable[[int, int], int]
"""A whole number between the two, both included; shrinks towards the first."""


def by_random(rng: random.Random) -> Choose:
    """Choices made by a seeded generator."""
    return rng.randint


def by_draw(draw: DrawFn) -> Choose:
    """Choices made by Hypothesis."""
    return lambda low, high: draw(st.integers(low, high))


def flag(choose: Choose, percent: int) -> bool:
    """True in about so many of a hundred cases; shrinks towards False."""
    return choose(0, 99) >= 100 - percent


def pick(choose: Choose, options: Sequence[T]) -> T:
    """One of the options."""
    return options[choose(0, len(options) - 1)]


def some(choose: Choose, options: Sequence[T], percent: int) -> tuple[T, ...]:
    """Some of the options, in their order."""
    return tuple(option for option in options if flag(choose, percent))


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How large a random trace may be."""

    layers: int = 4
    tensors: int = 3
    """Tensors of one layer."""
    numel: int = 300
    nonmodel_bytes: int = 4096


SMALL = Bounds()
TINY = Bounds(layers=2, tensors=2, numel=130, nonmodel_bytes=1024)


# ---------------------------------------------------------------- traces


class Maker(Protocol):
    """A builder of moments over some tensors."""

    def __call__(self, choose: Choose, tensors: tuple[Tensor, ...], bounds: Bounds, layers: int) -> Trace: ...


def random_trace(choose: Choose, bounds: Bounds = SMALL) -> Trace:
    """A trace: mostly shaped like a network's, sometimes with moments that touch anything."""
    layers = choose(1, bounds.layers)
    count = choose(layers, layers * bounds.tensors)
    tensors = tuple(
        Tensor(name=f"t{index}", numel=choose(1, bounds.numel), trainable=not flag(choose, 15))
        for index in range(count)
    )
    maker: Maker = wild if flag(choose, 25) else network
    return maker(choose, tensors, bounds, layers)


def holding(choose: Choose, trace: Trace) -> Trace:
    """Somebody holds on to some of what two neighbouring moments read."""
    if not flag(choose, 40):
        return trace
    moments = list(trace.moments)
    for place, (before, moment) in enumerate(pairwise(trace.moments), start=1):
        both = tuple(index for index in moment.reads if index in before.reads)
        moments[place] = replace(moment, holds=some(choose, both, 60))
    return replace(trace, moments=tuple(moments))


def network(choose: Choose, tensors: tuple[Tensor, ...], bounds: Bounds, layers: int) -> Trace:
    """Layers forward, then backward, with a tied tensor, checkpoints and recomputation here and there."""
    owned: list[list[int]] = [[] for _ in range(layers)]
    for index in range(len(tensors)):
        if not flag(choose, 8):  # otherwise nothing ever uses it
            owned[min(index * layers // len(tensors), layers - 1)].append(index)
    if owned[0] and layers > 1 and flag(choose, 40):
        owned[-1].append(owned[0][0])  # tied, as embedding and head are
    made = [index for index in range(layers) if flag(choose, 60)]
    activation = {layer: number for number, layer in enumerate(made)}
    forward: list[Moment] = []
    backward: list[Moment] = []
    for layer, mine in enumerate(owned):
        makes = (activation[layer],) if layer in activation else ()
        forward.append(_moment(choose, bounds, f"forward {layer}", Phase.FORWARD, reads=mine, makes=makes))
        moments = _layer_backward(choose, bounds, tensors, layer, mine, makes)
        backward = [*moments, *backward]
    return Trace(
        model="random network",
        tensors=tensors,
        moments=(*forward, *backward),
        activations=tuple(Activation(name=f"a{layer}", bytes=choose(1, 700)) for layer in made),
        tokens=choose(0, 9),
    )


def _layer_backward(
    choose: Choose, bounds: Bounds, tensors: tuple[Tensor, ...], layer: int, mine: list[int], takes: tuple[int, ...]
) -> list[Moment]:
    learning = [index for index in mine if tensors[index].trainable and not flag(choose, 10)]
    name, moments = f"backward {layer}", []
    if flag(choose, 30):
        moments.append(_moment(choose, bounds, f"again {layer}", Phase.BACKWARD, reads=mine, takes=takes))
        takes = takes if flag(choose, 50) else ()
    reads = [] if layer == 0 and flag(choose, 50) else mine  # an embedding's backward needs no payload
    moments.append(_moment(choose, bounds, name, Phase.BACKWARD, reads=reads, grads=learning, takes=takes))
    return moments


def wild(choose: Choose, tensors: tuple[Tensor, ...], bounds: Bounds, layers: int) -> Trace:
    """Moments that read and change anything, in any order the rules of a trace allow."""
    everything = range(len(tensors))
    learners = [index for index in everything if tensors[index].trainable]
    activations = range(choose(0, layers))
    places = {index: choose(0, layers - 1) for index in activations}
    moments = [
        _moment(
            choose,
            bounds,
            f"forward {number}",
            Phase.FORWARD,
            reads=some(choose, everything, 40),
            makes=[index for index in activations if places[index] == number],
        )
        for number in range(layers)
    ]
    count = choose(1 if activations else 0, layers + 1)
    taker = {index: choose(0, count - 1) for index in activations}
    for number in range(count):
        takes = [index for index in activations if taker[index] == number or flag(choose, 15)]
        reads, grads = some(choose, everything, 40), some(choose, learners, 30)
        name = f"backward {number}"
        moments.append(_moment(choose, bounds, name, Phase.BACKWARD, reads=reads, grads=grads, takes=takes))
    return Trace(
        model="random moments",
        tensors=tensors,
        moments=tuple(moments),
        activations=tuple(Activation(name=f"a{index}", bytes=choose(1, 700)) for index in activations),
    )


def _moment(
    choose: Choose,
    bounds: Bounds,
    name: str,
    phase: Phase,
    *,
    reads: Sequence[int] = (),
    grads: Sequence[int] = (),
    makes: Sequence[int] = (),
    takes: Sequence[int] = (),
) -> Moment:
    return Moment(
        name=name,
        phase=phase,
        reads=tuple(reads),
        grads=tuple(grads),
        makes=tuple(makes),
        takes=tuple(takes),
        nonmodel_bytes=choose(0, bounds.nonmodel_bytes) if flag(choose, 85) else 0,
        flops=float(choose(0, 10**9)),
    )


# ---------------------------------------------------------------- layouts, programs


def random_layout(choose: Choose, trace: Trace, *, most_ranks: int = 4) -> Layout:
    """The trace packed into groups of any size, for one process or several."""
    largest = max(1, trace.parameters)
    ranks = choose(2, most_ranks) if most_ranks > 1 and flag(choose, 40) else 1
    return lay_out(trace, group_numel=choose(1, largest), ranks=ranks)


def keeping(choose: Choose, layout: Layout) -> Layout:
    """Some groups are kept in fp32, now and then."""
    if not flag(choose, 25):
        return layout
    groups = tuple(replace(group, fp32=flag(choose, 40)) for group in layout.groups)
    return replace(layout, groups=groups)


def make_program(
    choose: Choose,
    bounds: Bounds = SMALL,
    *,
    most_ranks: int = 4,
    training: bool | None = None,
    apart: Choose | None = None,
) -> Program:
    """A program over a random trace; ``training`` None leaves that to chance too.

    ``apart`` chooses what is held from moment to moment, so that whatever else a seed stands for stays the same.
    """
    trace = holding(apart or choose, random_trace(choose, bounds))
    layout = random_layout(choose, trace, most_ranks=most_ranks)
    copies = pick(apart or choose, (1, 1, 1, 2, 3)) if most_ranks > 1 else 1
    return Program(
        trace=trace,
        layout=keeping(apart or choose, layout),
        precision=pick(choose, tuple(Precision)),
        accumulate=choose(2, 3) if flag(choose, 35) else 1,
        training=not flag(choose, 12) if training is None else training,
        nonmodel_overhead=0.05 if flag(choose, 20) else 0.0,
        states=pick(apart or choose, (2, 2, 2, 0, 1, 3, 4)),
        copies=copies,
    )


def random_program(
    rng: random.Random, bounds: Bounds = SMALL, *, most_ranks: int = 4, training: bool | None = None
) -> Program:
    """A program by a plain seeded generator."""
    apart = random.Random()
    apart.setstate(rng.getstate())
    apart.seed(apart.random())
    return make_program(by_random(rng), bounds, most_ranks=most_ranks, training=training, apart=by_random(apart))


# ---------------------------------------------------------------- tiers


def pinned_bytes(program: Program) -> int:
    """The most the compute tier must hold at once: non-model bytes and what a moment uses, or one gather or scatter."""
    most = 0
    for segment in program.segments:
        for visit in program.segment_visits(segment):
            used = sum(program.bytes_of(use.extent) for use in program.uses(segment, visit))
            most = max(most, used + visit.nonmodel_bytes)
    return max(most, 3 * largest_bytes(program))


def largest_bytes(program: Program) -> int:
    """The largest extent of the program, gathered groups included."""
    groups = program.layout.groups
    extra = 8 if program.copies > 1 else 0  # for sums across copies
    sizes = (group.shard_numel * max(4, program.ranks * program.element_bytes(group.index) + extra) for group in groups)
    activation = max((activation.bytes for activation in program.trace.activations), default=0)
    return max(*sizes, 0, activation + 127)


def model_bytes(program: Program) -> int:
    """Everything that has a home, gradients gathered or waiting, and every activation."""
    gathered = (Kind.FULL, Kind.GRAD, Kind.WIRE) if program.sharded else (Kind.GRAD,)
    home = sum(
        program.bytes_of(Extent(kind, group.index))
        for group in program.layout.groups
        for kind in (*program.home_kinds(group.index), *gathered)
    )
    return home + sum(activation.bytes + 127 for activation in program.trace.activations)


def make_tiers(choose: Choose, program: Program, stack: tuple[str, ...] | None = None) -> tuple[Tier, ...]:
    """Budgets that a sound planner can keep, from nearly tight to roomy; ``stack`` None: any legal one."""
    names = stack or pick(choose, TIER_STACKS)
    slack, model, largest = ALIGNMENT_BYTES * 8, model_bytes(program), largest_bytes(program)
    top = pinned_bytes(program) + 5 * largest
    if len(names) == 1:
        return (Tier(names[0], top + model + slack + choose(0, model)),)
    capacities = [top + slack + choose(0, model)]
    capacities += [6 * largest + slack + choose(0, model) for _ in names[1:-1]]
    capacities.append(model + 6 * largest + slack + choose(0, model))
    return tuple(Tier(name, align_up(capacity)) for name, capacity in zip(names, capacities, strict=True))


def random_tiers(rng: random.Random, program: Program, stack: tuple[str, ...] | None = None) -> tuple[Tier, ...]:
    """Budgets by a plain seeded generator."""
    return make_tiers(by_random(rng), program, stack)


# ---------------------------------------------------------------- strategies


def traces(bounds: Bounds = SMALL) -> SearchStrategy[Trace]:
    """Random traces."""
    return st.composite(lambda draw: holding(by_draw(draw), random_trace(by_draw(draw), bounds)))()


def setup_of(program: Program) -> Setup:
    """What a search is told of a program; it chooses the groups."""
    return Setup(
        ranks=program.ranks,
        copies=program.copies,
        precision=program.precision,
        accumulate=program.accumulate,
        training=program.training,
        states=program.states,
        nonmodel_overhead=program.nonmodel_overhead,
    )


def programs(bounds: Bounds = SMALL, *, most_ranks: int = 4, training: bool | None = None) -> SearchStrategy[Program]:
    """Random programs."""
    return st.composite(lambda draw: make_program(by_draw(draw), bounds, most_ranks=most_ranks, training=training))()


@st.composite
def programs_and_tiers(
    draw: DrawFn,
    bounds: Bounds = SMALL,
    *,
    most_ranks: int = 4,
    training: bool | None = None,
    stack: tuple[str, ...] | None = None,
) -> tuple[Program, tuple[Tier, ...]]:
    """Random programs with budgets they fit in."""
    choose = by_draw(draw)
    program = make_program(choose, bounds, most_ranks=most_ranks, training=training)
    return program, make_tiers(choose, program, stack)

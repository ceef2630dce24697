"""Planning happens within a user's forward pass. What it keeps of a refusal must not keep that pass's tensors.

An exception keeps its traceback, that the frames it came through, and these the frames that called them, up to the
user's, with all their variables.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest

from _programs import TINY, random_program
from ps_core._errors import DoesNotFit
from ps_core._plan import Tier
from ps_core._planner.bounds import lower_bounds
from ps_core._planner.low_memory_plan import tight_plan
from ps_core._planner.search import Setup, find_plan
from ps_core._simulate.machine import machine
from ps_core._trace import Moment, Phase, Tensor, Trace

F, B = Phase.FORWARD, Phase.BACKWARD


class Variable:
    """Stands for what a user's function has made."""


def call_as_a_user(what: Callable[[], object]) -> tuple[weakref.ref[Variable], bool]:
    variable, worked = Variable(), True
    try:
        what()
    except DoesNotFit:
        worked = False
    return weakref.ref(variable), worked


def works(what: Callable[[], object]) -> bool:
    """Whether it does, once it is sure that nothing of its caller is kept."""
    gc.collect()
    gc.disable()
    try:
        variable, worked = call_as_a_user(what)
        assert variable() is None, "a variable of the caller lives on"
    finally:
        gc.enable()
    return worked


def chain(layers: int) -> Trace:
    moments = [
        *(Moment(name=f"f{index}", phase=F, reads=(index,)) for index in range(layers)),
        *(Moment(name=f"b{index}", phase=B, reads=(index,), grads=(index,)) for index in reversed(range(layers))),
    ]
    tensors = tuple(Tensor(name=f"layer {index}", numel=640) for index in range(layers))
    return Trace(model="chain", tensors=tensors, moments=tuple(moments))


@pytest.mark.parametrize("room_bytes", [3 * 1280, 8 * 1280])
def test_a_search_keeps_nothing(room_bytes: int) -> None:
    """Placements that leave too little room are remembered."""
    tiers = (Tier("device", room_bytes), Tier("host", 1 << 20))
    assert works(lambda: find_plan(chain(8), tiers, machine("cpu"), setup=Setup()))


def test_a_placement_that_is_refused_later_keeps_nothing() -> None:
    """As in test_pressure: only making the plan shows that the placement found does not work."""
    moments = (Moment(name="f", phase=F, reads=(1,)), Moment(name="b", phase=B, reads=(1,), grads=(1,)))
    tensors = (Tensor(name="idle", numel=6400), Tensor(name="used", numel=64))
    trace = Trace(model="idle", tensors=tensors, moments=moments)
    tiers = (Tier("host", 6 * 6400 + 256), Tier("disk", 200_000))
    assert works(lambda: find_plan(trace, tiers, machine("cpu"), setup=Setup(group_numel=64)))


def test_what_does_not_fit_keeps_nothing() -> None:
    assert not works(
        lambda: find_plan(chain(4), (Tier("device", 1280), Tier("host", 9)), machine("cpu"), setup=Setup())
    )


@pytest.mark.parametrize("seed", [25, 61, 97])
def test_what_every_rule_of_the_tight_planner_gives_up_keeps_nothing(seed: int) -> None:
    made = random_program(random.Random(seed), TINY)
    host = Tier("host", 1 << 20)
    least = lower_bounds(made, (Tier("device", 1 << 20), host))[0]
    assert not works(lambda: tight_plan(made, (Tier("device", least.needed_bytes), host)))

"""List the states of a parameter's weight slot and gradient, and every transition between them.

[Note: contents and gradient]
A state is a pair. `SlotContents` says what the parameter's part of its group's weight slot holds. `GradientPlace` says
where its gradient is. Memory is counted besides the 2n bytes of a 16-bit weight with n elements. The fp32 master always
holds the weight, so every state can return to (WEIGHT, NONE).

    contents            gradient        registered                                    memory besides the weight
    WEIGHT              NONE            the weight                                    0
    WEIGHT              OWN_TENSOR      the weight, and the tensor autograd made      2n bytes (4n once added to)
    WEIGHT              IN_ACCUMULATOR  the weight, and its part of the fp32 sum      4n bytes, where the sum is
    WEIGHT              ON_ITS_WAY      the weight; the sum over ranks is not there   its group's staging slot
    GRADIENT            IN_WEIGHT_SLOT  the gradient in the weight's place            0
    UNDEFINED           any other       nothing may read the slot until the weight is rebuilt; else as WEIGHT

No other pair exists: a gradient is in the weight slot exactly where the slot holds a gradient. `ps_core._states` has
the states of the same parameter while operators use it; `tests/engine/test_states.py` holds the two tables together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum, auto
from types import MappingProxyType
from typing import TypeAlias


class SlotContents(StrEnum):
    """Say what a parameter's part of the weight slot holds.

    WEIGHT     The weight.
    GRADIENT   The gradient, written over the weight. The weight is in the fp32 master only.
    UNDEFINED  Nothing of use: the slot was reserved for gradients without a fetch, and this parameter got none, or its
               gradient was discarded. The weight is in the fp32 master only.
    """

    # A StrEnum hashes without a Python call, and every transition hashes three members.
    WEIGHT = auto()
    GRADIENT = auto()
    UNDEFINED = auto()


class GradientPlace(StrEnum):
    """Say where a parameter's gradient is.

    NONE            There is none.
    OWN_TENSOR      In the tensor that autograd made, or in an fp32 sum that took its place.
    IN_WEIGHT_SLOT  In the weight slot, over the weight.
    IN_ACCUMULATOR  In the group's fp32 sum, on the tier of that sum's home slot.
    ON_ITS_WAY      Several ranks: being summed over ranks; this rank has its own part in a staging slot, if any.
    """

    NONE = auto()
    OWN_TENSOR = auto()
    IN_WEIGHT_SLOT = auto()
    IN_ACCUMULATOR = auto()
    ON_ITS_WAY = auto()


class ParamEvent(StrEnum):
    """Name what happens to a parameter: one method of `ParamState` for each.

    KEPT            The gradient is in its own tensor: as autograd made it, or added to, or copied from the slot.
    SUM_EXPECTED    Several ranks: the sum over ranks of this gradient was requested.
    OVERWRITTEN     The gradient, or the sum over ranks, was written over the weight. Nothing may read the weight then.
    SUMMED          The gradient was added to the group's fp32 sum, or began the parameter's part of it.
    SLOT_TAKEN      The weight slot was given to gradients, and the weight was not fetched.
    REBUILT         The weight slot holds the weight again: rebuilt from the master, or written from outside.
    DISCARDED       The gradient was forgotten. From IN_WEIGHT_SLOT, REBUILT has to follow before the weight is read.
    STEPPED         The optimizer used the gradient up, and wrote the new weight.
    """

    KEPT = auto()
    SUM_EXPECTED = auto()
    OVERWRITTEN = auto()
    SUMMED = auto()
    SLOT_TAKEN = auto()
    REBUILT = auto()
    DISCARDED = auto()
    STEPPED = auto()


State: TypeAlias = tuple[SlotContents, GradientPlace]


def _rows() -> Iterator[tuple[tuple[ParamEvent, SlotContents, GradientPlace], State]]:
    none, own, on_its_way = GradientPlace.NONE, GradientPlace.OWN_TENSOR, GradientPlace.ON_ITS_WAY
    in_slot, in_sum = GradientPlace.IN_WEIGHT_SLOT, GradientPlace.IN_ACCUMULATOR
    weight, gradient, undefined = SlotContents.WEIGHT, SlotContents.GRADIENT, SlotContents.UNDEFINED
    for contents in (weight, undefined):
        for place in (none, own):
            yield (ParamEvent.KEPT, contents, place), (contents, own)
        yield (ParamEvent.SUM_EXPECTED, contents, none), (contents, on_its_way)
        for place in (none, own, on_its_way):
            yield (ParamEvent.OVERWRITTEN, contents, place), (gradient, in_slot)
        for place in (none, own, on_its_way, in_sum):
            yield (ParamEvent.SUMMED, contents, place), (contents, in_sum)
            yield (ParamEvent.SLOT_TAKEN, contents, place), (undefined, place)
            yield (ParamEvent.REBUILT, contents, place), (weight, place)
            yield (ParamEvent.DISCARDED, contents, place), (contents, none)
        for place in (own, in_sum):
            yield (ParamEvent.STEPPED, contents, place), (weight, none)
    yield (ParamEvent.KEPT, gradient, in_slot), (undefined, own)
    yield (ParamEvent.SUMMED, gradient, in_slot), (undefined, in_sum)
    yield (ParamEvent.DISCARDED, gradient, in_slot), (undefined, none)
    yield (ParamEvent.STEPPED, gradient, in_slot), (weight, none)


TRANSITIONS: Mapping[tuple[ParamEvent, SlotContents, GradientPlace], State] = MappingProxyType(dict(_rows()))
"""Every legal event in every state, and the state that follows."""


def legal_events(contents: SlotContents, gradient: GradientPlace) -> tuple[ParamEvent, ...]:
    """List the events that may happen in a state."""
    return tuple(event for event in ParamEvent if (event, contents, gradient) in TRANSITIONS)

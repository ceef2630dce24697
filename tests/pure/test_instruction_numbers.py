"""Instructions may have any numbers: they only say which instruction another one waits for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _plans import ORIGINS, random_plan
from _programs import TINY
from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._plan import Segment
from ps_core._simulate.clock import simulate
from ps_core._simulate.machine import machine
from ps_core._verify import verify

CARD = machine("h100")


@settings(max_examples=20)
@given(
    st.integers(0, 2**32), st.sampled_from(ORIGINS), st.sampled_from([lambda i: i + 1000, lambda i: -i, lambda i: i])
)
def test_instructions_may_have_any_numbers(seed: int, origin: str, renumber: Callable[[int], int]) -> None:
    """As `verify` accepts them."""
    program, plan = random_plan(random.Random(seed), origin, TINY)
    other = replace(plan, segments=tuple(renumbered(segment, renumber) for segment in plan.segments))
    verify(program, other)
    assert simulate(program, other, CARD) == simulate(program, plan, CARD)


def renumbered(segment: Segment, renumber: Callable[[int], int]) -> Segment:
    rows = [replace(row, id=renumber(row.id), after=tuple(map(renumber, row.after))) for row in segment.instrs]
    return replace(segment, instrs=tuple(rows))


def test_a_wait_for_an_instruction_that_is_not_there() -> None:
    program, plan = random_plan(random.Random(0), ORIGINS[0], TINY)
    first = renumbered(plan.segments[0], lambda number: number + 1)
    rows = (*first.instrs[:-1], replace(first.instrs[-1], after=(7000,)))
    wrong = replace(plan, segments=(replace(first, instrs=rows), *plan.segments[1:]))
    with pytest.raises(PlanMismatch, match="an instruction waits for 7000, which is not there"):
        simulate(program, wrong, CARD)


def test_a_segment_is_found_by_its_name_as_text() -> None:
    _, plan = random_plan(random.Random(0), ORIGINS[0], TINY)
    assert all(plan.segment(segment.name.value) is segment for segment in plan.segments)
    with pytest.raises(InvalidInput, match="this plan has no segment 'epilog'"):
        plan.segment("epilog")

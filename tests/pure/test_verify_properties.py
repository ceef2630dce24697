"""verify against an adversary: neither refuses a sound plan, and they agree about plans with one thing wrong."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from _mutants import Tally, judge, mutate
from _orders import find_fault, find_fault_directed
from _plans import ORIGINS, random_plan
from ps_core._verify import faults


@pytest.mark.parametrize("origin", ORIGINS)
def test_sound_plans_are_accepted_and_withstand_the_adversary(origin):
    rng = random.Random(f"sound {origin}")
    for _ in range(40):
        program, plan = random_plan(rng, origin)
        assert faults(program, plan) == ()
        for segment in plan.segments:
            assert find_fault(program, plan, segment, rng, orders=8) is None
            if len(segment.instrs) < 40:
                assert find_fault_directed(program, plan, segment) is None


@pytest.mark.slow
def test_mutants_that_matter_are_killed_and_equivalents_accepted():
    """The rates are as promised; docs/verification.md has them for a longer run of the same."""
    rng, tally = random.Random("mutants"), Tally()
    for turn in range(60):
        program, plan = random_plan(rng, ORIGINS[turn % len(ORIGINS)])
        for _ in range(30):
            mutant = mutate(plan, rng)
            if mutant is not None:
                tally.add(*judge(program, mutant, rng))
    assert tally.killed > 800
    assert tally.accepted > 150
    assert tally.kill_rate >= 0.99, tally
    assert tally.reject_rate <= 0.01, tally


def test_every_change_makes_mutants_that_matter():
    """No sort of mutation is idle: each one, again and again, makes plans that are really wrong."""
    rng, tallies = random.Random("sorts"), defaultdict(Tally)
    for turn in range(40):
        program, plan = random_plan(rng, ORIGINS[turn % len(ORIGINS)])
        for _ in range(15):
            mutant = mutate(plan, rng)
            if mutant is not None and tallies[mutant.how].killed < 3:
                tallies[mutant.how].add(*judge(program, mutant, rng))
    assert len(tallies) == 11
    assert {how for how, tally in tallies.items() if tally.killed < 3} == set()


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_plan_of_another_program_is_refused_in_words(origin):
    """Whatever is wrong with it, what comes out is a fault, and never another error."""
    rng = random.Random(f"another {origin}")
    pairs = [random_plan(rng, origin) for _ in range(40)]
    for (_, plan), (other, right) in pairwise(pairs):
        found = faults(other, plan)
        assert found != () or plan.home == right.home
        for segment, its in zip(plan.segments, right.segments, strict=False):
            mixed = replace(right, segments=tuple(segment if row is its else row for row in right.segments))
            faults(other, mixed)

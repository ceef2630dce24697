"""Plans with something changed: what verify accepts, the reference carries out to the same bits in every order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _mutants import mutate
from _plans import ORIGINS, random_plan
from _programs import TINY
from _symbolic import Symbolic, batch
from ps_core._plan import Instr, Plan, Queue, Release, Reserve, Run, Segment, Shift, Tier
from ps_core._program import Program
from ps_core._reference.execute_plan import Execution, Order, execute
from ps_core._reference.oracle import train_unconstrained
from ps_core._reference.training_rules import Training
from ps_core._verify import faults, verify
from test_reference import HAND, PROGRAM, S, with_ops

ONE_STEP = Training(batch=batch, iterations=1, evaluate_after=frozenset({0}))


def carried_out(program: Program, plan: Plan, seed: int) -> None:
    """Check the plan's result, one segment after the other and with segments that overlap."""
    network, order = Symbolic(program.trace), tuple(Order)[seed % len(Order)]
    want = train_unconstrained(network, program, ONE_STEP)
    for overlap in (False, True):
        execution = Execution(order=order, seed=seed, overlap=overlap)
        assert execute(network, program, plan, ONE_STEP, execution) == want


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(ORIGINS), st.integers(1, 3))
def test_what_verify_accepts_is_carried_out(seed: int, origin: str, changes: int) -> None:
    rng = random.Random(seed)
    program, plan = random_plan(rng, origin, TINY)
    for _ in range(6):
        found = plan
        for _ in range(changes):
            mutant = mutate(found, rng)
            found = found if mutant is None else mutant.plan
        if not faults(program, found, limit=1):
            carried_out(program, found, rng.randrange(10**6))


def ahead_of_its_slot() -> Plan:
    """A shift that is listed before the reservation that it waits for."""
    rows = (
        Instr(7, Queue.CPU, Shift(9, 1920), (9,)),
        Instr(8, Queue.CPU, Release(9)),
        Instr(9, Queue.D2H, Reserve(9, 1, 896, 128)),
    )
    segments = (*HAND.segments[:2], Segment(S.STEP, (*HAND.segment(S.STEP).instrs, *rows)), *HAND.segments[3:])
    return replace(HAND, tiers=(HAND.tiers[0], Tier("host", 2048)), segments=segments)


SOUND = {
    "a home larger than needed": replace(HAND, home=(*HAND.home[:3], replace(HAND.home[3], bytes=384))),
    "more non-model bytes than needed": with_ops(S.MICRO_LAST, {2: Run(0, (4,), 128)}),
    "listed in another order": ahead_of_its_slot(),
}


@pytest.mark.parametrize("plan", SOUND.values(), ids=SOUND)
def test_a_plan_by_hand_that_differs_in_what_may_differ(plan: Plan) -> None:
    verify(PROGRAM, plan)
    for seed in range(5):
        carried_out(PROGRAM, plan, seed)

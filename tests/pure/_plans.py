"""Sound plans of every origin, for whoever checks or runs plans."""

from __future__ import annotations

import random

from _programs import SMALL, TINY, Bounds, random_program, random_tiers
from _serial import Waits, serial_plan
from ps_core._errors import DoesNotFit
from ps_core._plan import TIER_STACKS, Plan
from ps_core._planner.eviction_policy import Policy
from ps_core._planner.low_memory_plan import tight_plan
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.tier_division import NoRoom, make_frame
from ps_core._program import Program

ORIGINS = ("serial", "planner", "tight")


def random_plan(rng: random.Random, origin: str, bounds: Bounds | None = None) -> tuple[Program, Plan]:
    """A random program with a plan that is sound if its maker is; the budget is random too, mostly tight."""
    while True:
        program = random_program(rng, bounds or rng.choice((TINY, SMALL)))
        plan = _attempt(program, rng, origin)
        if plan is not None:
            return program, plan


def _attempt(program: Program, rng: random.Random, origin: str) -> Plan | None:
    if origin == "serial":
        waits, restless = rng.choice(tuple(Waits)), rng.choice((0, 0.1, 0.3))
        return serial_plan(program, rng, rng.choice(TIER_STACKS), waits=waits, restless=restless)
    tiers = random_tiers(rng, program)
    try:
        if origin == "tight":
            return tight_plan(program, tiers)
        groups = range(len(program.layout.groups))
        streamed = frozenset(group for group in groups if rng.random() < 0.3)
        resident, policy = rng.randint(0, len(groups)), rng.choice(tuple(Policy))
        within = program.may_step_in_backward and rng.random() < 0.5
        placement = filled(program, tiers, resident=resident, streamed=streamed, in_backward=within)
        return make_plan(make_frame(program, tiers, placement, policy))
    except (NoRoom, DoesNotFit):
        return None

"""A plan that another process sends is the same plan, and is believed only once it is verified."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from _plans import ORIGINS, random_plan
from ps_core._errors import InvalidInput, PlanMismatch
from ps_core._layout import lay_out
from ps_core._plan import Plan, Tier
from ps_core._plan_text import FORMAT, plan_from_text, plan_to_text
from ps_core._planner.search import Setup, adopted, find_plan
from ps_core._simulate.machine import machine
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

MIB = 2**20


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_plan_is_read_as_it_was_written(origin):
    rng = random.Random(origin)
    for _ in range(40):
        plan = random_plan(rng, origin)[1]
        assert plan_from_text(plan_to_text(plan)) == plan


def test_a_plan_from_elsewhere_is_verified():
    trace, a100 = analytic_trace(shape("gpt-50m"), Workload(batch=4)), machine("a100-40")
    layout, setup = lay_out(trace, group_numel=8_000_000, ranks=2), Setup(quick=True)
    tiers = (Tier("device", 1000 * MIB), Tier("host", 4096 * MIB))
    found = find_plan(trace, tiers, a100, setup=setup, layout=layout)
    taken = adopted(plan_from_text(plan_to_text(found.plan)), trace, layout, a100, setup=setup)
    assert (taken.plan, taken.prediction) == (found.plan, found.prediction)
    first, *others = found.plan.segments
    assert first.instrs
    with pytest.raises(PlanMismatch):
        adopted(replace(found.plan, segments=tuple(others)), trace, layout, a100, setup=setup)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"format": "another"}),
        json.dumps({"format": FORMAT, "tiers": 3}),
        json.dumps({"format": FORMAT, "tiers": [["device"]], "home": [], "segments": {}}),
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InvalidInput, match="not a plan: expected a JSON object with format"):
        plan_from_text(text)


@pytest.mark.parametrize("number", ["384.0", "3e2", "NaN", "Infinity"])
def test_a_number_that_is_not_whole_is_refused(number):
    """All numbers of a plan count something; Python would compare 384.0 as 384, and fail to address memory by it."""
    plan = Plan(tiers=(Tier("device", 1024), Tier("host", 77777)), home=(), segments=())
    with pytest.raises(InvalidInput, match=f"not a plan: .* whole number, found {number}"):
        plan_from_text(plan_to_text(plan).replace("77777", number))

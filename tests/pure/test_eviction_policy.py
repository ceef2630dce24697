"""Eviction policies on unit extents, against exhaustive search."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core._planner.eviction_policy import NEVER, Policy, Ranker, Traffic, on_demand

KEYS = "abcd"


@st.composite
def workloads(draw, *, most=7):
    """Requests, capacities that allow them, what is written, what is there at the start."""
    requests = draw(st.lists(st.frozensets(st.sampled_from(KEYS), max_size=3), min_size=1, max_size=most))
    capacities = [draw(st.integers(max(len(wanted), 1), 4)) for wanted in requests]
    writes = [draw(st.frozensets(st.sampled_from(sorted(wanted)))) if wanted else frozenset() for wanted in requests]
    start = draw(st.frozensets(st.sampled_from(KEYS), max_size=4))
    return requests, capacities, writes, start


def subsets(items):
    items = sorted(items)
    return [frozenset(chosen) for size in range(len(items) + 1) for chosen in combinations(items, size)]


def optimum(requests, capacities, start, writes=None):
    """The least cost of any schedule: loads, and write-backs where ``writes`` is given. Loading early never helps."""

    @cache
    def cost(moment, held, dirty):
        if moment == len(requests):
            return 0
        wanted = requests[moment]
        best = float("inf")
        for kept in subsets(held - wanted):
            after = (held & wanted) | kept | wanted
            if len(after) > capacities[moment]:
                continue
            gone = held - after
            price = len(wanted - held) + (len(gone & dirty) if writes else 0)
            stained = (dirty - gone) | (writes[moment] if writes else frozenset())
            best = min(best, price + cost(moment + 1, after, stained))
        return best

    return cost(0, start, frozenset())


@given(workloads())
@settings(max_examples=150)
def test_belady_on_demand_loads_as_little_as_any_schedule(workload):
    requests, capacities, _, start = workload
    assert on_demand(requests, capacities, Policy.BELADY, start=start).loads == optimum(requests, capacities, start)


@given(workloads(most=6))
@settings(max_examples=100)
def test_with_dear_write_backs_belady_costs_at_most_twice_the_optimum(workload):
    requests, capacities, writes, _ = workload
    traffic = on_demand(requests, capacities, Policy.BELADY, writes=writes)
    assert traffic.loads + traffic.write_backs <= 2 * optimum(requests, capacities, frozenset(), writes)


@given(workloads(), st.sampled_from([Policy.LRU, Policy.FIFO, Policy.STATIC]))
@settings(max_examples=100)
def test_no_policy_loads_less_than_belady(workload, policy):
    requests, capacities, _, start = workload
    belady = on_demand(requests, capacities, Policy.BELADY, start=start).loads
    assert on_demand(requests, capacities, policy, start=start).loads >= belady


def scan(*keys):
    return [frozenset(key) for key in keys]


@pytest.mark.parametrize(
    ("policy", "loads"), [(Policy.BELADY, 6), (Policy.LRU, 9), (Policy.FIFO, 9), (Policy.STATIC, 9)]
)
def test_a_cyclic_scan_tells_the_policies_apart(policy, loads):
    requests = scan("a", "b", "c") * 3
    assert on_demand(requests, [2] * 9, policy).loads == loads


def test_first_in_is_not_least_recently_used():
    requests = scan("a", "b", "a", "c", "a")
    assert on_demand(requests, [2] * 5, Policy.LRU).loads == 3
    assert on_demand(requests, [2] * 5, Policy.FIFO).loads == 4


def test_a_fall_of_capacity_forces_evictions_and_changed_extents_are_written_back():
    requests = [frozenset("abc"), frozenset("a"), frozenset("b")]
    traffic = on_demand(requests, [3, 1, 1], Policy.BELADY, writes=[frozenset("bc"), frozenset(), frozenset()])
    assert traffic == Traffic(loads=4, write_backs=2)


def test_the_static_policy_keeps_its_set_and_ranks_the_others_by_use():
    ranker = Ranker(Policy.STATIC, {}, kept=frozenset("a"))
    for key in "abc":
        ranker.loaded(key)
    ranker.used("b")
    assert ranker.worth("c", 0) < ranker.worth("b", 0) < ranker.worth("a", 0)
    assert ranker.worth("unseen", 0) == 0


def test_next_use_is_after_now():
    ranker = Ranker(Policy.BELADY, {"a": (1, 4)})
    assert [ranker.next_use("a", now) for now in (0, 1, 3, 4)] == [1, 4, 4, NEVER]
    assert ranker.next_use("b", 0) == NEVER
    assert ranker.worth("a", 0) > ranker.worth("a", 1) > ranker.worth("b", 1)

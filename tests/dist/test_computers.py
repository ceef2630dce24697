"""Ranks of several computers, each of which shares its memory: the same bits, and less over the network."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import _computer_cases as cases
import _transport_cases as transport_cases
import _zero_cases as zero_cases
from _crew import Crew, crew
from ps_dist._computer_messages import _Route

LONG = 32_768 + 5
BYTES = {"bf16": 2, "fp32": 4}


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    with crew(3) as made:
        yield made


def which(two: Crew, three: Crew, four: Crew, layout: str) -> Crew:
    return {2: two, 3: three, 4: four}[len(layout)]


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["ab", "aab", "aba", "aabb", "abab", "aaab", "abbb", "abbc"])
def test_a_shard_crosses_once_for_each_computer(two: Crew, three: Crew, four: Crew, layout: str, kind: str) -> None:
    ranks, size = len(layout), LONG * BYTES[kind]
    found = which(two, three, four, layout).run(cases.over, layout, transport_cases.gathers, LONG, kind, 1)
    crossed = dict.fromkeys(layout, 0)
    for computer, (received, network, transport) in zip(layout, found, strict=True):
        assert received == 2 * (ranks - 1) * size, "every shard comes to every rank, in two gathers"
        assert transport == ("gloo" if layout == "ab" else "shared+gloo")
        crossed[computer] += network.get("all_gather", 0)
    assert crossed == {computer: 2 * (ranks - layout.count(computer)) * size for computer in crossed}


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("layout", ["aab", "aabb", "abab", "aaab"])
def test_sums_are_in_rank_order(two: Crew, three: Crew, four: Crew, layout: str, pieces: int) -> None:
    """What is added up first would change the bits: contributions of other computers come one by one."""
    kept = which(two, three, four, layout)
    found = kept.run(cases.over, layout, transport_cases.reduces, LONG, "bf16", pieces, 2)
    for computer, (received, network, _) in zip(layout, found, strict=True):
        assert received["reduce_scatter"] == (len(layout) - 1) * LONG * 2
        rounds = 3  # into two types, and once more
        assert network.get("reduce_scatter", 0) == rounds * (len(layout) - layout.count(computer)) * LONG * 2


@pytest.mark.parametrize("layout", ["aabb", "abab"])
def test_copies_of_the_model(four: Crew, layout: str) -> None:
    for case, args in ((transport_cases.gathers, ()), (transport_cases.reduces, (3,))):
        four.run(cases.over, layout, case, LONG, "bf16", *args, 5, replicate=2)


@pytest.mark.parametrize("layout", ["aab", "aabb", "aaab"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_training_has_the_bits_of_one_process(three: Crew, four: Crew, layout: str, kind: str) -> None:
    kept = which(four, three, four, layout)
    kept.run(cases.over, layout, zero_cases.trains, zero_cases.Way(precision=kind), 2, True)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_planned_step_takes_the_bytes_that_are_predicted(two: Crew, four: Crew, device: str) -> None:
    rows = four.run(cases.follows_a_plan, "aabb", device)
    counted = [found for found, _, _ in rows]
    predicted = rows[0][1]
    for each in counted:
        assert each["wire"] == pytest.approx(predicted["wire"], rel=0.02)
    assert sum(each["network"] for each in counted) == pytest.approx(4 * predicted["network"], rel=0.02)
    assert predicted["network"] < predicted["wire"]
    together = four.run(cases.follows_a_plan, "aaaa", device)
    uneven = four.run(cases.follows_a_plan, "aaab", device)
    assert [weights for *_, weights in together] == [weights for *_, weights in rows]
    assert [weights for *_, weights in together] == [weights for *_, weights in uneven]
    assert [found["wire"] for found, *_ in uneven] == [found["wire"] for found, *_ in rows]
    assert "network" not in together[0][1]


@pytest.mark.parametrize("at_rank", [1, 2])
def test_a_rank_that_is_killed_is_named_on_both_computers(at_rank: int) -> None:
    with crew(4) as lost:
        found = lost.run(cases.one_is_killed, "aabb", at_rank)
    for rank, said in enumerate(found):
        if rank != at_rank:
            assert re.search(rf"cannot end: rank {at_rank} on \S+ ended or cannot be reached", said)


def test_routes_are_the_same_on_all_ranks_and_share_the_work() -> None:
    computers = [(0, 1, 2), (3, 4), (5, 6, 7, 8)]
    peers = tuple(range(9))
    routes = {rank: _Route.find(rank, peers, computers) for rank in peers}
    for rank, route in routes.items():
        here = next(computer for computer in computers if rank in computer)
        assert {*route.others, rank} == {*here}
        assert route.fetched_by == routes[here[0]].fetched_by
        assert {*route.fetched_by} == {*peers} - {*here}
        for other in computers:
            if other is not here:
                assert {routes[other[0]].fetched_by[rank]} == {*route.receivers} & {*other}
    for computer in computers:
        shares = [[*routes[computer[0]].fetched_by.values()].count(rank) for rank in computer]
        assert max(shares) - min(shares) <= 1

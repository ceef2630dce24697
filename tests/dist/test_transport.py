"""Real processes, with shared memory and over gloo: two and four of them, the four also as two copies of two."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import _transport_cases as cases
from _crew import Crew, crew

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LONG = 32_768 + 5
WAYS = pytest.mark.parametrize("way", [{}, {"shared_memory": False}], ids=["shared", "sockets"])
Way = dict[str, bool]


def across_bytes(numel: int, place: int, kind: str) -> int:
    """What one of two copies receives of a shard: half in single precision, then the other half rounded."""
    mine = numel * (place + 1) // 2 - numel * place // 2
    return 4 * mine + BYTES[kind] * (numel - mine)


@WAYS
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("numel", [1, 192, LONG])
def test_every_shard_comes_to_every_rank(each_crew: Crew, numel: int, kind: str, way: Way) -> None:
    for received in each_crew.run(cases.gathers, numel, kind, 1, **way):
        assert received == 2 * (each_crew.ranks - 1) * numel * BYTES[kind]


@WAYS
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(("numel", "pieces"), [(1, 1), (192, 1), (192, 3), (LONG, 1), (LONG, 7)])
def test_sums_are_taken_in_single_precision_and_rank_order(
    each_crew: Crew, numel: int, pieces: int, kind: str, way: Way
) -> None:
    for received in each_crew.run(cases.reduces, numel, kind, pieces, 2, **way):
        assert received["reduce_scatter"] == (each_crew.ranks - 1) * numel * BYTES[kind]
        assert "replicate" not in received


@WAYS
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(("numel", "pieces"), [(1, 1), (192, 2), (LONG, 5)])
def test_two_copies_of_two_shards(four: Crew, numel: int, pieces: int, kind: str, way: Way) -> None:
    for received in four.run(cases.gathers, numel, kind, 3, replicate=2, **way):
        assert received == 2 * numel * BYTES[kind]
    for rank, received in enumerate(four.run(cases.reduces, numel, kind, pieces, 4, replicate=2, **way)):
        assert received["reduce_scatter"] == numel * BYTES[kind]
        if pieces == 1:  # the last of the two sums is into fp32
            assert received["replicate"] == across_bytes(numel, rank // 2, "fp32")
    four.run(cases.scalars, replicate=2)


@WAYS
def test_buffers_made_in_inference_mode(two: Crew, four: Crew, way: Way) -> None:
    two.run(cases.in_inference_mode, **way)
    four.run(cases.in_inference_mode, replicate=2, **way)


@given(
    numel=st.integers(1, 700),
    pieces=st.integers(1, 9),
    kind=st.sampled_from(sorted(BYTES)),
    copies=st.sampled_from((1, 2, 4)),
    way=st.sampled_from(({}, {"shared_memory": False})),
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_of_sum(four: Crew, numel: int, pieces: int, kind: str, copies: int, way: Way) -> None:
    four.run(cases.reduces, numel, kind, pieces, numel, **({} if copies == 1 else {"replicate": copies}), **way)


def test_numbers(each_crew: Crew) -> None:
    each_crew.run(cases.scalars)


def test_the_programs_defaults_change_nothing(four: Crew) -> None:
    four.run(cases.under_other_defaults)


def test_a_copy_of_a_process_is_in_no_group(two: Crew) -> None:
    two.run(cases.in_a_copy)


def test_a_rank_that_is_done_first_answers_until_all_leave(two: Crew) -> None:
    two.run(cases.answers_until_all_leave)


def test_one_connection_may_outlive_another() -> None:
    with crew(2) as joined:
        joined.run(cases.joined_anew)


@WAYS
def test_refusals(each_crew: Crew, way: Way) -> None:
    each_crew.run(cases.refusals, **way)


def test_what_is_begun_is_done_in_order_beside_the_computation(two: Crew) -> None:
    first, second = two.run(cases.overlaps)
    assert first == second
    gather, reduce = "all_gather of 131072 float32", "reduce_scatter of 131072 bfloat16"
    assert first == [*(f"{gather} (group {index})" for index in range(6)), f"{reduce} (group 0)"]


def test_what_must_be_the_same_is(each_crew: Crew) -> None:
    each_crew.run(cases.agrees)


@pytest.mark.parametrize("at_rank", [0, 1])
def test_ranks_that_part_ways_are_told_where(at_rank: int) -> None:
    with crew(2) as lost:
        found = lost.run(cases.parts, at_rank, timeout_s=600)
    layers = ("3", "2") if at_rank == 0 else ("2", "3")
    where = "number 2: rank 0 did forward of layer {}, rank 1 did forward of layer {}".format(*layers)
    for message in found:
        assert f"the ranks do different things; the first difference is {where}" in message


def test_who_leaves_amid_different_work_does_not_wait_for_the_timeout() -> None:
    with crew(2) as lost:
        assert max(lost.run(cases.leave_amid_different_work)) < 30, "of a timeout of 60 s"


def test_a_job_that_never_comes_to_its_collective_ends_once_another_rank_gave_up() -> None:
    with crew(2) as lost:
        told, late = lost.run(cases.stuck, timeout_s=2)
    reason = r"rank 0 on \S+ waited over 2 s: rank 1 on \S+ is at number 0 \(between collectives\)$"
    assert re.search(reason, told)
    assert re.search(rf"rank 1 of 2: a job between collectives cannot end: {reason}", late)


def test_a_rank_that_does_not_come_is_named() -> None:
    with crew(2) as lost:
        told, late = lost.run(cases.lags, timeout_s=2)
    assert "rank 0 of 2: number 1, all_gather of 2 float32 (layer 1), cannot end: " in told
    reason = r"rank 0 on \S+ waited over 2 s: rank 1 on \S+ is at number 0 \(between collectives\)$"
    assert re.search(reason, told)
    assert re.search(f"rank 1 of 2: .* cannot end: {reason}", late)

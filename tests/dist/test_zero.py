"""ZeRO: several gloo processes train one model, and get what one process gets."""

from __future__ import annotations

from pathlib import Path

import pytest

import _zero_cases as cases
from _crew import Crew, crew
from _expert_cases import experts
from _zero_cases import Way

PRECISIONS = ("fp32", "bf16", "fp16")
MOST_ULPS = 4
"""Of a tensor's largest value or change, after one step from the same state."""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("device", "rule"), [("cpu", "sgd"), ("checked", "adamw"), ("checked", "nadam")])
def test_two_ranks_are_one_process_bit_for_bit(two: Crew, device: str, precision: str, rule: str) -> None:
    two.run(cases.trains, Way(device=device, precision=precision, rule=rule), 2, True)


def test_three_states_in_shards_over_a_disk(two: Crew, tmp_path: Path) -> None:
    two.run(cases.trains, Way(device="disk", precision="bf16", rule="amsgrad", folder=str(tmp_path), room=16), 2, True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_are_one_process_bit_for_bit(four: Crew, precision: str) -> None:
    four.run(cases.trains, Way(device="emulated", precision=precision), 2, True)


@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, 0.05), (2, None), (2, 0.05)])
@pytest.mark.parametrize(("precision", "rule"), [("fp32", "sgd"), ("bf16", "sgd"), ("bf16", "adamw")])
def test_clipping_and_accumulation(
    two: Crew, precision: str, rule: str, accumulate: int, max_norm: float | None
) -> None:
    """Bit for bit; with clipping to the rounding of the norm, which is added up over shards."""
    way = Way(precision=precision, rule=rule, accumulate=accumulate, max_norm=max_norm, eps=1e-3)
    for worst in two.run(cases.trains, way, 2, max_norm is None):
        assert worst < MOST_ULPS


def test_two_copies_of_two_shards(four: Crew) -> None:
    four.run(cases.trains, Way(device="emulated", precision="bf16"), 2, True, replicate=2)


def test_copies_without_shards(two: Crew) -> None:
    two.run(cases.trains, Way(precision="bf16"), 2, True, replicate=2)


@pytest.mark.parametrize("case", sorted(cases.CASES))
def test_two_ranks(two: Crew, case: str) -> None:
    two.run(cases.CASES[case])


def test_resumed_by_torchs_state_dicts(two: Crew, tmp_path: Path) -> None:
    two.run(cases.resumes, str(tmp_path / "saved"))


@pytest.mark.parametrize("way", [{}, {"shared_memory": False}], ids=["shared", "sockets"])
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_on_the_wire(each_crew: Crew, precision: str, tight: bool, way: dict[str, bool]) -> None:
    each_crew.run(cases.counts_bytes, precision, tight, **way)


def test_ranks_whose_models_do_different_things() -> None:
    with crew(2) as lost:
        for message in lost.run(cases.parts_ways, timeout_s=12):
            assert "the ranks do different things; the first difference is number" in message
            assert "in a pass with gradients" in message or "gradients of" in message
            assert "what optimizer.step() goes by" in message


@pytest.mark.parametrize("copies", [1, 2])
def test_ranks_that_use_other_experts(each_crew: Crew, copies: int) -> None:
    together = {} if copies == 1 else {"replicate": copies}
    each_crew.run(experts, copies == 1, **together)

"""CUDA with several processes, on devices that the CPU plays: the same bits, and everything ordered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import _cuda_cases as cases
from _crew import Crew, crew
from _zero_cases import Way
from ps_core.engine._sharding import join_ranks as joining
from ps_core.engine._sharding.join_ranks import shared_card_error
from ps_dist._connect import _choose_card


@pytest.mark.parametrize(
    ("precision", "accumulate", "seed"), [("fp32", 1, 1), ("bf16", 1, 2), ("bf16", 2, 4), ("fp16", 1, 5)]
)
def test_as_on_the_emulated_accelerator(two: Crew, precision: str, accumulate: int, seed: int) -> None:
    two.run(cases.as_emulated, Way(precision=precision, accumulate=accumulate, max_norm=0.05), seed)


def test_in_pieces(two: Crew) -> None:
    """Memory for a part of a group on its way."""
    two.run(cases.as_emulated, Way(precision="bf16"), 6, 2048)


def test_copies_of_the_model(two: Crew) -> None:
    two.run(cases.as_emulated, Way(precision="bf16"), 7, replicate=2)


def test_with_a_disk_below(two: Crew, tmp_path: Path) -> None:
    two.run(cases.as_emulated, Way(precision="bf16", folder=str(tmp_path)), 8)


@pytest.mark.parametrize(
    ("precision", "accumulate", "direct"), [("bf16", 1, True), ("bf16", 2, False), ("fp32", 1, True)]
)
def test_with_room_for_shards(two: Crew, precision: str, accumulate: int, direct: bool) -> None:
    way = Way(precision=precision, accumulate=accumulate, max_norm=0.05, room=64)
    two.run(cases.directly if direct else cases.as_emulated, way, 9)


@pytest.mark.parametrize("direct", [False, True])
def test_ranks_that_use_other_experts(two: Crew, direct: bool) -> None:
    two.run(cases.other_experts, direct)


@pytest.mark.parametrize(("precision", "seed"), [("fp32", 10), ("bf16", 11)])
def test_from_card_to_card(two: Crew, precision: str, seed: int) -> None:
    two.run(cases.directly, Way(precision=precision, max_norm=0.05), seed)


def test_from_card_to_card_with_copies_of_the_model(two: Crew) -> None:
    two.run(cases.directly, Way(precision="bf16"), 12, replicate=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_from_card_to_card_a_plan_needs_no_words_and_no_waits(two: Crew, precision: str) -> None:
    two.run(cases.says_nothing, precision)


def test_computers_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def known(boot: str | None, name: str) -> str:
        monkeypatch.setattr(joining, "_BOOT", tmp_path / str(boot))
        monkeypatch.setattr(joining, "node_name", lambda: name)
        return joining.computer()

    for boot in ("one", "other"):
        (tmp_path / boot).write_text(f"{boot}\n")
    assert known("one", "a") == known("one", "a")
    assert len({known("one", "a"), known("other", "a"), known("one", "b"), known(None, "a")}) == 4
    assert known(None, "a") == known(None, "a"), "as far as can be told"


def test_cards_that_stay_idle_are_named() -> None:
    assert shared_card_error([[7, 0, 2], [7, 1, 2], [8, 0, 1]]) is None
    assert shared_card_error([[7, 0, 1], [7, 0, 1]]) is None, "one card for both: they share it"
    assert shared_card_error([[7, 0, 2], [7, 0, 2], [7, 1, 2]]) is None, "fewer cards than processes"
    found = shared_card_error([[8, 0, 2], [7, 1, 2], [7, 1, 2]])
    assert found == "ranks 1, 2 share cuda:1, while their computer has 2 for 2 processes"


@pytest.mark.parametrize(
    ("rank", "ranks", "cards", "used", "taken"),
    [("1", "2", 2, False, [1]), ("1", "2", 8, False, [1]), ("1", "2", 1, False, []), ("1", "2", 2, True, []),
     ("0", "1", 1, False, [])],
)  # fmt: skip
def test_each_process_takes_a_card(
    monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str, cards: int, used: bool, taken: list[int]
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "_queued_calls", [])
    _choose_card({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks})
    _choose_card({})
    assert not chosen, "nothing of a card is taken before it is used"
    for call, _ in torch.cuda._queued_calls:  # as torch does then
        call()
    assert chosen == taken


@pytest.mark.parametrize("fault", ["late", "computes", "another"])
def test_a_card_that_waits_for_another_in_vain(fault: str) -> None:
    """Nothing is said before a collective of a plan, so its device may wait; the watchdog ends that, and names it."""
    with crew(2) as lost:
        told, late = lost.run(cases.waits_on_its_stream, fault, timeout_s=8)
    assert "all_gather of 4 float32 (layer 0), cannot end: " in told
    numbered = "first difference is number 1: rank 0 did .* \\(layer 0\\), rank 1 did .* \\(layer 1\\)"
    behind = "rank 0 on \\S+ waited over 8 s: rank 1 on \\S+ is at number 0 \\(between collectives\\)$"
    reason = numbered if fault == "another" else behind
    assert re.search(reason, told)
    assert re.search(reason, late)


def test_a_card_that_waits_for_one_whose_process_was_killed() -> None:
    """On another computer: no connection breaks meanwhile, but that computer refuses new ones."""
    with crew(2) as lost:
        told, _ = lost.run(cases.waits_on_its_stream, "ended", timeout_s=300)
    assert re.search(r"cannot end: rank 1 on \S+ ended or cannot be reached$", told)


# Order. What the checker finds does not depend on which thread comes first, for it is about events alone.


@pytest.mark.parametrize(("precision", "direct"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_all_is_ordered(two: Crew, precision: str, direct: bool) -> None:
    for found in two.run(cases.unordered, Way(precision=precision), "", direct):
        assert not found


@pytest.mark.parametrize(("precision", "room"), [("bf16", 40), ("fp32", 200)])
def test_shards_on_the_card_are_ordered_too(two: Crew, precision: str, room: int) -> None:
    for found in two.run(cases.unordered, Way(precision=precision, room=room), ""):
        assert not found


@pytest.mark.parametrize("direct", [False, True])
def test_a_stream_that_does_not_wait_is_found(two: Crew, direct: bool) -> None:
    """It sends shards that are still being copied up, and gradients that are still computed."""
    for found in two.run(cases.unordered, Way(precision="bf16"), "the stream does not wait", direct):
        assert {"COLL reads what H2D writes", "COLL reads what COMPUTE writes"} <= found


@pytest.mark.parametrize("direct", [False, True])
def test_computation_that_does_not_wait_is_found(two: Crew, direct: bool) -> None:
    """It reads what is still being gathered, and writes to memory that is still being sent."""
    for found in two.run(cases.unordered, Way(precision="bf16"), "nobody waits for the stream", direct):
        assert {"COMPUTE reads what COLL writes", "COMPUTE writes what COLL reads"} <= found


def test_a_plan_whose_streams_do_not_wait_is_found(two: Crew) -> None:
    """No thread waits for collectives of a plan, so only events order them."""
    for found in two.run(cases.unordered_by_plan, "the stream does not wait"):
        assert {"COLL reads what H2D writes", "COLL reads what COMPUTE writes"} <= found
    for found in two.run(cases.unordered_by_plan, "nobody waits for the stream"):
        assert {"COMPUTE reads what COLL writes", "D2H reads what COLL writes"} <= found


def test_a_thread_that_does_not_wait_for_its_copies_sends_anything(two: Crew) -> None:
    for wanted, losses in two.run(cases.does_not_synchronize):
        assert losses != wanted

"""A rank's shards: p ranks are one process in every way of training, on every list of tiers; bytes kept and sent."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import _share_cases as cases
import _zero_cases
from _crew import Crew
from _zero_cases import Way

CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp32"),
    "accumulate": (1, 3),
    "max_norm": (None, 0.05),
    "group_bytes": (1, 4000),
    "tiers": ("host", "device host", "host disk", "device host disk"),
}
"""With groups of a tensor each, no process holds more than a tensor gathered: the least memory."""
WAYS = [
    ("bf16", 1, None, 4000, "host"),
    ("fp32", 3, 0.05, 1, "host"),
    ("bf16", 3, 0.05, 4000, "device host"),
    ("fp32", 1, None, 1, "device host"),
    ("bf16", 1, 0.05, 1, "host disk"),
    ("fp32", 3, None, 4000, "host disk"),
    ("bf16", 3, None, 1, "device host disk"),
    ("fp32", 1, 0.05, 4000, "device host disk"),
    ("bf16", 1, None, 4000, "device host disk"),
]
MOST_ULPS = 4
"""With clipping, of a tensor's largest value or change: norms are added up over shards."""


def test_every_pair_of_choices_is_among_the_ways() -> None:
    for (first, one), (second, other) in combinations(enumerate(CHOICES.values()), 2):
        assert {(way[first], way[second]) for way in WAYS} == set(product(one, other))


@pytest.mark.parametrize("choice", WAYS, ids=lambda choice: " ".join(map(str, choice)))
def test_two_ranks_are_one_process(two: Crew, choice: tuple[Any, ...], tmp_path: Path) -> None:
    precision, accumulate, max_norm, group_bytes, tiers = choice
    way = Way(
        device="emulated" if "device" in tiers else "disk" if "disk" in tiers else "cpu",
        precision=precision,
        accumulate=accumulate,
        max_norm=max_norm,
        group_bytes=group_bytes,
        folder=str(tmp_path) if "disk" in tiers else "",
        eps=1e-3,
    )
    for worst in two.run(_zero_cases.trains, way, 2, max_norm is None):
        assert worst < MOST_ULPS
    assert not list(tmp_path.iterdir()), "two ranks share the folder, and leave nothing there"


@pytest.mark.parametrize("name", sorted(cases.LIVES))
def test_gradients_over_the_weights(two: Crew, name: str) -> None:
    two.run(cases.lives, name, Way(precision="bf16", rule="sgd"))


@pytest.mark.parametrize("name", ["goes_back_twice", "leaves_some_out", "looks_between"])
def test_gradients_over_weights_that_are_elsewhere(two: Crew, name: str, tmp_path: Path) -> None:
    two.run(cases.lives, name, Way(device="checked", precision="fp16", rule="sgd"))
    two.run(cases.lives, name, Way(device="disk", precision="bf16", rule="sgd", folder=str(tmp_path)))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("roomy", [False, True])
def test_bytes_of_a_step_on_the_wire(each_crew: Crew, precision: str, roomy: bool) -> None:
    """What the plan predicted: with room each group is gathered and summed once, else some are gathered twice.

    In fp32 the ranks map each other's weights, and gather nothing.
    """
    p, size = each_crew.ranks, 2 if precision == "bf16" else 4
    for spent, predicted, elements, last in each_crew.run(cases.sends, precision, roomy):
        assert spent == predicted
        if precision == "fp32":
            assert spent == size * elements * (p - 1) // p
            continue
        least, most = ((times * size * elements) * (p - 1) // p for times in (2, 3))
        assert spent == least if roomy else least <= spent <= most - size * last * (p - 1) // p


def test_shards_are_above_the_disk_while_there_is_room(two: Crew, tmp_path: Path) -> None:
    for rows in two.run(cases.rises, str(tmp_path)):
        (_, first), *same, (_, larger), (ups, reads) = rows
        assert first > 0, "the first pass is on demand"
        assert same == [(15, 0)] * 4, "everything fits, and nothing is read any more"
        assert larger > reads > 0 < ups < 15, "a larger batch needs some of the room, first on demand, then by plan"


@pytest.mark.parametrize("device", ["cpu", "checked"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_that_pytorch_does_not_count_are_refused(two: Crew, precision: str, device: str) -> None:
    two.run(cases.writes_past_the_count, precision, device)


def test_ties_by_memory_are_refused(two: Crew) -> None:
    two.run(cases.ties_by_memory)

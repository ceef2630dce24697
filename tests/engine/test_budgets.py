"""The search for the tightest budget ends at the same place wherever it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

import _budgets
import _runs
from _runs import tightest
from ps_core import DoesNotFit

LEAST = 100_000


class Attempts:
    """What fits in so much and no less; refusals name a little more than what they had, or the truth."""

    def __init__(self, candid: bool) -> None:
        self.candid = candid
        self.sizes: list[int] = []

    def __call__(self, size: int) -> int:
        self.sizes.append(size)
        if size < LEAST:
            needed = LEAST if self.candid else size + 1
            raise DoesNotFit(tier="device", moment="now", needed_bytes=needed, available_bytes=size, proven=False)
        return size


@pytest.mark.parametrize("candid", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("begin", [0, 128, 60_000, 99_999, 100_000, 104_000, 180_000, 900_000])
def test_it_is_found_from_anywhere(begin: int, rounds: int, candid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runs, "near", lambda name: begin)
    attempt = Attempts(candid)
    size, found = tightest(attempt, rounds)
    refused = max(each for each in attempt.sizes if each < LEAST)
    assert size == found == min(each for each in attempt.sizes if each >= LEAST)
    assert size <= refused * (1 + 0.5**rounds)


def test_near_it_two_attempts_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runs, "near", lambda name: 104_000)
    attempt = Attempts(candid=False)
    assert tightest(attempt)[0] == 104_000
    assert attempt.sizes == [104_000, 92_445]


def test_no_less_than_the_floor_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runs, "near", lambda name: 100_000)
    attempt = Attempts(candid=False)
    assert tightest(attempt, floor=150_000)[0] == 150_000
    assert attempt.sizes == [150_000]
    assert tightest(Attempts(candid=False), floor=50_000)[0] >= LEAST


def test_budgets_are_kept_for_tests_that_there_are() -> None:
    assert _budgets.this_test() == "test_budgets.py::test_budgets_are_kept_for_tests_that_there_are"
    names = Path(__file__).with_name("tightest.txt").read_text("utf-8").splitlines()
    tests = {tuple(line.split(" ", 1)[1].split("[")[0].split("::")) for line in names}
    assert len(tests) >= 3
    for file, name in tests:
        assert f"\ndef {name}(" in Path(__file__).with_name(file).read_text("utf-8"), f"{file} has no {name}"

"""The engine's figures, once each and small, so that they do not rot; engine_figures.py takes them in earnest."""

from __future__ import annotations

import pytest

import engine_figures as figures
from turns import take_turns

SMALL = figures.Shape(layers=3, hidden=64, heads=2, vocabulary=96, batch=2, length=16)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_speed_where_all_fits(precision: str) -> None:
    assert set(figures.all_fits(SMALL, precision, figures.Repeats(2, starts=1))) == {"emulated", "cpu"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_speed_where_little_fits(precision: str) -> None:
    found = figures.tight(SMALL, precision, figures.Repeats(2))
    assert found["peak / budget"] <= 1
    assert found["least / moved"] <= 1


def test_turns_go_on_after_a_new_start() -> None:
    def order(*starts: int) -> list[str]:
        made: list[str] = []
        steps = {name: lambda name=name: made.append(name) for name in "abc"}
        for number, rounds in enumerate(starts):
            take_turns(steps, rounds, warm_up=0, first=number * rounds)
        return made

    assert order(4, 4, 4) == order(12)


def test_bytes_moved() -> None:
    found = figures.bytes_moved(SMALL, "bf16", figures.Repeats(2))
    assert len(found) >= 6, "two budgets or more, three ways each"
    assert min(found.values()) >= 1


def test_bookkeeping() -> None:
    figures.bookkeeping(3, 1)


def test_the_model_is_of_the_size_it_is_said_to_be() -> None:
    assert 49_000_000 < figures.parameters_of(figures.Shape()) < 51_000_000

"""``--step-speculative``: parameters are stepped within backward, and undone where that was wrong; the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from _trainer import numbers, train
from ps_core.engine import Statistics, statistics
from ps_models.train import _loop
from test_train_nan import nan_at

WORDS = ("--model", "gpt-4x256", "--device-memory", "4MiB", "--steps", 4, "--checkpoint-every", 2)
"""Large enough that steps within backward are planned on an emulated accelerator."""
FEW, MANY = ("--clip", 1e6), ("--clip", 1e-3)
"""Of the steps are clipped."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Statistics]:
    """Statistics after each step."""
    found: list[Statistics] = []

    def count(model: object) -> Statistics:
        found.append(statistics(model))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(_loop, "statistics", count)
    return found


@pytest.mark.parametrize(("clip", "undone"), [(FEW, False), (MANY, True)])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_same_numbers(
    precision: str, clip: tuple[str, float], undone: bool, tmp_path: Path, counted: list[Statistics]
) -> None:
    words = (*WORDS, *clip, "--precision", precision)
    assert train(tmp_path / "late", *words) == 0
    assert counted[-1].group_steps_in_backward == 0
    assert train(tmp_path / "early", *words, "--step-speculative") == 0
    assert counted[-1].group_steps_in_backward > 0
    assert bool(counted[-1].undone_group_steps) is undone
    assert numbers(tmp_path / "early") == numbers(tmp_path / "late")


def test_a_loss_that_is_not_finite_undoes_what_was_stepped(
    tmp_path: Path, counted: list[Statistics], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*WORDS, *FEW, "--step-speculative", "--on-nan", "continue", "--eval-every", 0)
    with monkeypatch.context() as patch:
        nan_at(patch, 2)
        assert train(tmp_path / "early", *words) == 0
    assert counted[-1].undone_group_steps > 0
    with monkeypatch.context() as patch:
        nan_at(patch, 2)
        assert train(tmp_path / "late", *(word for word in words if word != "--step-speculative")) == 0
    assert numbers(tmp_path / "early") == numbers(tmp_path / "late")

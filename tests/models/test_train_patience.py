"""``--patience``: a run ends where its validation loss no longer falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from _trainer import numbers, rows, train

WORSE = ("--eval-every", 1, "--lr", 9, "--warmup", 1, "--schedule", "constant", "--checkpoint-every", 1)


def without_gain(losses: list[float]) -> int:
    """How many of the last losses are not below the least before them."""
    least = min(range(len(losses)), key=losses.__getitem__)
    return len(losses) - 1 - least


def test_patience_ends_a_run_that_does_not_get_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    assert train(out, "--steps", 20, *WORSE, "--patience", 3) == 0
    told = capsys.readouterr().out
    losses = [row["val_loss"] for row in rows(out)]
    assert without_gain(losses) == 3
    assert all(without_gain(losses[:count]) < 3 for count in range(1, len(losses)))
    assert len(losses) < 20
    assert f"step {len(losses)}: the validation loss has not fallen for 3 validations" in told
    assert train(plain, "--steps", 20, *WORSE) == 0
    assert numbers(plain)[: len(losses)] == numbers(out)
    assert len(numbers(plain)) == 20
    capsys.readouterr()
    assert train(out, "--steps", 20, *WORSE, "--patience", 3) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert len(rows(out)) == len(losses)
    assert train(out, "--steps", 20, *WORSE, "--patience", 4) == 0
    assert len(rows(out)) > len(losses), "more patience goes on"


def test_patience_counts_on_after_a_resume(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, "--steps", 20, *WORSE, "--patience", 3) == 0
    last = len(rows(whole))
    assert train(parts, "--steps", last - 1, *WORSE, "--patience", 3) == 0
    assert train(parts, "--steps", 20, *WORSE, "--patience", 3) == 0
    assert numbers(parts) == numbers(whole)

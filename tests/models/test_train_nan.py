"""A loss that is not finite ends a training at once, and the last sound checkpoint stays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from _ranks import Ranks
from _trainer import TINY, data, numbers, rows, train
from ps_models.train import _loop

Capture = pytest.CaptureFixture[str]
STEADY = ("--schedule", "constant", "--warmup", 0, "--checkpoint-every", 1)
BREAKS = ("--lr", "1e20")
"""One step of it, and weights are too large for any loss."""
PRECISIONS = ("bf16", "fp16", "fp32")


def checkpoints(out: Path) -> list[str]:
    return sorted(each.name for each in (out / "checkpoints").iterdir() if each.is_dir())


def nan_at(monkeypatch: pytest.MonkeyPatch, *passes: int, value: float = float("nan")) -> None:
    """These of the model's passes, counted from 0, have another loss."""
    loss_of, seen = _loop.Loop._loss, list[int]()

    def loss(self: _loop.Loop, batch: Any) -> torch.Tensor:
        seen.append(0)
        found = loss_of(self, batch)
        return found * value if len(seen) - 1 in passes else found

    monkeypatch.setattr(_loop.Loop, "_loss", loss)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_stops_and_goes_on_from_the_last_sound_checkpoint(
    precision: str, keep: int, tmp_path: Path, capsys: Capture
) -> None:
    """Also where the checkpoint after it was written already, and where only one is kept."""
    words = (*STEADY, "--precision", precision, "--keep", keep, "--steps", 6)
    assert train(tmp_path / "whole", *words, "--lr", "1e-2") == 0
    out = tmp_path / "run"
    assert train(out, *words, "--lr", "1e-2", "--steps", 3) == 0
    capsys.readouterr()
    assert train(out, *words, *BREAKS, "--keep-best") == 1
    told = capsys.readouterr()
    sound = out / "checkpoints" / "step-00000003"
    assert re.fullmatch(
        r"pstar-train: step 5: the loss is (nan|inf); try a smaller --lr \(now 1e\+20\), a longer --warmup \(now 0\), "
        r"a smaller --clip \(now 1\)(, --precision bf16)?: so changed, the command goes on from the last sound "
        rf"checkpoint, {re.escape(str(sound))}; with --on-nan continue training does not stop\n",
        told.err,
    )
    assert ("--precision bf16" in told.err) is (precision == "fp16")
    assert "nan" not in told.out
    assert "sample" not in told.out
    assert checkpoints(out)[-2:] == ["step-00000003", "unsound-step-00000004"]
    assert (out / "checkpoints" / "latest").read_text() == "step-00000003\n"
    last = rows(out)[-1]
    assert (last["step"], last["loss"], last["grad_norm"], last["skipped"]) == (5, None, None, True)
    assert train(out, *words, "--lr", "1e-2") == 0
    assert [row[:4] for row in numbers(out)] == [row[:4] for row in numbers(tmp_path / "whole")]


@pytest.mark.parametrize("last", [4, 6])
def test_the_losses_before_are_drawn(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Also where the last step is the one that has such a loss: its memory is measured, or a part of it."""
    nan_at(monkeypatch, last - 1)
    out = tmp_path / "run"
    assert train(out, *STEADY, "--steps", 6) == 1
    told = capsys.readouterr()
    assert f"drawn: the loss curve {out / 'loss.svg'}" in told.out
    assert f"step {last}: the loss is nan" in told.err
    assert f"in {last - 1} steps" in (out / "loss.svg").read_text("utf-8")


def test_where_no_loss_is_finite_nothing_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    nan_at(monkeypatch, 0)
    assert train(tmp_path / "run", *STEADY, "--steps", 3) == 1
    assert "drawn" not in capsys.readouterr().out
    assert not (tmp_path / "run" / "loss.svg").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_where_all_is_sound_as_many_stay_as_were_asked_for(keep: int, tmp_path: Path) -> None:
    assert train(tmp_path / "run", *STEADY, "--steps", 4, "--keep", keep) == 0
    assert checkpoints(tmp_path / "run") == [f"step-{step:08d}" for step in (3, 4)[-keep:]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_step_leaves_nothing_to_go_on_from(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with monkeypatch.context() as patch:
        nan_at(patch, 0, value=value)
        assert train(tmp_path / "run", "--steps", 3, "--clip", 0) == 1
    told = capsys.readouterr().err
    assert f"pstar-train: step 1: the loss is {value}; " in told
    assert (
        "--clip 1 (now not clipped): so changed, the command goes on from the start, for no checkpoint is sound" in told
    )
    assert told.count("\n") == 1
    assert train(tmp_path / "run", "--steps", 3, "--clip", 0) == 0
    assert train(tmp_path / "whole", "--steps", 3, "--clip", 0) == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_one_micro_batch_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    nan_at(monkeypatch, 4)
    assert train(tmp_path / "run", *STEADY, "--steps", 3, "--accumulate", 3) == 1
    assert "step 2: the loss is nan" in capsys.readouterr().err


def test_a_validation_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """It is neither saved nor the best."""
    out, words = tmp_path / "run", (*STEADY, "--steps", 4, "--eval-every", 1, "--keep-best")
    with monkeypatch.context() as patch:
        nan_at(patch, 1 + 2 + 1 + 1)  # a step has one pass, a validation two
        assert train(out, *words) == 1
    assert "pstar-train: step 2: the validation loss is nan; try" in capsys.readouterr().err
    assert checkpoints(out) == ["step-00000001"]
    assert (out / "checkpoints" / "best").read_text().split()[0] == "step-00000001"
    assert rows(out)[-1]["val_loss"] is None
    assert train(out, *words) == 0
    assert train(tmp_path / "whole", *words) == 0
    assert numbers(out) == numbers(tmp_path / "whole")


def test_who_wants_it_goes_on(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    words = (*STEADY, "--on-nan", "continue", "--keep-best", "--eval-every", 1, "--keep", 1, "--sample", 5)
    assert train(out, *words, "--steps", 2, "--lr", "1e-2") == 0
    best = (out / "checkpoints" / "best").read_text()
    assert train(out, *words, "--steps", 6, *BREAKS) == 0
    assert "validation loss nan" in capsys.readouterr().out
    assert (out / "checkpoints" / "best").read_text() == best
    assert [row["loss"] is None for row in rows(out)] == [False] * 3 + [True] * 3
    assert checkpoints(out) == ["step-00000002", "step-00000006"], "the last sound one stays beside the last one"
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("on_nan", ["stop", "continue"])
def test_looking_for_the_loss_scale_is_no_such_end(
    on_nan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Gradients overflow until the scale is small enough; losses are finite all the while."""
    run = _loop.Loop.run

    def scaled(self: _loop.Loop, asked: Any) -> None:
        self.optimizer.scaler.load_state_dict(self.optimizer.scaler.state_dict() | {"scale": 2.0**22})
        run(self, asked)

    monkeypatch.setattr(_loop.Loop, "run", scaled)
    assert train(tmp_path / "run", *STEADY, "--precision", "fp16", "--steps", 12, "--on-nan", on_nan) == 0
    skipped = [row["skipped"] for row in rows(tmp_path / "run")]
    assert skipped[0]
    assert not skipped[-1]
    assert all(row["loss"] is not None for row in rows(tmp_path / "run"))
    assert "changed nothing" not in capsys.readouterr().out


def test_one_process_of_two_stops_both(tmp_path: Path) -> None:
    crew, out = Ranks(), tmp_path / "run"
    words = [*TINY, "--data", data(tmp_path), "--out", out, *STEADY, "--batch", 4, "--steps", 5, "--device", "cpu"]
    try:
        first, second = crew.train(tmp_path, words, nan=(1, 3))
        assert (first.status, second.status, second.output) == (1, 1, "")
        assert first.output.count("pstar-train: step 3: the loss is nan; try") == 1
        assert (out / "checkpoints" / "latest").read_text() == "step-00000001\n"
        assert [end.status for end in crew.train(tmp_path, words)] == [0, 0]
    finally:
        crew.close()
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5]

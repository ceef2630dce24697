"""The demonstration shows what it says: bits equal, moves as planned, a budget kept, a picture."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ps_core import demo
from ps_core._units import parse_bytes

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def one_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ITERATIONS", 1)


def numbers(said: str, start: str) -> tuple[int, int]:
    """The two counts of the row that starts so."""
    found = re.search(rf"^  {start}[^\d\n]*\s([\d,]+)\s+([\d,]+)   (equal|kept)$", said, re.MULTILINE)
    assert found is not None, start
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def test_the_demonstration(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ITERATIONS", 6)
    picture = tmp_path / "made" / "tide.svg"
    assert demo.main([str(picture)]) == 0
    said = capsys.readouterr().out
    assert "NO" not in said
    assert max(map(len, said.replace(str(picture), "").splitlines())) <= 100
    rows = re.findall(r"^ +(\d+) +(\d\.\d{7}) +(\d\.\d{7})   yes$", said, re.MULTILINE)
    losses = [float(row[2]) for row in rows]
    assert [row[1] for row in rows] == [row[2] for row in rows]
    assert len(losses) == demo.ITERATIONS
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2]), "it learns"
    for link in ("bytes host->device", "bytes device->host", "evictions"):
        planned, counted = numbers(said, link)
        assert planned == counted > 0
        assert planned % demo.ITERATIONS == 0
    assert numbers(said, "evictions")[0] > demo.ITERATIONS, "something has to leave in each step"
    model = re.search(r"model data +(.+), 14", said)
    assert model is not None
    for tier in ("device", "host"):
        budget, peak = numbers(said, f"{tier}  ")
        assert 1024 < peak <= budget
    assert numbers(said, "device  ")[0] < parse_bytes(model[1]) / 7, "the device holds a fraction of it"
    assert "budget" in said.partition("what fills the device")[2]
    assert said.endswith(f"Memory over a step as a picture: {picture}\n")
    root = ElementTree.parse(picture).getroot()
    assert root.tag.endswith("svg")
    named = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {"weights", "gradients", "checkpoints", "non-model"} <= set(named)


def test_in_a_few_lines(tmp_path: Path, capsys: Capture) -> None:
    assert demo.main(["--brief", str(tmp_path / "tide.svg")]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"a small network, trained in pure Python where 72 KiB are to hold 524\.5 KiB of model data: 1 steps\n"
        r"  losses, weights and optimizer states: equal, bit for bit, to training without a limit\n"
        r"  moved as planned: [\d,]+ bytes host->device, [\d,]+ bytes device->host\n"
        r"  budgets kept: device [\d.]+ KiB of 72\.0 KiB, host [\d.]+ KiB of 560\.0 KiB\n\n"
        rf"Memory over a step as a picture: {re.escape(str(tmp_path))}/tide\.svg\n",
        said,
    )


def test_what_is_wrong_is_told_at_length(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = demo._Watch
    monkeypatch.setattr(demo, "_Watch", lambda tiers: watch(tiers=tiers, peak_bytes=[999_999_999, 0]))
    assert demo.main(["--brief"]) == 1
    assert re.search(r"^  device .* 999,999,999   EXCEEDED$", capsys.readouterr().out, re.MULTILINE)


def test_without_a_file_nothing_is_written(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main([]) == 0
    assert "as a picture" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def changed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


def test_a_wrong_bit_is_not_passed_over(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_loss(trained: Any) -> Any:
        return replace(trained, losses=(trained.losses[0] * (1 + 2**-50), *trained.losses[1:]))

    monkeypatch.setattr(demo, "train_unconstrained", changed(demo.train_unconstrained, other_loss))
    assert demo.main([]) == 1
    said = capsys.readouterr().out
    assert len(re.findall(r"   NO$", said, re.MULTILINE)) == 1
    assert "afterwards: NOT EQUAL" in said


def test_a_move_that_was_not_planned_is_not_passed_over(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_moves(found: Any) -> Any:
        moved = {**found.prediction.moved_bytes, "host->device": 128}
        return replace(found, prediction=replace(found.prediction, moved_bytes=moved))

    monkeypatch.setattr(demo, "find_plan", changed(demo.find_plan, other_moves))
    assert demo.main([]) == 1
    assert re.search(r"bytes host->device .* 128 .*NOT EQUAL$", capsys.readouterr().out, re.MULTILINE)


def test_a_budget_that_is_not_kept_is_not_passed_over(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = demo._Watch
    monkeypatch.setattr(demo, "_Watch", lambda tiers: watch(tiers=tiers, peak_bytes=[999_999_999, 0]))
    assert demo.main([]) == 1
    assert re.search(r"^  device .* 999,999,999   EXCEEDED$", capsys.readouterr().out, re.MULTILINE)


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert demo.main([str(tmp_path / "file" / "tide.svg")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot write ")
    assert error.count("\n") == 1

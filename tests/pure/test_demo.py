"""The demonstration shows what it says: a budget kept, bits equal, a picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ps_core import _demo
from ps_core._units import parse_bytes


def test_the_demonstration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo, "ITERATIONS", 6)
    picture = tmp_path / "made" / "tide.svg"
    assert _demo.main([str(picture)]) == 0
    said = capsys.readouterr().out
    assert "bitwise equal" in said
    assert "budget" in said.partition("what fills the device")[2]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    found = {tier: sizes for tier, *sizes in re.findall(r"^(\w+): budget (.+), peak (.+)$", said, re.MULTILINE)}
    for budget, peak in found.values():
        assert parse_bytes("1KiB") < parse_bytes(peak) <= parse_bytes(budget)
    model = re.search(r"make (.+) of model data", said)
    assert model is not None
    assert parse_bytes(found["device"][0]) < parse_bytes(model[1]) / 2, "the device holds a fraction of it"
    losses = [float(loss) for loss in said.partition("losses: ")[2].splitlines()[0].split()]
    assert len(losses) == _demo.ITERATIONS
    assert sum(losses[-2:]) < 0.9 * sum(losses[:2]), "it learns"


def test_a_wrong_bit_is_not_passed_over(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "ITERATIONS", 1)
    monkeypatch.setattr(_demo, "train_unconstrained", lambda *anything: None)
    assert _demo.main([]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_demo, "ITERATIONS", 1)
    (tmp_path / "file").write_text("")
    assert _demo.main([str(tmp_path / "file" / "tide.svg")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot write ")
    assert error.count("\n") == 1

"""The README's demonstration trains, compares and tells the truth."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "under_a_budget.py"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, with a smaller model."""
    spec = importlib.util.spec_from_file_location("under_a_budget", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    monkeypatch.setattr(module, "LAYERS", 8)
    monkeypatch.setattr(module, "HIDDEN", 64)
    monkeypatch.setattr(module, "BUDGET", "1536KiB")
    yield module
    torch.set_num_threads(threads)


def test_it_trains_under_the_budget_with_the_same_bits(demo: Any, capsys: Capture) -> None:
    assert demo.main(steps=5) == 0
    said = capsys.readouterr().out
    assert "NO" not in said
    assert "EXCEEDED" not in said
    rows = re.findall(r"^ +(\d) +(\d\.\d{7}) +(\d\.\d{7})   yes$", said, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "5"]
    assert float(rows[1][1]) < float(rows[0][1]) - 0.3
    found = re.search(r"model data +([\d,]+) bytes", said)
    assert found is not None
    model_data = int(found[1].replace(",", ""))
    kept = re.search(r"accelerator +([\d,]+) at most, of ([\d,]+): kept", said)
    assert kept is not None
    peak, budget = (int(each.replace(",", "")) for each in kept.groups())
    assert peak <= budget < model_data / 3
    assert re.search(r"plan +5 of 5 ", said)
    assert re.search(r"bytes moved host->device +[\d,]{7,}$", said, re.MULTILINE)


def test_a_wrong_bit_is_not_passed_over(demo: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    train = demo.train_plain

    def other(steps: int) -> Any:
        losses, masters = train(steps)
        masters[3].view(torch.int32)[0] ^= 1
        return losses, masters

    monkeypatch.setattr(demo, "train_plain", other)
    assert demo.main(steps=1) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["peak", "plan"])
def test_a_promise_that_is_not_kept_is_told(
    change: str, demo: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = demo.train_under_a_budget

    def other(steps: int) -> Any:
        losses, masters, counted = train(steps)
        if change == "plan":
            return losses, masters, replace(counted, planned_passes=0)
        device = replace(counted.tiers["device"], peak_bytes=counted.tiers["device"].budget_bytes + 1)
        return losses, masters, replace(counted, tiers=counted.tiers | {"device": device})

    monkeypatch.setattr(demo, "train_under_a_budget", other)
    assert demo.main(steps=1) == 1
    assert re.search(r"EXCEEDED$" if change == "peak" else r"NO$", capsys.readouterr().out, re.MULTILINE)

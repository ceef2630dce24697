"""What a run draws when it ends: its loss, and the memory that one of its steps was measured to take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from _trainer import numbers, rows, train
from ps_core import AdamW, Budget, Options
from ps_core.engine import MemoryMeasurement, chunked, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.report import Category, Tide
from ps_models import build
from ps_models.train import _data, _loop, _main
from ps_models.train._pictures import Point, loss_svg

SVG = "{http://www.w3.org/2000/svg}"
BUDGET = ("--device", "emulated", "--device-memory", "400KB")
ROOMY = 2**20
Capture = pytest.CaptureFixture[str]


def small() -> Any:
    return build("gpt-3x32", vocabulary=64, positions=16)


def measured(precision: str, accumulate: int, device_bytes: int) -> tuple[Tide, Any]:
    """A step by plan, and what the engine counted."""
    torch.manual_seed(0)
    model: Any = small()
    told: dict[str, Any] = {"precision": precision, "accumulation_steps": accumulate}
    told |= {"budget": Budget(device=device_bytes, host="16MiB"), "options": Options(group_bytes=8192)}
    model, optimizer = chunked(model, AdamW(lr=1e-3), device="emulated", **told)
    ids = torch.randint(64, (2, 16))
    for _ in range(3):
        memory = MemoryMeasurement(model)
        with memory.passes():
            for _ in range(accumulate):
                model(ids, labels=ids).loss.backward()
        assert hooks_of(model).engine.passes.observer is None
        with memory.update():
            optimizer.step()
        optimizer.zero_grad()
    found, counted = memory.report("a GPT"), statistics(model)
    release(model)
    assert found is not None
    return found, counted


@pytest.mark.parametrize(
    ("precision", "accumulate", "tight"), [("bf16", 1, 153_600), ("fp32", 1, 307_200), ("bf16", 2, 153_600)]
)
@pytest.mark.parametrize("roomy", [False, True])
def test_every_moment_of_a_step_is_measured(precision: str, accumulate: int, tight: int, roomy: bool) -> None:
    device_bytes = ROOMY if roomy else tight
    found, counted = measured(precision, accumulate, device_bytes)
    tier = counted.tiers["device"]
    assert (found.tier, found.budget_bytes) == ("device", device_bytes)
    assert found.peak_bytes <= tier.peak_bytes <= device_bytes
    assert found.peak_bytes > 0.9 * tier.peak_bytes, "hardly anything was taken that no column has"
    phases = [column.phase for column in found.columns]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    assert phases.count("update") == 1
    assert counted.moments == len(phases) - 1, "the moments of one pass, the last"
    held = [dict(zip(Category, column.bytes, strict=True)) for column in found.columns]
    assert all(each[Category.WEIGHTS] + each[Category.GRADIENTS] > 0 for each in held[:-1])
    if (precision, accumulate) == ("bf16", 1):
        assert not held[0][Category.GRADIENTS], "they go over the weights, in backward"
    assert any(each[Category.GRADIENTS] for each in held)
    assert all(each[Category.NONMODEL] for each in held[:-1])
    assert (counted.evictions > 0) is not roomy


def test_with_room_for_everything_all_model_data_are_there() -> None:
    """14 bytes a parameter, in every moment."""
    found, counted = measured("bf16", 1, ROOMY)
    numel = sum(each.numel() for each in small().parameters())
    whole = round(counted.bytes_per_parameter * numel)
    nonmodel = list(Category).index(Category.NONMODEL)
    assert {column.total - column.bytes[nonmodel] for column in found.columns} == {whole}


def points(path: Path) -> list[tuple[float, float]]:
    """The curve's corners."""
    (line,) = ElementTree.parse(path).getroot().iter(f"{SVG}polyline")
    return [(float(x), float(y)) for x, y in (each.split(",") for each in line.attrib["points"].split())]


def test_a_run_draws_its_loss_and_its_memory(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    words = (*BUDGET, "--steps", 6, "--eval-every", 3, "--lr", "1e-2", "--sample", 3)
    assert train(out, *words, "--steps", 3) == 0
    assert train(out, *words) == 0
    told = capsys.readouterr().out
    line = f"drawn: the loss curve {out}/loss.svg, memory at each moment of a step {out}/tide.svg"
    assert told.count(line) == 2
    assert told.rindex(line) < told.rindex("sample:")
    losses = [row["loss"] for row in rows(out)]
    corners = points(out / "loss.svg")
    assert len(corners) == 6, "also the steps of the first call"
    highest = sorted(range(6), key=losses.__getitem__)
    assert sorted(range(6), key=lambda index: -corners[index][1]) == highest, "the larger the loss, the higher"
    marks = list(ElementTree.parse(out / "loss.svg").getroot().iter(f"{SVG}circle"))
    assert [mark[0].text for mark in marks] == [
        f"{row['val_loss']:.4f} after step {row['step']}" for row in rows(out) if "val_loss" in row
    ]
    drawn = (out / "tide.svg").read_text("utf-8")
    assert "gpt-2x32: what fills the device during a training step" in drawn
    assert "budget 390.6 KiB" in drawn
    once = {path: path.read_bytes() for path in out.glob("*.svg")}
    assert train(out, *words) == 0
    assert {path: path.read_bytes() for path in out.glob("*.svg")} == once, "nothing was left to train"


def test_where_all_is_on_one_tier_only_the_loss_is_drawn(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--device", "cpu", "--steps", 2) == 0
    assert f"drawn: the loss curve {tmp_path}/run/loss.svg\n" in capsys.readouterr().out
    assert not (tmp_path / "run" / "tide.svg").exists()


def test_measuring_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*BUDGET, "--steps", 4)
    assert train(tmp_path / "run", *words) == 0
    monkeypatch.setattr(_loop, "MemoryMeasurement", lambda model: None)
    assert train(tmp_path / "plain", *words) == 0
    assert not (tmp_path / "plain" / "tide.svg").exists()
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")


def test_steps_without_a_loss_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--schedule", "constant", "--warmup", 0, "--lr", "1e20", "--on-nan", "continue")
    assert train(out, *words, "--steps", 4) == 0
    assert [row["loss"] is None for row in rows(out)] == [False, True, True, True]
    assert len(points(out / "loss.svg")) == 1
    assert "nan" not in (out / "loss.svg").read_text("utf-8").lower()


@pytest.mark.parametrize("count", [1, 2, 480, 481, 5000])
def test_a_long_run_is_drawn_by_means(count: int, tmp_path: Path) -> None:
    (tmp_path / "loss.svg").write_text(loss_svg("a <GPT>", [Point(i + 1, 9 - i / count) for i in range(count)], []))
    corners = points(tmp_path / "loss.svg")
    assert len(corners) == min(count, 480)
    assert corners == sorted(corners)
    assert [y for _, y in corners] == sorted(y for _, y in corners)


def test_what_is_prepared_is_said_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    said: dict[str, str] = {}

    def noted(module: Any, name: str) -> Any:
        do = getattr(module, name)

        def first(*args: Any, **named: Any) -> Any:
            said[name] = capsys.readouterr().out
            return do(*args, **named)

        return first

    monkeypatch.setattr(_main, "manage", noted(_main, "manage"))
    monkeypatch.setattr(_data, "documents", noted(_data, "documents"))
    assert train(tmp_path / "run", "--steps", 1, "--precision", "fp32") == 0
    assert said["documents"] == f"reading {tmp_path}/words.txt\n"
    assert re.match(r"gpt-2x32: 66.7K .*\n.*words.txt: .*\nmaking its weights and optimizer states\n$", said["manage"])

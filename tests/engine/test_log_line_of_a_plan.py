"""The log line that tells of a plan: what it predicts, and what steps within backward would save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from _cases import finish, rows, square
from _models import stack
from _runs import HOST, chunked_model
from ps_core import Budget, Options
from ps_core._simulate.machine import MACHINES, Machine

SLOW_CORES = replace(
    MACHINES["h200"],
    name="slow cores",
    host_bandwidth=1e8,
    launch_s=0.0,
    tensor_overhead_s=0.0,
    moment_overhead_s=0.0,
    latency_s=0.0,
    matmul_flops=1e8,
)
"""A card on which steps on the CPU take about as long as backward, even of a small model."""
FAST_CORES = replace(SLOW_CORES, name="fast cores", host_bandwidth=1e12)


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        (SLOW_CORES, {}, True),
        (FAST_CORES, {}, False),
        (SLOW_CORES, {"options": Options(step="in_backward")}, False),
        (SLOW_CORES, {"accumulation_steps": 2}, False),
        (SLOW_CORES, {"precision": "fp16"}, False),
    ],
)
def test_steps_within_backward_are_suggested(
    machine: Machine, settings: dict[str, Any], said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "machine.toml").write_text(machine.to_toml(), "utf-8")
    options = replace(settings.get("options", Options()), machine=str(tmp_path / "machine.toml"))
    settings = settings | {"options": options, "device": "emulated", "budget": Budget(device="56KiB", host=HOST)}
    with (
        caplog.at_level("INFO", "ps_core"),
        chunked_model(stack(8), **settings) as (model, optimizer),
    ):
        for index, batch in enumerate((1, 2, 3)):  # each larger than planned, so planned anew
            for _ in range(settings.get("accumulation_steps", 1)):
                optimizer.scale(square(model, *rows(index, batch, 2, 32))).backward()
            finish(optimizer)
    lines = [each.message for each in caplog.records if ": planned " in each.message]
    assert len(lines) > 1
    assert all(f" s a step are predicted for {machine.name}" in line for line in lines)
    assert any("% less with Options(step='in_backward'), which excludes clipping" in line for line in lines) is said


def test_nothing_is_predicted_for_an_unknown_computer(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level("INFO", "ps_core"),
        chunked_model(stack(8), device="emulated", budget=Budget(device="56KiB", host=HOST)) as (model, optimizer),
    ):
        for index in range(2):
            square(model, *rows(index, 1, 2, 32)).backward()
            finish(optimizer)
    lines = [each.message for each in caplog.records if ": planned " in each.message]
    assert lines
    assert all(line.endswith(" s") for line in lines)

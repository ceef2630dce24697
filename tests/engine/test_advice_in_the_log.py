"""The log line that suggests steps within backward: where they are possible, and save time at the machine's rates."""

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
FAST_CORES = replace(SLOW_CORES, host_bandwidth=1e12)


@pytest.mark.parametrize(
    ("machine", "settings", "said"),
    [
        (SLOW_CORES, {}, 1),
        (FAST_CORES, {}, 0),
        (SLOW_CORES, {"options": Options(step="in_backward")}, 0),
        (SLOW_CORES, {"accumulation_steps": 2}, 0),
        (SLOW_CORES, {"precision": "fp16"}, 0),
    ],
)
def test_steps_within_backward_are_mentioned_once(
    machine: Machine, settings: dict[str, Any], said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "machine.toml").write_text(machine.to_toml(), "utf-8")
    options = replace(settings.pop("options", Options()), machine=str(tmp_path / "machine.toml"))
    budget = Budget(device="56KiB", host=HOST)
    with (
        caplog.at_level("INFO", "ps_core"),
        chunked_model(stack(8), device="emulated", budget=budget, options=options, **settings) as (model, optimizer),
    ):
        for index, batch in enumerate((1, 2, 3)):  # each larger than planned, so planned anew
            for _ in range(settings.get("accumulation_steps", 1)):
                optimizer.scale(square(model, *rows(index, batch, 2, 32))).backward()
            finish(optimizer)
    assert sum(" s a step are predicted for " in each.message for each in caplog.records) > 1
    lines = [each.message for each in caplog.records if "Options(step='in_backward')" in each.message]
    assert len(lines) == said, lines
    assert all("if you do not clip gradients" in line for line in lines)

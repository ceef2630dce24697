"""What `pstar doctor --calibrate` runs, with next to nothing to measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ps_core._simulate.machine import MACHINES, machine_from_toml
from ps_core.engine import _calibrate


def test_every_figure_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_calibrate, "_PARAMETERS", 2**16)
    monkeypatch.setattr(_calibrate, "_BLOCK_BYTES", 2**16)
    monkeypatch.setattr(_calibrate, "_DISK_BYTES", 2**20)
    monkeypatch.setattr(_calibrate, "_TOKENS", (8, 64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _calibrate.main() == 0
    text = capsys.readouterr().out
    assert [line.split(":")[0] for line in text.splitlines()[:2]] == [
        "# norm of bf16 gradients",
        "# copies in memory of cpu, reads and writes together",
    ]
    found, base = machine_from_toml(text), MACHINES["cpu"]
    taken = {"memory_bytes", "collective_bandwidth", "internode_bandwidth"}
    same = {key for key in type(found).__slots__ if getattr(found, key) == getattr(base, key)}
    assert same == taken
    assert found.name.endswith(", calibrated")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_work_and_overhead_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says a second, and a second for each hundred tokens."""
    monkeypatch.setattr(_calibrate, "_TOKENS", (100, 300))
    taken = iter([2.0, 4.0])
    monkeypatch.setattr(_calibrate, "_seconds", lambda work, device: next(taken))
    rate, overhead = _calibrate._matmul(torch.device("cpu"), torch.float32)
    parameters = 4 * (8 * 512**2 + 7 * 512)
    assert rate == pytest.approx(6 * parameters * 100)
    assert overhead == pytest.approx(1 / 8), "of four blocks, there and back"

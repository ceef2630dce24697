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
    monkeypatch.setattr(_calibrate, "_TOKENS", (64, 128))
    monkeypatch.setattr(_calibrate, "_ROUNDS", 1)
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
    assert found.played_copy_bandwidth > 0 < found.instruction_overhead_s, "the CPU plays the accelerator"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_work_and_overhead_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says a second, and a second for each 128 tokens."""
    monkeypatch.setattr(_calibrate, "_TOKENS", (128, 384))
    taken = iter([2.0, 4.0])
    monkeypatch.setattr(_calibrate, "_seconds", lambda work, device: next(taken))
    rate, overhead = _calibrate._matmul(torch.device("cpu"), torch.float32)
    recomputed, once = 4 * (12 * 384**2 + 13 * 384), 384**2 + 384
    assert rate == pytest.approx((8 * recomputed + 6 * once) * 128)
    assert overhead == pytest.approx(1 / 10), "of four blocks and what is before them, there and back"


def test_the_engines_own_work_is_divided_among_moments_tensors_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From made-up seconds: 0.01 a moment, 0.001 a tensor, 0.1 a step or norm."""
    few = _calibrate._Tiny(passes_s=0.16 + 0.3 + 0.8, step_s=0.8, moments=16, tensors=300, norms=8, steps=8)
    many = _calibrate._Tiny(passes_s=0.9 + 0.7 + 2.0, step_s=9.9, moments=90, tensors=700, norms=20, steps=20)
    runs = iter([few, many])
    monkeypatch.setattr(_calibrate, "_tiny", lambda group_bytes: next(runs))
    assert _calibrate._own_work() == pytest.approx((0.01, 0.001, 0.1))


def test_what_is_timed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller groups: more moments, which read each tensor more often; and a norm and a step for each group."""
    monkeypatch.setattr(_calibrate, "_ROUNDS", 1)
    before = torch.random.get_rng_state()
    few, many = (_calibrate._tiny(size) for size in _calibrate._GROUP_BYTES)
    assert torch.equal(before, torch.random.get_rng_state())
    assert few.norms == few.steps < many.norms == many.steps
    assert few.moments == 16
    assert many.moments > 4 * few.moments
    assert few.tensors < many.tensors < 4 * few.tensors
    assert few.passes_s > 0 < few.step_s

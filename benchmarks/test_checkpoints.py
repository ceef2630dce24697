"""The figures of checkpoints, once and small, so that they do not rot; checkpoint_figures.py takes them in earnest."""

from __future__ import annotations

from pathlib import Path

from checkpoint_figures import figures


def test_figures(tmp_path: Path) -> None:
    found = figures(tmp_path, 8, 2)
    assert len(found) == 5
    assert all(ratio > 0 for ratio in found.values())
    assert found["save, chunks"] <= 2
    assert found["load, chunks"] <= 2

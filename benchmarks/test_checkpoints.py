"""The figures of checkpoints, once and small, so that they do not rot; checkpoint_figures.py takes them in earnest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def test_figures(tmp_path: Path) -> None:
    path = Path(__file__).with_name("checkpoint_figures.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.figures(tmp_path, 8, 2)
    assert len(found) == 5
    assert all(ratio > 0 for ratio in found.values())
    assert found["save, chunks"] <= 2
    assert found["load, chunks"] <= 2

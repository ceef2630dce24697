"""The models' figures, once and small, so that they do not rot; models_figures.py takes them in earnest."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import models_figures as figures


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_speed_beside_others(precision: str) -> None:
    small = figures.Shape(layers=2, hidden=32, heads=2, vocabulary=64, batch=2, length=8)
    found = figures.compare(small, precision, 2)
    assert len(found) == 5
    assert min(found.values()) > 0

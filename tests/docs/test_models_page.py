"""docs/models.md: its tables are the code's, its example runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ps_core.engine import release
from ps_models._config import DecoderConfig, ModelConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text("utf-8")


@pytest.mark.parametrize(("kind", "base"), [(ModelConfig, None), (DecoderConfig, ModelConfig)])
def test_names_and_defaults(kind: type[ModelConfig], base: type[ModelConfig] | None) -> None:
    known = {"shape"} | ({field.name for field in fields(base)} if base else set())
    table = PAGE.split(f"<!-- {kind.__name__} -->\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")][:2] for line in table.splitlines()[2:]]
    expected = [field for field in fields(kind) if field.name not in known]
    assert rows == [[f"`{field.name}`", f"`{field.default!r}`"] for field in expected]


def test_the_example_runs() -> None:
    found = re.search(r"<!-- example -->\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    torch.manual_seed(0)
    names: dict[str, object] = {}
    try:
        exec(found[1], names)
        assert names["continued"].shape == (2, 12)
        assert 8.5 < float(names["loss"].detach()) < 9.5
    finally:
        if "optimizer" in names:
            release(names["model"])

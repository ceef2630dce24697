"""docs/scaling.md holds what its script prints, re-run in part."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text("utf-8")


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    """The script."""
    return load(ROOT / "benchmarks", "scaling")


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    """How rows are compared."""
    return load(Path(__file__).parent, "test_predicted")


def load(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def shown(title: str, gpus: str) -> str:
    """A row of the page."""
    table = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    (row,) = re.findall(rf"^\| {gpus} \|.*$", table, flags=re.MULTILINE)
    return str(row)


def test_the_page_is_complete(scaling: ModuleType) -> None:
    assert scaling.HEAD.strip() in PAGE
    assert scaling.TAIL.strip() in PAGE
    for case in scaling.CASES:
        for gpus in scaling.SIZES:
            assert shown(case.title, f"{gpus:,}")


@pytest.mark.parametrize("gpus", [8, 64, 4096])
def test_a_row_is_still_so(gpus: int, scaling: ModuleType, predicted: ModuleType) -> None:
    case = scaling.CASES[0]
    assert predicted.is_told(scaling.row(case, gpus), shown(case.title, f"{gpus:,}"))


def test_the_published_points_are_off_by_what_the_page_says(scaling: ModuleType) -> None:
    high = []
    for gpus, published in scaling.PUBLISHED.items():
        row = shown("175B on A100", str(gpus))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[-1] == published
        assert f"{published} where {cells[-3]}" in PAGE.replace("TFLOPS ", "")
        high.append(round(100 * (int(cells[-3]) / int(published) - 1)))
    assert f"too high by {high[0]} and by {high[1]} per cent" in PAGE.replace("\n  ", " ")

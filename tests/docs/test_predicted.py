"""docs/predicted.md holds what its script prints, re-run in part."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "predicted.md"


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predicted", ROOT / "benchmarks" / "predicted.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["predicted"] = module
    spec.loader.exec_module(module)
    return module


def numbers(row: str) -> list[float]:
    """The figures of a row, byte counts by their digits."""
    return [float(text.replace(",", "")) for text in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", row)]


def is_told(row: str, page: str, tolerance: float = 0.03) -> bool:
    """Whether the page has a row with the same words and nearly the same figures."""

    def words(line: str) -> list[str]:
        return re.findall(r"[A-Za-z]+", line)

    wanted = numbers(row)
    return any(
        words(line) == words(row)
        and len(numbers(line)) == len(wanted)
        and all(abs(a - b) <= tolerance * max(a, b) for a, b in zip(numbers(line), wanted, strict=True))
        for line in page.splitlines()
    )


def test_the_page_is_complete(predicted: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for text in (predicted.HEAD, predicted.MIDDLE, predicted.TAIL):
        assert text.strip() in page
    tables = page.split(predicted.MIDDLE.strip())
    assert len(re.findall(r"^\| [VAH]\d", tables[0], flags=re.M)) == len(predicted.SCALES)
    for server, gpus, _, model, *_ in predicted.SPEEDS:
        assert f"| {server.label} | {gpus} | `{model}` |" in tables[1]


def test_a_scale_row_is_still_so(predicted: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert is_told(predicted.scale_row(*predicted.SCALES[1]), page)


def test_speed_rows_are_still_so(predicted: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    server, gpus, nodes, model, batch, *published = predicted.SPEEDS[1]
    rows = list(predicted.speed_rows(server, gpus, nodes, model, batch, published))
    assert rows
    assert all(is_told(row, page) for row in rows)
    assert not is_told(rows[0].replace("belady", "magic"), page)


def test_a_row_of_table_and_head_apart_is_still_so(predicted: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert predicted.APART.strip() in page
    assert is_told(predicted.apart_row(cpu_embedding=True, head_tiles=16), page)


def test_the_readme_table_is_still_so(predicted: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert is_told(predicted.card_row(*predicted.CARDS[0]), readme)
    for device, host, batch in predicted.CARDS:
        assert re.search(rf"^\| {device} GiB .*\| {host} GiB \|.*\| {batch} \|", readme, flags=re.M)


def test_both_pages_tell_the_same_of_the_same() -> None:
    """By the tenth of a second: 175B on 16 and on 32 GPUs."""
    page, other = PAGE.read_text("utf-8"), (PAGE.parent / "scaling.md").read_text("utf-8")
    for gpus, nodes in ((16, 2), (32, 4)):
        here = re.search(rf"^\|.*\| {gpus} \| `gpt-175b` \| 4 \| belady[^|]*\|.*GiB \| ([\d.]+) \|", page, re.M)
        there = re.search(rf"^\| {gpus} \| {nodes} \|[^|]*GiB \| ([\d.]+) \|", other, re.M)
        assert here is not None
        assert there is not None
        assert here[1] == there[1]

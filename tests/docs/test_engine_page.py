"""docs/engine.md has the names and defaults of the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from ps_core import Budget, Options
from ps_core.engine import Statistics, TierStatistics, chunked

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "engine.md").read_text("utf-8")


def rows(page: str, marker: str) -> list[list[str]]:
    """The cells of the table that follows a marker, without its heading."""
    found = re.search(rf"^<!-- {marker} -->\n\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found is not None, marker
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()[2:]]


def shown(defaults: Mapping[str, object]) -> list[list[str]]:
    """Names and defaults as a table shows them."""
    texts = {name: repr(str(value)) if isinstance(value, str) else repr(value) for name, value in defaults.items()}
    return [[f"`{name}`", f"`{text}`"] for name, text in texts.items()]


def arguments() -> dict[str, object]:
    """The keyword-only ones of `chunked`; a default that is an enum's member is shown as its text."""
    parameters = inspect.signature(chunked).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("marker", "defaults"),
    [
        ("arguments", arguments()),
        ("Budget", {row.name: row.default for row in fields(Budget) if row.init}),
        ("Options", {row.name: row.default for row in fields(Options)}),
    ],
)
def test_names_and_defaults(marker: str, defaults: dict[str, object]) -> None:
    assert [row[:2] for row in rows(PAGE, marker)] == shown(defaults)


def test_every_field_of_the_statistics() -> None:
    told = rows(PAGE, "Statistics")
    assert [row[0] for row in told] == [f"`{row.name}`" for row in fields(Statistics)]
    assert all(f"`{row.name}`" in told[0][1] for row in fields(TierStatistics))


def test_the_guard_itself() -> None:
    table = "| name | default | what |\n|---|---|---|\n| `a` | `1` | x |\n| `b` | `'c'` | y |\n"
    page = f"<!-- Options -->\n\n{table}\nwords\n"
    assert rows(page, "Options") == [["`a`", "`1`", "x"], ["`b`", "`'c'`", "y"]]
    assert shown({"a": 1, "b": "c"}) == [["`a`", "`1`"], ["`b`", "`'c'`"]]

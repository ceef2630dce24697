"""Test that the built site includes sections of the README, which pages in the repository link to."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def hooks() -> Any:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    spec = importlib.util.spec_from_file_location("repository_hooks", DOCS / ".repository.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_measured_table_of_the_readme_is_on_a_page(hooks: Any) -> None:
    page = (DOCS / "comparison.md").read_text("utf-8")
    shown = hooks.on_page_markdown(page, page=None, config=None, files=None)
    rows = [line for line in hooks.README.read_text("utf-8").splitlines() if "FSDP2 |" in line or "DDP |" in line]
    assert len(rows) >= 2
    assert all(shown.count(row) == 1 for row in rows)
    assert not re.search(r"\]\((\.\./|docs/)", shown), "links are those of a page in docs"
    assert shown.index("## What was measured") < shown.index(rows[0]) < shown.index("## What is different here")


def test_other_pages_stay_as_they_are(hooks: Any) -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text("utf-8")
        assert (hooks.on_page_markdown(text) == text) is (page.name != "comparison.md")


def test_a_section_that_the_readme_does_not_have_is_an_error(hooks: Any) -> None:
    with pytest.raises(ValueError, match="has no section 'Nowhere'"):
        hooks.on_page_markdown("<!-- README: Nowhere -->\nthere\n<!-- end -->\n")

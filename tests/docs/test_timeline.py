"""docs/images/timeline.svg is what the command beside it draws."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ps_core import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_picture_is_the_command_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "verification.md").read_text("utf-8")
    command = re.search(r"^\$ pstar (plan .* --timeline (timeline\.svg))$", page, re.MULTILINE)
    assert command is not None
    assert f"images/{command[2]}" in page
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command[1])) == 0
    drawn = (tmp_path / command[2]).read_text("utf-8")
    assert drawn == (DOCS / "images" / command[2]).read_text("utf-8"), "run the command of the page in docs/images"

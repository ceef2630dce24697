"""What must not be in the repository, and what must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TOP = {
    *("packages", "docs", "tests", "benchmarks", "noxfile.py", "mkdocs.yml", "pyproject.toml", "constraints.txt"),
    *("README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md"),
}
# Spelled in pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:" + "|".join(("home", "root", "Users", "work", "opt", "mnt")) + r")/\w")
INDEX = re.compile("|".join(("pypi" + r"\.(?:org|python)", "files.python" + "hosted", "--(?:extra-)?index" + "-url")))


def faults(text: str) -> list[str]:
    """Every trace of one particular machine or package index."""
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line) or INDEX.search(line)]


def test_the_top_level(root: Path, tracked: list[Path]) -> None:
    top = {path.relative_to(root).parts[0] for path in tracked}
    assert {name for name in top if not name.startswith(".")} <= TOP
    assert top >= TOP - {"benchmarks"}


def test_no_machine_and_no_index(root: Path, tracked: list[Path]) -> None:
    found = [f"{path.relative_to(root)}: {line}" for path in tracked for line in faults(path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("see /" + "home/someone/x", 1),
        ("path = '/" + "opt/thing'", 1),
        ("packages/core/home/x and docs/work/y and ./root/z", 0),
        ("https://example.org/home/x", 0),
        ("pip install --index" + "-url X", 1),
        ("https://py" + "pi.org/simple", 1),
    ],
)
def test_the_guard_itself(text: str, count: int) -> None:
    assert len(faults(text)) == count

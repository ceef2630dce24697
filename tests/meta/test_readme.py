"""The README's commands are what runs, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COMMAND = re.compile(r"^```sh\n(.+?)\n```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def test_the_two_commands(root: Path) -> None:
    commands = COMMAND.findall((root / "README.md").read_text("utf-8"))
    assert len(commands) == 2
    assert all("\n" not in command for command in commands), "one line each"
    demo, tests = commands
    assert demo.endswith("nox -s demo")
    assert tests.endswith("nox -s tests")
    assert tests in [line.strip() for line in (root / ".ci" / "run").read_text("utf-8").splitlines()]


def test_ci_can_be_run(root: Path) -> None:
    assert (root / ".ci" / "run").stat().st_mode & 0o111


def headings(text: str) -> set[str]:
    """The anchors that a page's headings make."""
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", line).strip().lower()) for line in lines}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere; links out of the repository are not followed."""
    found = []
    for link in (one or other for one, other in LINK.findall(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in headings(target.read_text("utf-8"))
        ):
            found.append(link)
    return found


def test_every_link_leads_somewhere(root: Path, tracked: list[Path]) -> None:
    pages = [path for path in tracked if path.suffix == ".md"]
    assert root / "README.md" in pages
    assert {str(page.relative_to(root)): links for page in pages if (links := broken(page))} == {}


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](other.md) [b](https://example.org/x) [c](#part-two)\n\n## Part, two\n", []),
        ("[a](missing.md) ![b](missing.svg) [c](#part-three)", ["missing.md", "missing.svg", "#part-three"]),
        ("[a](other.md#there) [b](other.md#nowhere)", ["other.md#nowhere"]),
    ],
)
def test_the_guard_itself(tmp_path: Path, text: str, links: list[str]) -> None:
    (tmp_path / "other.md").write_text("# There\n", "utf-8")
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert broken(page) == links

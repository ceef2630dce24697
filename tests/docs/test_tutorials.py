"""Tutorials and the README's sample run from top to bottom, and say what they show.

A ``text`` block straight after a ``python`` block shows what that one prints, errors included. Numbers with a point and
numbers of more than four digits may differ by a twentieth, for they may depend on the processor; ``...`` is anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
README = ROOT / "README.md"
PAGES = [README] + [page for page in sorted(ROOT.glob("docs/tutorials/*.md")) if BLOCK.search(page.read_text("utf-8"))]
"""Those in Python; the commands of another one have a test of their own."""
NUMBER = re.compile(r"\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+|\d{5,}|\.\.\.")
MARK = "---- block {} ----"


def script(page: str) -> str:
    """The page's Python, with a mark before each block's output."""
    marked = (f"print({MARK.format(index)!r})\n{code}" for index, (code, _) in enumerate(BLOCK.findall(page)))
    return "\n".join(marked)


def outputs(said: str) -> list[str]:
    """What each block printed."""
    return re.split(re.escape(MARK).replace(r"\{\}", r"\d+") + "\n", said)[1:]


def alike(shown: str, said: str) -> bool:
    """Whether this is what the page shows."""
    pattern = "(.*)".join(re.escape(part) for part in NUMBER.split(shown))
    found = re.fullmatch(pattern, said)
    if found is None:
        return False
    for number, other in zip(NUMBER.findall(shown), found.groups(), strict=True):
        if number == "...":
            continue
        if not re.fullmatch(r"\d[\d,]*(\.\d+)?", other):
            return False
        one, two = float(number.replace(",", "")), float(other.replace(",", ""))
        if abs(one - two) > 0.05 * one:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial(page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    done = subprocess.run(
        [sys.executable, "-u", "-W", "error", "-c", script(text)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # the models are tiny
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    shown = [expected for _, expected in BLOCK.findall(text)]
    assert len(shown) > 3 or (page == README and shown[0])
    for expected, said in zip(shown, outputs(done.stdout), strict=True):
        assert alike(expected, said), f"{page.name} shows\n{expected}\nbut this was printed:\n{said}"


@pytest.mark.parametrize(
    ("shown", "said", "same"),
    [
        ("loss 2.50, 12 steps\n", "loss 2.55, 12 steps\n", True),
        ("loss 2.50, 12 steps\n", "loss 2.50, 13 steps\n", False),
        ("loss 2.50\n", "loss 2.70\n", False),
        ("1,000,000 bytes\n", "1,010,000 bytes\n", True),
        ("1,000,000 bytes\n", "many bytes\n", False),
        ("in ... s\nend\n", "in 0.3 s\nend\n", True),
        ("in ... s\n", "in 0.3 s\nmore\n", False),
        ("", "anything\n", False),
    ],
)
def test_the_guard_itself(shown: str, said: str, same: bool) -> None:
    assert alike(shown, said) is same


def test_blocks_and_outputs_are_paired() -> None:
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 2\n```\n\nwords\n\n```text\nno output\n```\n"
    assert BLOCK.findall(page) == [("print(1)\n", "1\n"), ("x = 2\n", "")]
    assert outputs("---- block 0 ----\n1\n---- block 1 ----\n") == ["1\n", ""]

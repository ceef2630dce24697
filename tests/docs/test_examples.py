"""What the documentation shows works: every ``$ pstar`` line of a console block, every Python block of a README."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's fenced blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """The ``$ pstar`` lines of a console block; a backslash at the end goes on with the next line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if line.startswith("$ pstar")]


MANY_NODES = ROOT / "docs" / "tutorials" / "from-one-gpu-to-many-nodes.md"
"""Its commands run as a whole, in `test_many_nodes_page`."""
CONSOLE = [
    (page, block) for page in PAGES if page != MANY_NODES for block in blocks(page, "console") if commands(block)
]
WHOLE = [
    *ROOT.glob("docs/tutorials/*.md"),
    *(ROOT / "docs" / f"{name}.md" for name in ("recipes", "migration", "integrations")),
]
"""Pages whose blocks go on from one another: they run as a whole, in `test_tutorials` and `test_recipes`."""
PYTHON = [(page, block) for page in PAGES if page not in WHOLE for block in blocks(page, "python")]


def name(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


@pytest.mark.parametrize(("page", "block"), CONSOLE, ids=name)
def test_console(page: Path, block: str, tmp_path: Path) -> None:
    """The lines of one block run in one folder, so that one may read what another wrote."""
    for command in commands(block):
        program = Path(sys.executable).with_name(command[0])
        done = subprocess.run(
            [program, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{page.name}: {shlex.join(command)}\n{done.stdout}{done.stderr}"
        assert done.stdout or list(tmp_path.iterdir())


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=name)
def test_python(page: Path, block: str, tmp_path: Path) -> None:
    """As one process of one, so that what torchrun would set is there; nobody else has to know its port."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        env=os.environ | alone,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{page.name}: {done.stderr}"


def test_a_block_is_read_as_it_is_typed() -> None:
    block = "$ pstar plan gpt2 \\\n    --gpus 1  # one\nfits\n$ ls\n$ pstar doctor\n"
    assert commands(block) == [["pstar", "plan", "gpt2", "--gpus", "1"], ["pstar", "doctor"]]
    assert len(PYTHON) >= 2

"""Recipes and the migration page: every ``python`` block runs, one after the other, and prints what the page shows.

Blocks of other libraries' scripts are fenced with ``py``, and only have to be Python.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "recipes": ("transformers", "accelerate", "peft"),
    "migration": ("transformers",),
    "integrations": ("transformers", "accelerate", "lightning"),
}
FOREIGN = re.compile(r"^```py\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NEEDS)
def test_page(name: str, tutorials: Any, tmp_path: Path) -> None:
    for needed in NEEDS[name]:
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    done = subprocess.run(
        [sys.executable, "-u", "-c", tutorials.script(text)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    blocks = tutorials.BLOCK.findall(text)
    assert len(blocks) > 3
    for (_, shown), said in zip(blocks, tutorials.outputs(done.stdout), strict=True):
        assert not shown or tutorials.alike(shown, said), f"{name}.md shows\n{shown}\nbut this was printed:\n{said}"


@pytest.mark.parametrize(("name", "count"), [("migration", 2), ("integrations", 4)])
def test_others_scripts_are_python(name: str, count: int) -> None:
    scripts = FOREIGN.findall((ROOT / "docs" / f"{name}.md").read_text("utf-8"))
    assert len(scripts) == count
    for script in scripts:
        ast.parse(script)

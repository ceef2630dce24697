"""docs/distributed.md shows a program, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path

from _crew import torchrun

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text("utf-8")


def test_the_program_on_the_page(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    done = torchrun(tmp_path / "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown

"""Two processes through the integrations, against each library's own `DistributedDataParallel`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "generation": ("transformers", "accelerate"),
    "adapters": ("transformers", "accelerate", "peft"),
    "accelerate": ("transformers", "accelerate"),
    "lightning": ("transformers", "lightning"),
}
UNPLANNED = {"lightning": 2, "generation": 4}
"""At most so many passes follow no plan: evaluations before training, and of batches that grow; else 0."""


def torchrun(*program: str | Path) -> str:
    """Run a program in two processes, and return what they printed."""
    path = os.pathsep.join([str(HERE.parent / "engine"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("library", NEEDS)
def test_two_processes_have_the_bits_of_ddp(library: str, tmp_path: Path) -> None:
    """Compare weights, losses and evaluations, before a run is resumed from its checkpoint and behind that."""
    for each in NEEDS[library]:
        pytest.importorskip(each, reason=f"{each} is not installed")
    torchrun(HERE / "programs" / "of_ranks.py", library, tmp_path)
    for rank in range(2):
        each = json.loads((tmp_path / f"{rank}.json").read_text("utf-8"))
        assert each["equal"]
        assert each["logged"]
        assert each["evictions"] > 0
        assert each["peak"] <= 320_000
        assert each["unplanned"] <= UNPLANNED.get(library, 0)
        assert library != "adapters" or each["narrow"]


def test_the_program_on_the_page(tmp_path: Path) -> None:
    """Run the page's program; its output must be what the page shows."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    section = (HERE.parents[1] / "docs" / "integrations.md").read_text("utf-8").split("## Several processes")[1]
    program, shown = re.findall(r"^```(?:py|text)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "train.py").write_text(program, "utf-8")
    assert torchrun(tmp_path / "train.py") == shown

"""The figures of several processes, once and small, so that they do not rot."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def test_contenders_take_turns() -> None:
    program = Path(__file__).with_name("dist_figures.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, "--size=tiny"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ours fp32 / FSDP2 fp32, by speed: " in done.stdout
    assert "ours fp32 / FSDP2 fp32, by processor time: " in done.stdout
    if find_spec("deepspeed") is None:
        assert "skipped: DeepSpeed fp32, DeepSpeed bf16, for deepspeed is not installed" in done.stdout
    else:
        assert "ours bf16 / DeepSpeed bf16, by speed: " in done.stdout
    assert "ours bf16: 7." in done.stdout

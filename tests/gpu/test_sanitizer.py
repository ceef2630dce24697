"""Every kernel under compute-sanitizer, where that is installed and takes the device: no bad access, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not installed"),
]
EXERCISE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "exercise.py"
REFUSED = ("Device not supported", "Unable to find injection library", "not supported on this device")
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ("--racecheck-report", "all")}
"""PyTorch asks the driver for what it may not have, and goes on without: that is no error of a kernel's."""


ONLY = tuple(f"kns={start}" for start in ("adam_", "sgd_", "accumulate_", "norm_", "copy_pieces"))
"""Names begin so. PyTorch's kernels are not watched: that takes its time, and what they report is not ours to mend."""


@pytest.mark.parametrize("tool", OPTIONS)
def test_every_kernel(tool: str) -> None:
    limit_s = float(os.environ.get("PS_SANITIZER_SECONDS", "120"))
    try:
        done = watched(tool, ONLY, limit_s)
        if "every kernel ran" not in done.stdout and "option" in done.stdout + done.stderr:
            done = watched(tool, (), limit_s)  # another release, which does not know the filter
    except subprocess.TimeoutExpired:
        pytest.skip(f"{tool} was not done after {limit_s:.0f} s, so it says nothing")
    said = done.stdout + done.stderr
    if any(reason in said for reason in REFUSED):
        pytest.skip(f"compute-sanitizer does not take this device: {said.strip().splitlines()[0]}")
    assert done.returncode == 0, said[-4000:]
    assert "every kernel ran" in done.stdout


def watched(tool: str, only: tuple[str, ...], limit_s: float) -> subprocess.CompletedProcess[str]:
    """All kernels once under a tool."""
    names = [word for name in only for word in ("--kernel-name", name)]
    command = ["compute-sanitizer", "--tool", tool, *OPTIONS[tool], *names, "--error-exitcode", "9"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor's end is an allocation's
    return subprocess.run(
        [*command, sys.executable, str(EXERCISE)], capture_output=True, text=True, check=False, timeout=limit_s,
        env=environment, errors="replace",
    )  # fmt: skip

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


@pytest.mark.parametrize("tool", OPTIONS)
def test_every_kernel(tool: str) -> None:
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        *OPTIONS[tool],
        "--error-exitcode",
        "9",
        sys.executable,
        str(EXERCISE),
    ]
    limit_s = float(os.environ.get("PS_SANITIZER_SECONDS", "120"))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor's end is an allocation's
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment, errors="replace"
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{tool} was not done after {limit_s:.0f} s, so it says nothing")
    said = done.stdout + done.stderr
    if any(reason in said for reason in REFUSED):
        pytest.skip(f"compute-sanitizer does not take this device: {said.strip().splitlines()[0]}")
    assert done.returncode == 0, said[-4000:]
    assert "every kernel ran" in done.stdout

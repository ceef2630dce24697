"""A real install on a computer without a C compiler: it succeeds, and says what is missing, once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch, ps_kernels
    x, out = torch.ones(4), torch.zeros(2)
    for _ in range(3):
        ps_kernels.sumsq_finite(x, out)
said = [str(each.message) for each in said if "ps_kernels" in str(each.message)]
print(json.dumps([ps_kernels.__file__, ps_kernels.backends(), said, out.tolist(), ps_kernels.warm()]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which no compiler is to be found, nor what one made before."""
    (tmp_path / "bin").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    return {**kept, "PATH": str(tmp_path / "bin"), "PS_KERNELS_CACHE": str(tmp_path / "cache")}


@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is not installed")
@pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed")
def test_without_a_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    source, target = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "packages" / "ps-kernels", source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    install = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--target", target, source)
    done = subprocess.run([sys.executable, *install], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(target.rglob("*.so"))
    environment["PYTHONPATH"] = str(target)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    place, backends, said, out, warmed = json.loads(done.stdout)
    assert place.startswith(str(target))
    assert backends["torch"] == "available"
    why = "not compiled: no C compiler found: install gcc or clang"
    assert {backends[level] for level in ("avx512", "avx2", "neon", "scalar")} == {why}
    assert said == [f"ps_kernels: torch or numpy does the work, several times slower: {why}"], "once in three calls"
    assert out == [12, 0]
    assert warmed[0] == f"no compiled C: {why}"

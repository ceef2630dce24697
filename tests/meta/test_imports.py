"""What an import loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "cupy", "ps_kernels")
LOADED = (
    "import importlib, sys; importlib.import_module(sys.argv[1]); print(*(n for n in sys.argv[2:] if n in sys.modules))"
)


def loaded(module: str, watched: tuple[str, ...]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, module, *watched], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_pure_module_needs_the_standard_library_only(root: Path) -> None:
    source = root / "packages" / "ps-core" / "src" / "ps_core"
    modules = sorted(path.stem for path in source.glob("*.py") if path.stem not in ("__init__", "__main__"))
    assert "_plan" in modules
    program = (
        "import importlib, sys\n"
        "before = set(sys.modules)\n"
        "for name in sys.argv[1:]: importlib.import_module('ps_core.' + name)\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(*sorted(roots))"
    )
    done = subprocess.run([sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ps_core"]


@pytest.mark.parametrize(("module", "watched"), [("ps_core", HEAVY), ("ps_kernels", HEAVY[:3])])
def test_a_package_loads_nothing_heavy(module: str, watched: tuple[str, ...]) -> None:
    assert loaded(module, watched) == []


def test_the_guard_itself() -> None:
    assert loaded("ps_kernels._numpy", HEAVY) == ["numpy", "ps_kernels"]

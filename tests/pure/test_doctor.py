"""What this computer has, asked of computers that are not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ps_core import InvalidInput, PatrickStarError
from ps_core._command.doctor import Accelerator, accelerators, calibrate, examine, host_memory, run, warm

GIB = 2**30


def nothing(command: Sequence[str]) -> str:
    raise FileNotFoundError(command[0])


def test_this_computer_whatever_it_has() -> None:
    found = examine()
    assert found["pstar"]
    assert "CPUs" in found["python"]
    for key in ("torch", "numpy", "cupy", "ps_kernels", "host memory", "memory limit", "disk", "accelerators"):
        assert found[key]
        assert "\n" not in found[key]


def test_a_computer_with_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "resource", None)

    def no_disk(path: Path) -> None:
        raise OSError(2, "no such place")

    monkeypatch.setattr(shutil, "disk_usage", no_disk)
    found = examine(tmp_path, nothing)
    assert found["torch"] == found["cupy"] == "not installed"
    assert found["host memory"] == "unknown on this system"
    assert found["memory limit"] == "none found"
    assert found["locked memory"] == "unknown on this system"
    assert found["disk"] == "unknown: no such place"
    assert found["accelerators"] == "none the driver reports"


def test_packages_that_break_on_import_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def broken(command: Sequence[str]) -> str:
        raise subprocess.SubprocessError("ImportError: libcudart.so\nnot found")

    found = examine(runner=broken)
    assert found["torch"] == "installed, but cannot be used: ImportError: libcudart.so not found"
    assert examine(runner=lambda command: " 2.13.0\nwith CUDA ")["torch"] == "2.13.0 with CUDA"


def test_commands_are_run_and_their_failure_told() -> None:
    assert run((sys.executable, "-c", "print(' hello ')")) == "hello"
    with pytest.raises(subprocess.SubprocessError, match="exit status 3"):
        run((sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(subprocess.SubprocessError, match="ValueError: why"):
        run((sys.executable, "-c", "raise ValueError('why')"))


def test_accelerators_as_the_driver_lists_them() -> None:
    text = "NVIDIA H200, 143771\nTesla, V100, 32768\nbroken, [N/A]\n\n"
    assert accelerators(lambda command: text) == (
        Accelerator("NVIDIA H200", 143771 * 2**20),
        Accelerator("Tesla, V100", 32 * GIB),
    )
    assert accelerators(nothing) == ()
    assert "NVIDIA H200, 140.4 GiB" in examine(runner=lambda command: text)["accelerators"]


def computer(root: Path, meminfo: str, **limits: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(meminfo, encoding="utf-8")
    (root / "sys/fs/cgroup/memory").mkdir(parents=True)
    for name, text in limits.items():
        path = {"v2": "sys/fs/cgroup/memory.max", "v1": "sys/fs/cgroup/memory/memory.limit_in_bytes"}[name]
        (root / path).write_text(text, encoding="utf-8")
    return root


def test_memory_and_its_limits(tmp_path: Path) -> None:
    meminfo = "MemTotal:  33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\nnonsense\n"
    root = computer(tmp_path, meminfo, v2=f"{8 * GIB}\n", v1=f"{2**62}")
    assert host_memory(root) == (32 * GIB, 16 * GIB, 8 * GIB)
    (root / "sys/fs/cgroup/memory.max").write_text("max\n", encoding="utf-8")
    assert host_memory(root) == (32 * GIB, 16 * GIB, 0)
    assert "16.0 GiB available" in examine(root, nothing)["host memory"]


def test_unreadable_figures_are_unknown(tmp_path: Path) -> None:
    assert host_memory(computer(tmp_path, "MemTotal: lots\nMemAvailable:\n", v2="1024")) == (0, 0, 1024)


@pytest.mark.skipif("SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}), reason="no sysconf")
def test_systems_without_proc_ask_sysconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_core._command.doctor._read", lambda path: "")
    memory, available, limit = host_memory()
    assert memory == available > GIB // 4
    assert limit == 0


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))
    assert examine(runner=nothing)["locked memory"] == "8.0 MiB (pinning more may fail)"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert examine(runner=nothing)["locked memory"] == "unlimited"


def test_warming_says_what_it_did_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    asked: list[Sequence[str]] = []

    def runner(command: Sequence[str]) -> str:
        asked.append(command)
        return "compiled C: avx2\nkept in there"

    assert warm(runner) == ("compiled C: avx2", "kept in there")
    assert asked[0][-1] == "import ps_kernels; print('\\n'.join(ps_kernels.warm()))"

    def broken(command: Sequence[str]) -> str:
        raise subprocess.SubprocessError("no room\nleft")

    assert warm(broken) == ("nothing compiled: no room left",)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert warm(broken) == ("nothing to compile: ps_kernels is not installed",)


def test_calibration_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert calibrate(lambda command: " ".join(command[1:])) == "-m ps_core.engine._calibrate\n"
    with pytest.raises(PatrickStarError, match="--calibrate: nothing measured: python"):
        calibrate(lambda command: nothing(("python",)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "torch" else None)
    with pytest.raises(
        InvalidInput, match=r"ps_kernels is not installed: in the folder of the clone, pip install packages/ps-kernels$"
    ):
        calibrate(nothing)

"""Report what this computer has: packages, memory, disk, accelerators. Nothing is changed, and nothing raises."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ps_core._errors import InvalidInput, PatrickStarError
from ps_core._install_hints import how_to_install
from ps_core._units import format_bytes
from ps_core._version import __version__

_TIMEOUT_S = 60
_WARM_TIMEOUT_S = 600
_CALIBRATE = "ps_core.engine._calibrate"
_WARM = "import ps_kernels; print('\\n'.join(ps_kernels.warm()))"
_PROBES = {
    "torch": "import torch as t; print(t.__version__, 'with CUDA' if t.cuda.is_available() else 'without CUDA')",
    "numpy": "import numpy; print(numpy.__version__)",
    "cupy": "import cupy; print(cupy.__version__)",
    "ps_kernels": "import ps_kernels as k; print('; '.join(f'{n}: {s}' for n, s in k.backends().items()))",
    "ps_dist": (
        "import ps_dist as d; why = d.shared_memory_error(); print(d.__version__, 'sends data of GPUs by', "
        "' or '.join(d.transports()) + ';', 'processes share host memory' if why is None else "
        "f'processes cannot share host memory: {why}')"
    ),
    "ps_models": "import ps_models; print(ps_models.__version__)",
}
"""The code that asks each package, in a process of its own: a package may crash when it is imported."""

Runner = Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU that the driver reports."""

    name: str
    memory_bytes: int


def run(command: Sequence[str]) -> str:
    """Return what a command prints; raise OSError or `subprocess.SubprocessError` if it fails."""
    limit_s = _WARM_TIMEOUT_S if _WARM in command or _CALIBRATE in command else _TIMEOUT_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace")
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise subprocess.SubprocessError(last)
    return done.stdout.strip()


def examine(root: Path = Path("/"), runner: Runner = run) -> dict[str, str]:
    """Return one line for each property. ``root`` and ``runner`` let tests describe another computer."""
    found = {
        "pstar": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    found |= {name: _package(name, runner) for name in _PROBES}
    memory, available, limit = host_memory(root)
    found["host memory"] = (
        f"{format_bytes(memory)}, {format_bytes(available)} available" if memory else "unknown on this system"
    )
    found["memory limit"] = format_bytes(limit) if limit else "none found"
    found["locked memory"] = _locked_limit()
    found["disk"] = _disk()
    gpus = accelerators(runner)
    found["accelerators"] = (
        "; ".join(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}" for gpu in gpus) or "none the driver reports"
    )
    return found


def warm(runner: Runner = run) -> tuple[str, ...]:
    """Compile every kernel now; return a line for each and for their folder, or the reason why there are none."""
    if importlib.util.find_spec("ps_kernels") is None:
        return ("nothing to compile: ps_kernels is not installed",)
    try:
        return tuple(runner((sys.executable, "-c", _WARM)).splitlines())
    except (OSError, subprocess.SubprocessError) as error:
        return (f"nothing compiled: {' '.join(str(error).split())}",)


def calibrate(runner: Runner = run) -> str:
    """Return a machine file of this computer, measured in a process of its own."""
    for library in ("torch", "ps_kernels"):
        if importlib.util.find_spec(library) is None:
            raise InvalidInput(f"--calibrate: {library} is not installed: {how_to_install(library)}")
    try:
        return runner((sys.executable, "-m", _CALIBRATE)) + "\n"
    except (OSError, subprocess.SubprocessError) as error:
        raise PatrickStarError(f"--calibrate: nothing measured: {' '.join(str(error).split())}") from error


def _package(name: str, runner: Runner) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        return " ".join(runner((sys.executable, "-c", _PROBES[name])).split())
    except (OSError, subprocess.SubprocessError) as error:
        return f"installed, but cannot be used: {' '.join(str(error).split())}"


def accelerators(runner: Runner = run) -> tuple[Accelerator, ...]:
    """Return the GPUs that the driver's own tool reports; none if there is no such tool."""
    try:
        text = runner(("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"))
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in text.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            found.append(Accelerator(name.strip(), int(mebibytes) * 2**20))
    return tuple(found)


def host_memory(root: Path = Path("/")) -> tuple[int, int, int]:
    """Return three numbers of bytes: all memory, available memory, and this process's limit (0: unknown, no limit)."""
    rows = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    memory, available = (_kibibytes(rows.get(key, "")) for key in ("MemTotal", "MemAvailable"))
    if not memory and root == Path("/") and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [
        int(text)
        for name in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
        if (text := _read(root / name).strip()).isdecimal()
    ]
    limit = min((limit for limit in limits if not memory or limit < memory), default=0)
    return memory, available, limit


def _kibibytes(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdecimal() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _locked_limit() -> str:
    try:
        import resource
    except ImportError:
        return "unknown on this system"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{format_bytes(soft)} (pinning more may fail)"


def _disk() -> str:
    try:
        usage = shutil.disk_usage(Path.cwd())
    except OSError as error:
        return f"unknown: {error.strerror}"
    return f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} here"

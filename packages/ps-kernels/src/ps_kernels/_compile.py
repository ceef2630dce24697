"""Compile the kernels into one shared library, with any C compiler of this computer.

The package has the source only. The library is made at first use and kept in a cache folder of the user. Its name
contains a hash of its source. Where several processes start together, one of them compiles, and the others wait.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

_SOURCE = Path(__file__).parent / "csrc"
_COMMON = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"),
    "-fno-trapping-math",  # conditions may become selections: results are the same, only exception flags are not
)
_X86_LEVELS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
_TIMEOUT_S = 120
_MOST_WAIT_S = 120.0
"""Longest wait for another process that compiles: it may be stopped, or be gone and have left the lock to a fork."""


class CompileFailed(Exception):
    """Say that there is no library, and why none can be made."""


def levels() -> dict[str, tuple[str, ...]]:
    """Return the instruction sets compiled for this kind of processor, best first, each with its compiler flags."""
    machine = platform.machine().lower()
    vectors = _X86_LEVELS if machine in ("x86_64", "amd64") else {"neon": ()} if machine in ("aarch64", "arm64") else {}
    return {**vectors, "scalar": ()}


def library_name() -> str:
    """Return the file's name: another source, flag or kind of processor makes another."""
    digest = hashlib.sha256(repr((_COMMON, levels(), sys.platform)).encode())
    for path in sorted((*_SOURCE.glob("*.c"), *_SOURCE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"libps_kernels-{digest.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Return the folder that keeps the library; ``PS_KERNELS_CACHE`` names another one."""
    named = os.environ.get("PS_KERNELS_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ps_kernels"


def library() -> Path:
    """Return the library of this source, compiled now if there is none yet."""
    made = cache_folder() / library_name()
    if made.is_file():
        return made
    with _locked(made.parent):
        return made if made.is_file() else compile_into(made.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder within the block, where that is possible; wait for other processes that have it locked."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):  # Windows, or no folder: then compiling tells
        yield
        return
    until = time.monotonic() + _MOST_WAIT_S
    try:
        with suppress(OSError):  # a file system without locks: each process compiles
            while time.monotonic() < until:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the folder open, too
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def compile_into(folder: Path) -> Path:
    """Compile the library and put it into a folder, under its name."""
    compiler = _compiler()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                made = _build(compiler, ("-fopenmp",), Path(scratch))
            except CompileFailed:  # such as the compiler of macOS: then with one thread
                made = _build(compiler, (), Path(scratch))
            target = folder / library_name()
            made.replace(target)  # in one move: another process finds all of it or nothing
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileFailed(f"cannot compile into {folder}: {error}") from error
    return target


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get("CC", ""))
    for command in (asked,) if asked else (["cc"], ["gcc"], ["clang"]):
        if shutil.which(command[0]):
            return command
    raise CompileFailed(f"no C compiler found: {asked[0] if asked else 'install gcc or clang'}")


def _build(compiler: list[str], threads: tuple[str, ...], folder: Path) -> Path:
    """Compile each level's object, in a thread for each, then link and return the library."""
    jobs = [(*flags, f"-DPS_LEVEL={name}", "-c", f"{_SOURCE}/loops.c", "-o", f"{folder}/{name}.o")
            for name, flags in levels().items()]  # fmt: skip
    jobs.append(("-c", f"{_SOURCE}/levels.c", "-o", f"{folder}/levels.o"))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: _run((*compiler, *_COMMON, *threads, *job)), jobs))
    made = folder / "library.so"
    _run((*compiler, "-shared", *threads, *(job[-1] for job in jobs), "-o", str(made)))
    return made


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, errors="replace")
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit status {done.returncode}")
        raise CompileFailed(f"the C compiler failed: {said}")

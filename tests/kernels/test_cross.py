"""The C sources on another kind of processor: compiled for aarch64 without a warning, and run there by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ps_kernels
from ps_kernels import _compile

CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
DRIVER = Path(__file__).parent / "emulation" / "levels_driver.c"
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-unused-function")
ALONE = ("-Wno-unknown-pragmas", "-Wno-unused-parameter")
"""Without OpenMP its pragmas and the number of threads mean nothing."""
LEVELS = [name for name in _compile.levels() if ps_kernels.backends()[name] == "available"]
needs_cross = pytest.mark.skipif(CROSS is None, reason="no aarch64-linux-gnu-gcc here: nothing was compiled for NEON")


def build(compiler: list[str], level: str, flags: tuple[str, ...], folder: Path) -> Path:
    made = folder / f"driver_{level}"
    sources = (str(DRIVER), str(_compile._SOURCE / "levels.c"))
    command = [*compiler, *_compile._COMMON, *STRICT, *ALONE, *flags, f"-DPS_LEVEL={level}", f"-I{_compile._SOURCE}"]
    done = subprocess.run([*command, *sources, "-o", str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made


def printed(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert len(done.stdout.splitlines()) == 12 + 3 * 6
    return done.stdout


@needs_cross
def test_neon_compiles_without_a_warning(tmp_path: Path) -> None:
    """And into vectors that are fused where step.h says so."""
    assert CROSS is not None
    for source in ("loops.c", "levels.c"):
        made = tmp_path / f"{source}.s"
        command = [CROSS, *_compile._COMMON, *STRICT, "-fopenmp", "-DPS_LEVEL=neon", "-S", "-o", str(made)]
        done = subprocess.run([*command, str(_compile._SOURCE / source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "fmla\tv" in (tmp_path / "loops.c.s").read_text()


@needs_cross
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 here: nothing was run as NEON")
@pytest.mark.skipif(not LEVELS, reason="no C compiler here to compare with")
def test_neon_gives_the_bits_of_this_processor(tmp_path: Path) -> None:
    assert CROSS is not None
    assert EMULATOR is not None
    here = build(_compile._compiler(), "scalar", (), tmp_path)
    neon = build([CROSS, "-static"], "neon", (), tmp_path)
    assert printed([EMULATOR, str(neon)]) == printed([str(here)])


@pytest.mark.skipif(not LEVELS, reason="no C compiler here")
@pytest.mark.parametrize("threads", [("-fopenmp",), ALONE], ids=["OpenMP", "one thread"])
def test_this_processors_levels_have_no_warning(threads: tuple[str, ...]) -> None:
    for level, flags in _compile.levels().items():
        command = [*_compile._compiler(), *_compile._COMMON, *STRICT, *threads, *flags, f"-DPS_LEVEL={level}"]
        sources = (str(_compile._SOURCE / name) for name in ("loops.c", "levels.c"))
        done = subprocess.run([*command, "-fsyntax-only", *sources], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

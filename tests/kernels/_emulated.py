"""A launcher that runs the CUDA sources, unmodified, on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ps_kernels._cuda_source import KERNELS, source

HEADER = Path(__file__).parent / "emulation" / "cuda_emulation.h"
COMPILE = ("g++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fsanitize=alignment")
PROBLEMS = {1: "not all threads of a block reached a barrier", 2: "an access is not aligned to its width"}


def build(text: str, kernels: Sequence[str], folder: Path, name: str, more: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile a module for the CPU, with more options."""
    entries = "\n".join(f"EMULATED({kernel})" for kernel in kernels)
    file = folder / f"{name}.cpp"
    file.write_text(f'{HEADER.read_text("utf-8")}\n#line 1 "{name}.cu"\n{text}\n{entries}\n', "utf-8")
    made, library = file.with_suffix(".o"), file.with_suffix(".so")
    for command in ([*COMPILE, *more, "-c", file, "-o", made], ["g++", "-shared", made, "-o", library]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def of_one_type() -> str:
    """The step's source with kernels for bfloat16 gradients only: a third of the time to compile."""
    return source("step").replace("\nPS_ALL(float32, float)", "").replace("\nPS_ALL(float16, Fp16)", "")


@dataclass(kw_only=True)
class EmulatedLauncher:
    """The kernels, compiled for the CPU; ``order`` is that of a block's threads between barriers."""

    libraries: dict[str, ctypes.CDLL]
    processors: int = 1
    order: int = 0
    launched: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def made(cls, folder: Path) -> EmulatedLauncher:
        return cls(libraries={name: build(source(name), kernels, folder, name) for name, kernels in KERNELS.items()})

    def launch(
        self, kernel: tuple[str, str], grid: tuple[int, int], arguments: Sequence[int | float], on: torch.Tensor
    ) -> None:
        self.launched.append((kernel[1], grid[0]))
        self.run(kernel, grid, arguments, (0, grid[0]))

    def run(
        self,
        kernel: tuple[str, str],
        grid: tuple[int, int],
        arguments: Sequence[int | float],
        blocks: tuple[int, int],
    ) -> None:
        """Some of a grid's blocks: the first, and how many."""
        library = self.libraries[kernel[0]]
        values = [ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x) for x in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        entry = ctypes.cast(library[f"emulated_{kernel[1]}"], ctypes.c_void_p)
        status = library.emulate(entry, pointers, *(ctypes.c_uint(x) for x in (*grid, *blocks, self.order)))
        assert status == 0, PROBLEMS[status]

    def multiprocessors(self, on: torch.Tensor) -> int:
        return self.processors

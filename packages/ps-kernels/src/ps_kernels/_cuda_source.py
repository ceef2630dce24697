"""Read the CUDA sources as one text each, with their compiler options; this needs no CUDA, CuPy or device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FLOATS, _OUTS = ("float32", "bfloat16", "float16"), ("none", "bfloat16", "float16")
KERNELS = {
    "step": (
        *(f"{kind}_{grad}_{out}" for kind in ("adam", "sgd") for grad in _FLOATS for out in _OUTS),
        *(f"accumulate_{grad}" for grad in _FLOATS),
    ),
    "norm": (*(f"norm{spans}_{kind}" for spans in ("", "_spans") for kind in _FLOATS), "norm_total"),
    "copy": ("copy_pieces",),
    "loss": tuple(f"cross_entropy_{kind}" for kind in _FLOATS),
}
"""Every kernel by its module. Each module is compiled by itself: a run compiles only what it uses."""
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""One rounding an operation, to nearest; denormals kept."""


ONCE = 1 << 20
"""Enough blocks for each multiprocessor that none takes a second turn."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Choose how steps and accumulation read memory; no choice changes a bit. See [Note: tuning] in step.cu."""

    packs: int = 1
    """Groups of four that a thread processes at once."""
    past: int = 0
    """What caches should not keep: 1 reads, 2 writes, 3 both."""
    threads: int = 256
    """Threads of a block."""
    blocks: int = ONCE
    """The most blocks for each multiprocessor; beyond, they take turns."""

    def __str__(self) -> str:
        ways = ("", "reads past caches", "writes past caches", "past caches")
        grid = "each thread once" if self.blocks >= ONCE else f"{self.blocks} blocks"
        words = (f"{4 * self.packs} elements", ways[self.past], f"{self.threads} threads", grid)
        return ", ".join(word for word in words if word)


_MANY = {"packs": 2, "past": 3}
TUNINGS = (
    Tuning(),
    Tuning(blocks=5),
    Tuning(blocks=10),
    Tuning(blocks=64),
    Tuning(past=2),
    Tuning(past=3),
    Tuning(past=3, blocks=64),
    Tuning(packs=2),
    Tuning(packs=2, blocks=64),
    Tuning(**_MANY),
    Tuning(**_MANY, blocks=5),
    Tuning(**_MANY, blocks=64),
    Tuning(**_MANY, threads=128),
    Tuning(packs=4, past=3, threads=128),
)
"""The choices of a benchmark on a device; the first is the default."""

_FOLDER = Path(__file__).parent / "cuda"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


def options(module: str, tuning: Tuning) -> tuple[str, ...]:
    """Return a module's compiler options; none for choices that its source makes by itself."""
    if module != "step":
        return OPTIONS
    chosen = {"PS_PACKS": "packs", "PS_PAST": "past", "PS_STEP_THREADS": "threads"}
    differ = {name: field for name, field in chosen.items() if getattr(tuning, field) != getattr(Tuning(), field)}
    return (*OPTIONS, *(f"-D{name}={getattr(tuning, field)}" for name, field in differ.items()))


def source(module: str) -> str:
    """Return a module's text with its headers included.

    So one text decides what a compiled module is. A cache keyed by the text never serves an old header.
    """
    return _flattened(_FOLDER / f"{module}.cu")


def _flattened(path: Path) -> str:
    return _INCLUDE.sub(lambda found: _flattened(path.parent / found[1]), path.read_text("utf-8"))

"""The CUDA sources as one text each, and how they are compiled; needs no CUDA, no CuPy and no device."""

from __future__ import annotations

import re
from pathlib import Path

_FLOATS, _OUTS = ("float32", "bfloat16", "float16"), ("none", "bfloat16", "float16")
KERNELS = {
    "step": (
        *(f"{kind}_{grad}_{out}" for kind in ("adam", "sgd") for grad in _FLOATS for out in _OUTS),
        *(f"accumulate_{grad}" for grad in _FLOATS),
    ),
    "norm": (*(f"norm_{kind}" for kind in _FLOATS), "norm_total"),
    "copy": ("copy_pieces",),
}
"""Every kernel by its module. Each module is compiled by itself: what a run does not use costs it nothing."""
OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")
"""One rounding an operation, to nearest; denormals kept."""

_FOLDER = Path(__file__).parent / "cuda"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


def source(module: str) -> str:
    """A module's text with its headers written out where they are included.

    So one text decides what a compiled module is, and a cache keyed by the text never serves an old header.
    """
    return _flattened(_FOLDER / f"{module}.cu")


def _flattened(path: Path) -> str:
    return _INCLUDE.sub(lambda found: _flattened(path.parent / found[1]), path.read_text("utf-8"))

"""List the backends, and choose the one for an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from ps_kernels._arithmetic_order import AdamScalars, SgdScalars
from ps_kernels._arrays import Array, shown
from ps_kernels._batch import Batch
from ps_kernels._errors import BackendMissing, InvalidArgument
from ps_kernels._native import LEVELS, native
from ps_kernels._say_once import say_once

_NAMES = ("cuda", "avx512", "avx2", "neon", "scalar", "torch", "numpy")


class Backend(Protocol):
    """Protocol of a backend; its arguments have been checked, and it keeps [Note: order of arithmetic]."""

    def adam(self, states: tuple[Array, Array, Array], grad: Array, out: Array | None, s: AdamScalars) -> None:
        """Make one step on parameter, momentum and variance."""

    def sgd(self, states: tuple[Array, Array | None], grad: Array, out: Array | None, s: SgdScalars) -> None:
        """Make one step on parameter and momentum."""

    def sumsq_finite(self, x: Array, out: Array) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""

    def sumsq_each(self, x: Array, spans: Sequence[tuple[int, int]], out: Array) -> None:
        """Measure each span of ``x`` as `sumsq_finite` does, into its row of ``out``."""

    def accumulate(self, accumulator: Array, grad: Array, scale: float) -> None:
        """Add the scaled gradient."""

    def cross_entropy(
        self, logits: Array, labels: Array, losses: Array, *, ignored: int, factor: float, gradient: bool
    ) -> int:
        """Write each row's loss, and its gradient in place of its logits.

        Return -1; or the first row with a wrong label, with nothing written. The CUDA backend always returns -1, and
        makes that row's loss and gradient nans.
        """

    def copy_all(self, batch: Batch, *, scatter: bool) -> None:
        """Copy the tensors into the chunk, or with ``scatter`` out of it; cast where types differ."""

    def copier(self, batch: Batch, *, scatter: bool) -> Callable[[], None]:
        """Return a call that does what `copy_all` does, prepared once."""

    def set_threads(self, count: int) -> None:
        """Use this number of threads."""


class CpuBackend(Protocol):
    """Protocol of a backend that works on CPU memory."""

    def sum_in_order(self, parts: Sequence[Array], out: Array) -> None:
        """Write the sum of the parts, added in their order in single precision and rounded once."""


def backends() -> dict[str, str]:
    """Return every backend's name, and ``"available"`` or why it is not. Compile the C kernels if necessary."""
    return {name: _state(name) for name in _NAMES}


def _state(name: str) -> str:
    """Return ``"available"``, or why a backend is not; load no library that other backends need."""
    if name == "cuda":
        return _cuda()
    if name in LEVELS:
        level = native()[name]
        return level if isinstance(level, str) else "available"
    return "available" if find_spec(name) is not None else f"{name} is not installed: pip install {name}"


@cache
def _cuda() -> str:
    """Return the state of the CUDA backend, found once a process; load PyTorch only if CuPy is installed too."""
    for library, packages in (("torch", "torch"), ("cupy", "cupy-cuda13x (for CUDA 12 cupy-cuda12x)")):
        if find_spec(library) is None:
            return f"{library} is not installed: pip install {packages}"
    why_not: str | None = import_module("ps_kernels._cuda").why_not()
    return why_not or "available"


def warm() -> list[str]:
    """Compile the CPU's kernels and all kernels for every CUDA device, so that no step has to; return a report."""
    compiled = [level for level, state in native().items() if not isinstance(state, str)]
    lines = [f"compiled C: {', '.join(compiled)}" if compiled else f"no compiled C: {native()['scalar']}"]
    why_not = _cuda()
    if why_not != "available":
        return [*lines, f"no CUDA kernels to compile: {why_not}"]
    more: list[str] = import_module("ps_kernels._cuda").warm()
    return [*lines, *more]


def load(name: str) -> Backend:
    """Return an available backend by its name; load the library that it needs."""
    if name in LEVELS:
        level = native()[name]
        assert not isinstance(level, str), level
        return level
    backend: Backend = import_module(f"ps_kernels._{name}").make_backend()
    return backend


def named(wanted: object) -> str:
    """Return the name of a backend; raise `InvalidArgument` for anything but a text.

    Callers check it before `choose`: that is cached, so what cannot be a key would raise a `TypeError` there. They do
    so only if a backend is given, which saves a call for each kernel of a step.
    """
    if not isinstance(wanted, str):
        raise InvalidArgument(f"backend: expected one of {', '.join(_NAMES)}, or None; found {shown(wanted)}")
    return wanted


@cache
def choose(name: str, library: str, device: str, wanted: str | None) -> Backend:
    """Return the backend for an array: the best one, or the one requested by name. Results are cached."""
    on_cuda = device.startswith("cuda")
    if wanted is None and on_cuda and _cuda() == "available":
        return load("cuda")
    if wanted is None and on_cuda:
        say_once(f"torch does the work on CUDA tensors, several times slower: {_cuda()}")
    if wanted is None:
        return (fastest() if device == "cpu" else None) or load(library)
    if wanted == library:
        return load(wanted)
    if wanted not in _NAMES:
        raise InvalidArgument(f"backend: expected one of {', '.join(_NAMES)}, found {wanted!r}")
    why_not = _state(wanted)
    if why_not != "available":
        raise BackendMissing(f"backend {wanted!r}: {why_not}")
    if (wanted in LEVELS and device == "cpu") or (wanted == "cuda" and on_cuda):
        return load(wanted)
    raise InvalidArgument(f"backend {wanted!r}: cannot work on {name}, which is a {library} array on {device}")


def fastest() -> Backend | None:
    """Return the best compiled level of this processor. If there is none, warn once."""
    for level in native().values():
        if not isinstance(level, str):
            return level
    say_once(f"torch or numpy does the work, several times slower: {native()['scalar']}")
    return None

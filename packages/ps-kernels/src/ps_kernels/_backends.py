"""Which backends there are, and the one that an array goes to."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

from ps_kernels._arrays import Array, View
from ps_kernels._errors import BackendMissing, InvalidArgument
from ps_kernels._order import AdamScalars, SgdScalars

_NOT_BUILT = "not part of this release"
_NAMES = ("cuda", "avx512", "avx2", "neon", "scalar", "torch", "numpy")


class Backend(Protocol):
    """What a backend does; its arguments have been checked, and it keeps [Note: order of arithmetic]."""

    def adam(self, states: tuple[Array, Array, Array], grad: Array, out: Array | None, s: AdamScalars) -> None:
        """One step on parameter, momentum and variance."""

    def sgd(self, states: tuple[Array, Array | None], grad: Array, out: Array | None, s: SgdScalars) -> None:
        """One step on parameter and momentum."""

    def sumsq_finite(self, x: Array, out: Array) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""

    def accumulate(self, accumulator: Array, grad: Array, scale: float) -> None:
        """Add the scaled gradient."""

    def copy(self, into: Array, source: Array) -> None:
        """Copy elements; each side of any shape, both of one length."""

    def set_threads(self, count: int) -> None:
        """Use that many threads."""


def backends() -> dict[str, str]:
    """Every backend's name, and ``"available"`` or why it is not."""
    found = dict.fromkeys(_NAMES, _NOT_BUILT)
    for library in ("torch", "numpy"):
        installed = find_spec(library) is not None
        found[library] = "available" if installed else f"{library} is not installed: pip install ps-kernels[{library}]"
    return found


def load(library: str) -> Backend:
    """The backend that works on a library's arrays; loads the library."""
    backend: Backend = import_module(f"ps_kernels._{library}").make_backend()
    return backend


def choose(like: View, wanted: str | None) -> Backend:
    """The backend for an array, or the one asked for by name."""
    if wanted is None or wanted == like.library:
        return load(like.library)
    why_not = backends().get(wanted)
    if why_not is None:
        raise InvalidArgument(f"backend: expected one of {', '.join(_NAMES)}, found {wanted!r}")
    if why_not != "available":
        raise BackendMissing(f"backend {wanted!r}: {why_not}")
    raise InvalidArgument(f"backend {wanted!r}: cannot work on {like.name}, which is a {like.library} array")

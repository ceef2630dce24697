"""Run the compiled C kernels: one backend for each instruction set, on CPU arrays of either library.

Every level runs the same source and gives the same bits. ctypes releases the interpreter's lock during a call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import chain, compress
from operator import attrgetter, sub
from pathlib import Path
from typing import Any

from ps_kernels._arithmetic_order import BLOCK_NUMEL, AdamScalars, SgdScalars
from ps_kernels._arrays import Array
from ps_kernels._batch import Batch
from ps_kernels._compile import CompileFailed, levels, library

LEVELS = ("avx512", "avx2", "neon", "scalar")
_KINDS = {
    "float32": 0,
    "uint16": 1,
    "float16": 2,
    "torch.float32": 0,
    "torch.bfloat16": 1,
    "torch.float16": 2,
}
_NO_ARRAY = -1
_STREAM_BYTES = 1 << 22
"""From this size on, written bytes leave the cache before they are read, so writes bypass it."""
_COPY_STREAM_BYTES = 1 << 25
"""The same for copies, which read so little that the cache holds more of what they write."""
_NUMEL_PER_THREAD = 1 << 15
"""Fewer elements than this are not worth waking a thread."""


class _AdamScalars(ctypes.Structure):
    _fields_ = [(f"number{index}", ctypes.c_float) for index in range(len(AdamScalars.__dataclass_fields__))]


class _SgdScalars(ctypes.Structure):
    _fields_ = [(f"number{index}", ctypes.c_float) for index in range(len(SgdScalars.__dataclass_fields__))]


_ADAM, _SGD = (attrgetter(*(field.name for field in fields(kind))) for kind in (AdamScalars, SgdScalars))
"""Return all numbers of a step; `dataclasses.astuple` would copy each one deeply."""


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("p", "m", "v", "grad", "out")),
        ("n", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("grad_kind", "out_kind", "stream")),
    )


class _Copies(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "into", "counts")),
        *((name, ctypes.c_size_t) for name in ("length", "total")),
        *((name, ctypes.c_int) for name in ("element_bytes", "from_kind", "to_kind", "stream")),
    )


class _Parts(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("out", ctypes.c_void_p),
        ("n", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("kind", "out_kind")),
    )


class _Losses(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "labels", "losses")),
        *((name, ctypes.c_size_t) for name in ("rows", "columns")),
        ("ignored", ctypes.c_longlong),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("kind", "gradient")),
    )


@dataclass(slots=True, kw_only=True)
class Threads:
    """The number of threads, which all levels share."""

    cores: int
    """Cores that this process may use; 1 if the kernels were compiled without threads."""
    default: int
    """The number of threads while PyTorch is not imported."""
    process: int
    count: int | None = None
    """The number that `set_threads` was called with; None: as many as PyTorch's operators use on the calling thread."""

    def most(self, numel: int) -> int:
        """Return the number of threads for so many elements. It is one in a forked child, which has no pool."""
        if numel < _NUMEL_PER_THREAD or os.getpid() != self.process:
            return 1
        count = self.count
        if count is None:
            torch = sys.modules.get("torch")  # asked each time: a program may import it, and set its number, later
            count = self.default if torch is None else min(self.cores, torch.get_num_threads())
        return min(numel // _NUMEL_PER_THREAD + 1, count)


class NativeBackend:
    """Run the kernels of one instruction set."""

    def __init__(self, functions: ctypes.CDLL, level: str, threads: Threads) -> None:
        self._threads = threads
        self._set_cores = functions.ps_set_cores
        self._call: dict[str, Callable[..., None]] = {}
        for name in ("adam", "sgd", "sumsq", "sumsq_spans", "accumulate", "copy"):
            function = functions[f"ps_{level}_{name}"]
            function.restype = None
            self._call[name] = function
        self._sum_in_order: Callable[..., None] = functions[f"ps_{level}_sum_in_order"]
        functions[f"ps_{level}_sum_in_order"].restype = None
        self._cross_entropy: Callable[..., int] = functions[f"ps_{level}_cross_entropy"]
        functions[f"ps_{level}_cross_entropy"].restype = ctypes.c_longlong

    def adam(self, states: tuple[Array, Array, Array], grad: Array, out: Array | None, s: AdamScalars) -> None:
        """Make one step on parameter, momentum and variance."""
        self._step("adam", _AdamScalars(*_ADAM(s)), states, grad, out)

    def sgd(self, states: tuple[Array, Array | None], grad: Array, out: Array | None, s: SgdScalars) -> None:
        """Make one step on parameter and momentum."""
        self._step("sgd", _SgdScalars(*_SGD(s)), (*states, None), grad, out)

    def _step(
        self, name: str, scalars: ctypes.Structure, states: Sequence[Array | None], grad: Array, out: Array | None
    ) -> None:
        addresses: list[int | None] = []
        for each in (*states, grad, out):  # in line: a call for each would cost more than the kernel for a small group
            if each is None:
                addresses.append(None)
            else:
                addresses.append(each.data_ptr() if hasattr(each, "data_ptr") else each.ctypes.data)
        numel = _numel(grad)
        step = _Step(
            *addresses,
            numel,
            _kind(grad),
            _NO_ARRAY if out is None else _kind(out),
            2 * numel >= _STREAM_BYTES,
        )
        self._call[name](ctypes.byref(scalars), ctypes.byref(step), self._threads.most(numel))

    def sumsq_finite(self, x: Array, out: Array) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""
        numel = _numel(x)
        size = _sums(numel)
        self._call["sumsq"](
            ctypes.c_void_p(_address(x)),
            _kind(x),
            ctypes.c_size_t(numel),
            (ctypes.c_float * size)(),
            ctypes.c_size_t(size),
            ctypes.c_void_p(_address(out)),
            1 if numel < _NUMEL_PER_THREAD else self._threads.most(numel),
        )

    def sumsq_each(self, x: Array, spans: Sequence[tuple[int, int]], out: Array) -> None:
        """Measure each span of ``x`` as `sumsq_finite` does, into its row of ``out``, in one call."""
        places = array("Q", chain.from_iterable(spans))
        longest = max(map(sub, places[1::2], places[::2]), default=0)
        self._call["sumsq_spans"](
            ctypes.c_void_p(_address(x)),
            _kind(x),
            ctypes.c_void_p(places.buffer_info()[0]),
            ctypes.c_size_t(len(spans)),
            (ctypes.c_float * _sums(longest))(),
            ctypes.c_void_p(_address(out)),
            1 if longest < _NUMEL_PER_THREAD else self._threads.most(longest),
            ctypes.c_size_t(_NUMEL_PER_THREAD),
        )

    def accumulate(self, accumulator: Array, grad: Array, scale: float) -> None:
        """Add the scaled gradient."""
        numel = _numel(grad)
        self._call["accumulate"](
            ctypes.c_void_p(_address(accumulator)),
            ctypes.c_void_p(_address(grad)),
            _kind(grad),
            ctypes.c_size_t(numel),
            ctypes.c_float(scale),
            self._threads.most(numel),
        )

    def cross_entropy(
        self, logits: Array, labels: Array, losses: Array, *, ignored: int, factor: float, gradient: bool
    ) -> int:
        """Write each row's loss, and its gradient in place of its logits.

        Return -1; or the first row with a wrong label, with nothing written.
        """
        addresses = (_address(each) for each in (logits, labels, losses))
        told = _Losses(*addresses, *logits.shape, ignored, factor, _kind(logits), gradient)
        return self._cross_entropy(ctypes.byref(told), self._threads.most(_numel(logits)))

    def sum_in_order(self, parts: Sequence[Array], out: Array) -> None:
        """Write the sum of the parts, on the calling thread."""
        addresses = array("Q", map(_address, parts))
        told = _Parts(addresses.buffer_info()[0], len(parts), _address(out), _numel(out), _kind(parts[0]), _kind(out))
        self._sum_in_order(ctypes.byref(told))

    def copy_all(self, batch: Batch, *, scatter: bool) -> None:
        """Copy the tensors into the chunk, or with ``scatter`` out of it, with one call for all of one type."""
        self.copier(batch, scatter=scatter)()

    def copier(self, batch: Batch, *, scatter: bool) -> Callable[[], None]:
        """Return a call that does what `copy_all` does, prepared once."""
        columns = (batch.addresses, batch.places(), batch.numels)
        prepared = []
        for kind in batch.dtypes:
            chosen = (
                columns if len(batch.dtypes) == 1 else _chosen(columns, [each.dtype == kind for each in batch.parts])
            )
            prepared.append(_copies(kind, batch.whole.array.dtype, chosen, scatter=scatter))
        return partial(self._run_copies, prepared, batch)

    def _run_copies(self, prepared: Sequence[tuple[_Copies, object]], _keep: object) -> None:
        """Run the copies; ``_keep`` holds the arrays while their addresses may be used."""
        for copies, _ in prepared:
            self._call["copy"](ctypes.byref(copies), self._threads.most(copies.total))

    def set_threads(self, count: int) -> None:
        """Use this number of threads."""
        self._threads.count = count

    def set_cores(self, cores: Sequence[int]) -> bool:
        """Bind threads to these cores in every level, or unbind them; return True if the system can."""
        return bool(self._set_cores((ctypes.c_int * len(cores))(*cores), len(cores)))


@cache
def native() -> dict[str, NativeBackend | str]:
    """Return every level's backend, or why there is none; the first call loads or makes the library."""
    compiled = levels()
    try:
        functions = _open(library())
    except (CompileFailed, OSError) as error:
        return dict.fromkeys(LEVELS, f"not compiled: {error}")
    cores = _cores() if functions.ps_has_threads() else 1
    threads = Threads(cores=cores, default=min(cores, _default_threads()), process=os.getpid())
    return {
        name: f"not for this kind of processor; compiled are {', '.join(compiled)}"
        if name not in compiled
        else NativeBackend(functions, name, threads)
        if functions[f"ps_has_{name}"]()
        else "this processor does not have it"
        for name in LEVELS
    }


def _open(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _default_threads() -> int:
    """Return the number of cores that this process may use, or ``OMP_NUM_THREADS`` if that is less."""
    cores = _cores()
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores, max(1, int(asked))) if asked.isdigit() else cores


def _chosen(columns: Sequence[Sequence[int]], members: Sequence[bool]) -> tuple[list[int], ...]:
    return tuple(list(compress(column, members)) for column in columns)


def _copies(part: Any, chunk: Any, columns: Sequence[Sequence[int]], *, scatter: bool) -> tuple[_Copies, object]:
    """Return the C function's arguments for parts of one type: addresses, places, lengths; and the lists' holder."""
    held = [array("Q", column) for column in columns]
    parts, places, counts = (column.buffer_info()[0] for column in held)
    total, same = sum(columns[2]), part == chunk
    (source, target), into = ((chunk, part), (places, parts)) if scatter else ((part, chunk), (parts, places))
    copies = _Copies(
        *(*into, counts),
        len(held[0]),
        total,
        source.itemsize if same else 0,
        *((0, 0) if same else (_KINDS[str(source)], _KINDS[str(target)])),
        total * target.itemsize >= _COPY_STREAM_BYTES,
    )
    return copies, held


def _address(array: Array) -> int:
    address: int = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
    return address


def _numel(array: Array) -> int:
    numel: int = array.numel() if hasattr(array, "numel") else array.size
    return numel


def _sums(numel: int) -> int:
    """Return how many sums the halving of all blocks takes: a power of two."""
    return 1 << max(-(-numel // BLOCK_NUMEL) - 1, 0).bit_length()


def _kind(array: Array) -> int:
    return _KINDS[str(array.dtype)]

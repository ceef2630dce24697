"""Define the public functions: each checks its arguments, then calls the backend of the arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from ps_kernels._arithmetic_order import AdamArguments, SgdScalars, to_single
from ps_kernels._arrays import (
    FLOATS,
    Array,
    View,
    check_count,
    check_dtype,
    check_factor,
    check_flat,
    check_number,
    check_numbers,
    check_rows,
    check_spans,
    check_together,
    check_written,
    note_written,
    refuse_flag,
    refuse_uncounted,
    tell_autograd,
    view,
)
from ps_kernels._backends import backends, choose, load, named
from ps_kernels._batch import check_batch
from ps_kernels._errors import BackendMissing, InvalidArgument
from ps_kernels._native import NativeBackend, native

_MOST_THREADS = 4096
"""More than any computer has cores."""


def adam_step(  # noqa: PLR0913 - one name for each of an optimizer's numbers
    param: Array,
    momentum: Array,
    variance: Array,
    grad: Array,
    out: Array | None = None,
    *,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    backend: str | None = None,
) -> None:
    """Make one Adam (``decoupled``: AdamW) step in place; ``step`` counts from 1.

    ``param``, ``momentum`` and ``variance`` are float32. ``grad``, of any float type, is multiplied by ``grad_scale``
    first. ``out``, of any float type, gets a copy of the new parameters, and may be ``grad`` itself.
    """
    check_count("step", step)
    if not isinstance(decoupled, bool):
        refuse_flag("decoupled", decoupled)
    check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
    check_numbers(beta1=beta1, beta2=beta2, below=1.0)
    if grad_scale.__class__ is not float or not -math.inf < grad_scale < math.inf:  # mostly no call
        check_factor("grad_scale", grad_scale)
    arguments = AdamArguments(
        step=step,
        lr=float(lr),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(eps),
        weight_decay=float(weight_decay),
        decoupled=decoupled,
        grad_scale=float(grad_scale),
    )
    states = (view("param", param), view("momentum", momentum), view("variance", variance))
    source, target = view("grad", grad), None if out is None else view("out", out)
    _check_step(states, source, target)
    arrays = (states[0].array, states[1].array, states[2].array)
    chosen = choose(states[0].name, states[0].library, states[0].device, None if backend is None else named(backend))
    chosen.adam(arrays, source.array, target and target.array, arguments.scalars())
    note_written(states if target is None else (*states, target))


def sgd_step(  # noqa: PLR0913 - one name for each of an optimizer's numbers
    param: Array,
    momentum: Array | None,
    grad: Array,
    out: Array | None = None,
    *,
    lr: float,
    momentum_decay: float = 0.0,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    backend: str | None = None,
) -> None:
    """Make one SGD step in place; without ``momentum_decay``, ``momentum`` may be None and is not touched.

    Types are as for :func:`adam_step`. Before the first step the momentum holds zeros.
    """
    scalars = SgdScalars(
        grad_scale=to_single(check_factor("grad_scale", grad_scale)),
        weight_decay=to_single(check_number("weight_decay", weight_decay)),
        momentum_decay=to_single(check_number("momentum_decay", momentum_decay, below=1.0)),
        lr=to_single(check_number("lr", lr)),
    )
    if momentum is None and momentum_decay:
        raise InvalidArgument("momentum: expected an array, because momentum_decay is not zero; found None")
    states = [view("param", param)]
    if momentum is not None:
        states.append(view("momentum", momentum))
    source, target = view("grad", grad), None if out is None else view("out", out)
    _check_step(states, source, target)
    used = states[1].array if momentum_decay else None
    chosen = choose(states[0].name, states[0].library, states[0].device, None if backend is None else named(backend))
    chosen.sgd((states[0].array, used), source.array, target and target.array, scalars)
    changed = states if momentum_decay else states[:1]
    note_written(changed if target is None else [*changed, target])


def sumsq_finite(
    x: Array, out: Array, *, spans: Sequence[tuple[int, int]] | None = None, backend: str | None = None
) -> None:
    """Add ``x``'s sum of squares to ``out[0]``, and set ``out[1]`` to one if any element is not finite.

    ``out`` is two float32 numbers on ``x``'s device; the host waits for nothing. Each of ``spans`` is a first element
    of ``x`` and the one after its last. With ``spans``, ``out`` has a row of two for each.
    """
    source, target = view("x", x), view("out", out)
    check_together((source, target))
    check_dtype([source], FLOATS)
    check_dtype([target], ("float32",))
    numel = source.numel
    check_flat([source], numel)
    check_written([target], [source])
    chosen = choose(source.name, source.library, source.device, None if backend is None else named(backend))
    if spans is None:
        check_flat([target], 2)
        chosen.sumsq_finite(source.array, target.array)
    else:
        pairs = check_spans(spans, numel)
        check_rows(target, len(pairs), 2)
        chosen.sumsq_each(source.array, pairs, target.array)
    note_written([target])


def accumulate(accumulator: Array, grad: Array, *, scale: float = 1.0, backend: str | None = None) -> None:
    """Add ``grad``, of any float type, times ``scale`` to a float32 accumulator."""
    factor = to_single(check_number("scale", scale))
    target, source = view("accumulator", accumulator), view("grad", grad)
    check_together((target, source))
    check_dtype([target], ("float32",))
    check_dtype([source], FLOATS)
    check_flat([target, source], target.numel)
    check_written([target], [source])
    choose(target.name, target.library, target.device, None if backend is None else named(backend)).accumulate(
        target.array, source.array, factor
    )
    note_written([target])


class Pieces:
    """Copy tensors to and from their places in a chunk: checked once, copied any number of times.

    Offsets count the chunk's elements; floats are cast. The arrays must stay at their addresses.
    """

    def __init__(
        self, tensors: Sequence[Array], chunk: Array, offsets: Sequence[int], *, backend: str | None = None
    ) -> None:
        batch = check_batch(tensors, chunk, offsets)
        batch.check_gather()
        batch.check_scatter()
        arrays = (chunk, *tensors)
        self._kept = [each.untyped_storage() if hasattr(each, "untyped_storage") else each for each in arrays]
        """The arrays' storages, kept alive even if an array gets other memory."""
        self._in_torch = batch.whole.library == "torch"
        self._whole, self._parts = [batch.whole.array], batch.parts
        chosen = choose(
            batch.whole.name, batch.whole.library, batch.whole.device, None if backend is None else named(backend)
        )
        self._gather, self._scatter = chosen.copier(batch, scatter=False), chosen.copier(batch, scatter=True)

    def gather(self) -> None:
        """Copy each tensor to its place in the chunk."""
        self._gather()
        if self._in_torch:
            tell_autograd(self._whole)

    def scatter(self) -> None:
        """Copy each tensor's place in the chunk into the tensor."""
        self._scatter()
        if self._in_torch:
            tell_autograd(self._parts)


def gather(tensors: Sequence[Array], chunk: Array, offsets: Sequence[int], *, backend: str | None = None) -> None:
    """Copy each tensor into the chunk at its offset, cast to the chunk's type; offsets count the chunk's elements."""
    batch = check_batch(tensors, chunk, offsets)
    batch.check_gather()
    choose(
        batch.whole.name, batch.whole.library, batch.whole.device, None if backend is None else named(backend)
    ).copy_all(batch, scatter=False)
    note_written([batch.whole])


def scatter(chunk: Array, offsets: Sequence[int], tensors: Sequence[Array], *, backend: str | None = None) -> None:
    """Copy from the chunk at each offset into each tensor, cast to its type; offsets count the chunk's elements."""
    batch = check_batch(tensors, chunk, offsets)
    batch.check_scatter()
    choose(
        batch.whole.name, batch.whole.library, batch.whole.device, None if backend is None else named(backend)
    ).copy_all(batch, scatter=True)
    if batch.whole.library == "torch":
        tell_autograd(batch.parts)


def set_threads(n: int, *, cores: Sequence[int] | None = None) -> None:
    """Set the number of threads of every backend that can use several, and the cores of the compiled ones.

    In PyTorch the number holds for all its work in this process. ``cores`` names one core for each thread, the first
    for the calling thread, which is bound only during a call. Do not call this while another thread is in a call.
    """
    check_count("n", n, _MOST_THREADS)
    _set_cores([] if cores is None else _check_cores(cores, n))
    for name, state in backends().items():
        if state == "available":
            load(name).set_threads(n)


def _check_cores(cores: Sequence[int], count: int) -> list[int]:
    """Return one core for each thread, of those that this process may use."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    if not hasattr(cores, "__len__"):
        refuse_uncounted("cores", cores)
    whole = len(cores) == count and set(map(type, cores)) <= {int}
    if not whole or len(set(cores)) != count or not usable.issuperset(cores):
        raise InvalidArgument(
            f"cores: expected {count} different ones of {sorted(usable)}, one for each thread; found {list(cores)}"
        )
    return list(cores)


def _set_cores(cores: Sequence[int]) -> None:
    levels = [level for level in native().values() if isinstance(level, NativeBackend)]
    if levels and levels[0].set_cores(cores):
        return
    if cores:
        reason = "this system cannot bind threads to cores" if levels else native()["scalar"]
        raise BackendMissing(f"cores: only the compiled backends bind their threads; {reason}")


def _check_step(states: Sequence[View], grad: View, out: View | None) -> None:
    everything = [*states, grad, *([] if out is None else [out])]
    check_together(everything)
    check_dtype(states, ("float32",))
    check_dtype(everything[len(states) :], FLOATS)
    check_flat(everything, states[0].numel)
    if out is None:
        check_written(states, [grad])
    elif out.is_same_as(grad):  # its element is read before the new parameter is written over it
        check_written([*states, out], [])
    else:
        check_written([*states, out], [grad])

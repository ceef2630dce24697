"""Run on NumPy arrays; bfloat16 is stored as uint16. Keeps [Note: order of arithmetic]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from ps_kernels._arithmetic_order import BLOCK_NUMEL, KEPT, LANES, ROWS, AdamScalars, SgdScalars
from ps_kernels._arrays import Array
from ps_kernels._batch import Batch
from ps_kernels._numpy_loss import cross_entropy
from ps_kernels._numpy_types import Singles, round_into, to_singles

_PIECE_NUMEL = 1 << 15
"""Elements worked on at a time: five arrays of these fit in a core's second-level cache."""


def fused(a: Singles, b: Singles | float, c: Singles) -> Singles:
    """Return ``a * b + c`` rounded once; a number ``b`` is a single. [Note: fused in double] in step.h says how.

    A result that needs more care lies halfway between two singles, so its last 28 bits are zeros.
    """
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.int64)
    near = np.flatnonzero((bits & 0xFFFFFFF) == 0)
    if near.size:
        exact, rounded = product[near], total[near]
        back = rounded - exact
        error = (exact - (rounded - back)) + (c[near] - back)
        bits[near] += np.where((error > 0) | (error < 0), np.where((error > 0) == (rounded > 0), 1, -1), 0)
    singles: Singles = total.astype(np.float32)
    return singles


class NumpyBackend:
    """Run in one thread, in pieces that stay in the cache."""

    def adam(self, states: tuple[Array, Array, Array], grad: Array, out: Array | None, s: AdamScalars) -> None:
        """Make one step on parameter, momentum and variance."""
        for piece in _pieces(grad.size):
            with np.errstate(all="ignore"):
                p, m, v = (state[piece] for state in states)
                g = to_singles(grad[piece])
                g *= np.float32(s.grad_scale)
                if s.coupled_decay:
                    g = fused(p, s.coupled_decay, g)
                if s.decay_factor != 1:
                    p *= np.float32(s.decay_factor)
                m[...] = fused(g - m, s.lerp, g if s.lerp_from_grad else m)
                v *= np.float32(s.beta2)
                v[...] = fused(g * np.float32(s.one_minus_beta2), g, v)
                denominator = np.sqrt(v)
                denominator /= np.float32(s.sqrt_bc2)
                denominator += np.float32(s.eps)
                p -= m * np.float32(s.step_size) / denominator
                if out is not None:
                    round_into(out[piece], p)

    def sgd(self, states: tuple[Array, Array | None], grad: Array, out: Array | None, s: SgdScalars) -> None:
        """Make one step on parameter and momentum."""
        param, momentum = states
        for piece in _pieces(grad.size):
            with np.errstate(all="ignore"):
                p, g = param[piece], to_singles(grad[piece])
                g *= np.float32(s.grad_scale)
                if s.weight_decay:
                    g = fused(p, s.weight_decay, g)
                if momentum is not None:
                    m = momentum[piece]
                    m *= np.float32(s.momentum_decay)
                    m += g
                    g = m
                p[...] = fused(g, -s.lr, p)
                if out is not None:
                    round_into(out[piece], p)

    def sumsq_finite(self, x: Array, out: Array) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""
        sums = np.zeros(-(-x.size // BLOCK_NUMEL), np.float32)
        with np.errstate(all="ignore"):
            for index, start in enumerate(range(0, x.size, BLOCK_NUMEL)):
                values = to_singles(x[start : start + BLOCK_NUMEL])
                if not np.isfinite(values).all():
                    out[1] = 1
                values *= values
                sums[index] = _block_sum(values)
            out[:1] += _fold(sums)

    def sumsq_each(self, x: Array, spans: Sequence[tuple[int, int]], out: Array) -> None:
        """Measure each span of ``x`` as `sumsq_finite` does, into its row of ``out``."""
        for row, (start, stop) in enumerate(spans):
            self.sumsq_finite(x[start:stop], out[row])

    def accumulate(self, accumulator: Array, grad: Array, scale: float) -> None:
        """Add the scaled gradient."""
        for piece in _pieces(grad.size):
            with np.errstate(all="ignore"):
                g = to_singles(grad[piece])
                g *= np.float32(scale)
                target = accumulator[piece]
                target += g

    def sum_in_order(self, parts: Sequence[Array], out: Array) -> None:
        """Write the sum of the parts."""
        for piece in _pieces(out.size):
            with np.errstate(all="ignore"):
                total = to_singles(parts[0][piece])
                for part in parts[1:]:
                    total += to_singles(part[piece])
                round_into(out[piece], total)

    def cross_entropy(
        self, logits: Array, labels: Array, losses: Array, *, ignored: int, factor: float, gradient: bool
    ) -> int:
        """Write each row's loss, and its gradient in place of its logits.

        Return -1; or the first row with a wrong label, with nothing written.
        """
        return cross_entropy(logits, labels, losses, ignored=ignored, factor=factor, gradient=gradient)

    def copy_all(self, batch: Batch, *, scatter: bool) -> None:
        """Copy the tensors into the chunk, or with ``scatter`` out of it."""
        for into, source in batch.pairs(scatter=scatter):
            target, values = into.reshape(-1), source.reshape(-1)
            if into.dtype == source.dtype:
                target[...] = values
                continue
            with np.errstate(over="ignore"):
                round_into(target, to_singles(values))

    def copier(self, batch: Batch, *, scatter: bool) -> Callable[[], None]:
        """Return a call that does what `copy_all` does."""
        return partial(self.copy_all, batch, scatter=scatter)

    def set_threads(self, count: int) -> None:
        """Do nothing: NumPy's elementwise work always uses one thread."""


def make_backend() -> NumpyBackend:
    """Return the backend of this module."""
    return NumpyBackend()


def _pieces(numel: int) -> Iterator[slice]:
    return (slice(start, start + _PIECE_NUMEL) for start in range(0, numel, _PIECE_NUMEL))


def _block_sum(squares: Singles) -> np.float32:
    """Return the sum of a block, or of a shorter last one, whose missing zeros change nothing."""
    padded = np.zeros(-(-squares.size // (ROWS * LANES)) * ROWS * LANES, np.float32)
    padded[: squares.size] = squares
    groups = padded.reshape(-1, ROWS, LANES)
    sums = groups[:, 0].copy()
    for row in range(1, ROWS):
        sums += groups[:, row]
    while sums.shape[1] > KEPT:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return _fold(sums.reshape(-1))


def _fold(values: Singles) -> np.float32:
    """Return the sum by halving: zeros up to a power of two change nothing, so any number is allowed."""
    size = 1 << max(values.size - 1, 0).bit_length()
    folded = np.zeros(size, np.float32)
    folded[: values.size] = values
    while folded.size > 1:
        half = folded.size // 2
        folded = folded[:half] + folded[half:]
    return np.float32(folded[0])

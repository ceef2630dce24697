"""Run on PyTorch tensors, on any device that PyTorch knows. Keeps [Note: order of arithmetic].

Only operations that round once are used: no ``addcmul``, no ``add`` with ``alpha``, which may be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ps_kernels._arithmetic_order import BLOCK_NUMEL, KEPT, LANES, ROWS, AdamScalars, SgdScalars
from ps_kernels._batch import Batch
from ps_kernels._torch_loss import cross_entropy

_CPU_PIECE_NUMEL = 1 << 17
"""Elements worked on at a time: small enough for the cache, large enough for PyTorch to share among its threads."""
_DEVICE_PIECE_NUMEL = 1 << 24
"""Away from the CPU a launch costs more than the cache saves."""


class TorchBackend:
    """Run on the current stream of the tensors' device, in pieces."""

    def __init__(self, root: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._root = root

    @torch.no_grad()
    def adam(self, states: tuple[Tensor, Tensor, Tensor], grad: Tensor, out: Tensor | None, s: AdamScalars) -> None:
        """Make one step on parameter, momentum and variance."""
        param, momentum, variance = states
        sqrt_bc2 = _divisor(s.sqrt_bc2, param)
        for piece, g, scratch in _pieces(param):
            p, m, v = param[piece], momentum[piece], variance[piece]
            g.copy_(grad[piece]).mul_(s.grad_scale)
            if s.coupled_decay:
                g.copy_(fused(p, s.coupled_decay, g))
            if s.decay_factor != 1:
                p.mul_(s.decay_factor)
            m.copy_(fused(torch.sub(g, m, out=scratch), s.lerp, g if s.lerp_from_grad else m))
            v.copy_(fused(torch.mul(g, s.one_minus_beta2, out=scratch), g, v.mul_(s.beta2)))
            self._root(v, scratch).div_(sqrt_bc2).add_(s.eps)
            p.sub_(torch.mul(m, s.step_size, out=g).div_(scratch))
            if out is not None:
                out[piece].copy_(p)

    @torch.no_grad()
    def sgd(self, states: tuple[Tensor, Tensor | None], grad: Tensor, out: Tensor | None, s: SgdScalars) -> None:
        """Make one step on parameter and momentum."""
        param, momentum = states
        for piece, g, _ in _pieces(param):
            p = param[piece]
            g.copy_(grad[piece]).mul_(s.grad_scale)
            if s.weight_decay:
                g.copy_(fused(p, s.weight_decay, g))
            update = g if momentum is None else momentum[piece].mul_(s.momentum_decay).add_(g)
            p.copy_(fused(update, -s.lr, p))
            if out is not None:
                out[piece].copy_(p)

    @torch.no_grad()
    def sumsq_finite(self, x: Tensor, out: Tensor) -> None:
        """Add the sum of squares to ``out[0]``; set ``out[1]`` to one if anything is not finite."""
        numel = x.numel()
        sums = torch.zeros(-(-numel // BLOCK_NUMEL), dtype=torch.float32, device=x.device)
        at_once = BLOCK_NUMEL * (2 if x.device.type == "cpu" else 256)
        for start in range(0, numel, at_once):
            values = x[start : start + at_once].to(torch.float32)
            torch.maximum(out[1], torch.isfinite(values).all().logical_not(), out=out[1])
            blocks = torch.zeros(-(-values.numel() // BLOCK_NUMEL), BLOCK_NUMEL, dtype=torch.float32, device=x.device)
            torch.mul(values, values, out=blocks.view(-1)[: values.numel()])
            first = start // BLOCK_NUMEL
            sums[first : first + len(blocks)] = _block_sums(blocks)
        size = 1 << max(len(sums) - 1, 0).bit_length()
        padded = torch.zeros(1, size, dtype=torch.float32, device=x.device)
        padded[0, : len(sums)] = sums
        out[:1].add_(_fold(padded)[0])

    def sumsq_each(self, x: Tensor, spans: Sequence[tuple[int, int]], out: Tensor) -> None:
        """Measure each span of ``x`` as `sumsq_finite` does, into its row of ``out``."""
        for row, (start, stop) in enumerate(spans):
            self.sumsq_finite(x[start:stop], out[row])

    @torch.no_grad()
    def accumulate(self, accumulator: Tensor, grad: Tensor, scale: float) -> None:
        """Add the scaled gradient."""
        for piece, g, _ in _pieces(accumulator):
            accumulator[piece].add_(g.copy_(grad[piece]).mul_(scale))

    @torch.no_grad()
    def sum_in_order(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Write the sum of the parts."""
        for piece, total, other in _pieces(out):
            total.copy_(parts[0][piece])
            for part in parts[1:]:
                total.add_(other.copy_(part[piece]))
            out[piece].copy_(total)

    @torch.no_grad()
    def cross_entropy(
        self, logits: Tensor, labels: Tensor, losses: Tensor, *, ignored: int, factor: float, gradient: bool
    ) -> int:
        """Write each row's loss, and its gradient in place of its logits.

        Return -1; or the first row with a wrong label, with nothing written.
        """
        return cross_entropy(logits, labels, losses, ignored=ignored, factor=factor, gradient=gradient)

    @torch.no_grad()
    def copy_all(self, batch: Batch, *, scatter: bool) -> None:
        """Copy the tensors into the chunk, or with ``scatter`` out of it."""
        for into, source in batch.pairs(scatter=scatter):
            into.view(-1).copy_(source.view(-1))

    def copier(self, batch: Batch, *, scatter: bool) -> Callable[[], None]:
        """Return a call that does what `copy_all` does."""
        return partial(self.copy_all, batch, scatter=scatter)

    def set_threads(self, count: int) -> None:
        """Use this number of threads."""
        torch.set_num_threads(count)


def make_backend() -> TorchBackend:
    """Return the backend of this module."""
    return TorchBackend(double_root if find_spec("numpy") is None else numpy_root)


def _divisor(value: float, like: Tensor) -> Tensor:
    """Return a tensor to divide by: on CUDA, division by a number multiplies by its rounded reciprocal."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


def fused(a: Tensor, b: Tensor | float, c: Tensor) -> Tensor:
    """Return ``a * b + c`` rounded once; a number ``b`` is a single. [Note: fused in double] in step.h says how.

    PyTorch's own ``lerp`` and ``addcmul`` fuse on some processors, in some places of an array.
    """
    product = a.double().mul_(b)
    total = product + c
    bits = total.view(torch.int64)
    if not total.is_cpu:  # the host waits for nothing, so every element is looked into
        bits.add_(_moves(product, total, c))
        return total.to(torch.float32)
    near = (bits & 0xFFFFFFF).eq_(0).nonzero().squeeze(1)
    if near.numel():
        bits[near] += _moves(product[near], total[near], c[near])
    return total.to(torch.float32)


def _moves(product: Tensor, total: Tensor, c: Tensor) -> Tensor:
    """Return by how many bits each even and inexact sum must move towards the exact one."""
    back = total - product
    error = (product - (total - back)).add_(c - back)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return towards.mul_(((error > 0) | (error < 0)) & (total.view(torch.int64) & 1 == 0))


def double_root(x: Tensor, out: Tensor) -> Tensor:
    """Return the square root, rounded correctly.

    On the CPU PyTorch computes single-precision roots by a vector library, which errs by a bit in one of five. A
    double-precision root is right to a bit of its own, and always rounds to the right single.
    """
    return out.copy_(x.to(torch.float64).sqrt_()) if x.device.type == "cpu" else torch.sqrt(x, out=out)


def numpy_root(x: Tensor, out: Tensor) -> Tensor:
    """Return the same bits as `double_root`, several times faster, if NumPy is installed."""
    if x.device.type != "cpu":
        return torch.sqrt(x, out=out)
    import numpy as np

    with np.errstate(invalid="ignore"):
        np.sqrt(x.numpy(), out=out.numpy())
    return out


def _pieces(like: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each piece of a tensor, with two float32 work spaces of its length."""
    numel = like.numel()
    most = min(numel, _CPU_PIECE_NUMEL if like.device.type == "cpu" else _DEVICE_PIECE_NUMEL)
    spaces = torch.empty(2, most, dtype=torch.float32, device=like.device)
    for start in range(0, numel, max(most, 1)):
        count = min(most, numel - start)
        yield slice(start, start + count), spaces[0, :count], spaces[1, :count]


def _block_sums(blocks: Tensor) -> Tensor:
    """Return the sum of each block."""
    groups = blocks.view(-1, ROWS, LANES)
    sums = groups[:, 0].clone()
    for row in range(1, ROWS):
        sums += groups[:, row]
    return _fold(_fold(sums, KEPT).view(len(blocks), -1))[:, 0]


def _fold(rows: Tensor, left: int = 1) -> Tensor:
    """Halve each row, whose length is a power of two, by adding until ``left`` numbers are left."""
    while rows.shape[1] > left:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows

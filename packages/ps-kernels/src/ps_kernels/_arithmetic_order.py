"""Define the order of the arithmetic, which every backend keeps so that all give the same bits.

[Note: order of arithmetic]
Each ``*``, ``+``, ``-``, ``/``, ``sqrt`` and ``fma`` is one IEEE operation, in single precision, rounded to nearest
even. ``fma(a, b, c)`` is a * b + c rounded once, and nothing else is fused. Constants are computed in double precision
from the arguments and rounded to single once, here.

    Adam   g = float32(grad) * grad_scale
           g = fma(weight_decay, p, g)              only if not decoupled and weight_decay != 0
           p = p * (1 - lr * weight_decay)          only if decoupled and weight_decay != 0
           m = fma(1 - beta1, g - m, m)             for 1 - beta1 of a half or more: fma((1 - beta1) - 1, g - m, g)
           v = fma((1 - beta2) * g, g, beta2 * v)
           p = p - (step_size * m) / (sqrt(v) / sqrt_bc2 + eps)
           with step_size = lr / (1 - beta1**step) and sqrt_bc2 = sqrt(1 - beta2**step)

    SGD    g = float32(grad) * grad_scale
           g = fma(weight_decay, p, g)              only if weight_decay != 0
           m = momentum_decay * m + g               only with momentum; then g = m
           p = fma(-lr, g, p)

These are the operations of ``torch.optim``'s fused Adam and AdamW, and of its SGD. Where PyTorch is compiled for
processors with AVX2 or AVX-512, the results are the same bits.

    accumulate    a = a + float32(grad) * scale

    sum of squares    x * x, padded with zeros to blocks of BLOCK_NUMEL. A block is GROUPS groups of ROWS rows of LANES
                      elements. In each group the rows are added to the first, one after another; then the upper half
                      of the sums is added to the lower until KEPT are left. The groups' sums, GROUPS * KEPT numbers,
                      are halved in the same way until one is left, and so are the blocks' numbers, padded with zeros
                      to a power of two; what is left is added to the running sum

The 16-bit copy is the new p rounded to nearest even.

    cross entropy     of a row: e = exp(x - largest), written out in loss.h, from the constants below. Zeros fill up its
                      last POWER_LANES powers; POWER_ROWS such rows of powers are added one after another, what they
                      come to is added to the sums, and the sums are halved until one is left. Then
                      loss = log(sum) + (largest - right), in double precision (loss.h), rounded to single once
                      gradient = (e * (1 / sum) - target) * factor, with a target of 1 for the right logit, 0 for others
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache

BLOCK_NUMEL = 1 << 16
"""Number of elements that are summed as one block."""
GROUPS, ROWS, LANES, KEPT = 16, 16, 256, 16
"""The shape of a block; as in loops.c and norm.cu."""
POWER_ROWS, POWER_LANES = 64, 64
"""The shape of a cross entropy's sums; as in losses.h."""


def to_single(value: float) -> float:
    """Return the single-precision number nearest to ``value``; too large becomes infinite."""
    return ctypes.c_float(value).value


EXP_LEAST = -87.0
"""The least exponent: below it a power is zero."""
LOG2_OF_E, ROUNDER = to_single(1.44269504089), 12582912.0
LOG_OF_2 = (0.693359375, to_single(-2.12194440e-4))
"""The logarithm of 2 in two parts: integers times the first are exact."""
EXP_TERMS = tuple(
    map(
        to_single,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
)
"""Coefficients of the polynomial, highest power first; its last two terms are the number itself and one."""
LOG_TERMS = tuple(1 / odd for odd in range(19, 0, -2))
"""Coefficients of the logarithm's series, in double precision, highest power first."""
DOUBLE_LOG_OF_2, ROOT_OF_2 = 0.6931471805599453, 1.4142135623730951


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScalars:
    """The constants of one Adam step, each already a single-precision number."""

    grad_scale: float
    coupled_decay: float
    decay_factor: float
    lerp: float
    lerp_from_grad: float
    """One if the momentum is computed from the gradient, zero if from the old momentum: the nearer one is used."""
    beta2: float
    one_minus_beta2: float
    sqrt_bc2: float
    eps: float
    step_size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamArguments:
    """The arguments of an Adam step, in double precision."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float

    @lru_cache(maxsize=16)  # noqa: B019 - numbers alone, and few: a step asks for the same ones for every group
    def scalars(self) -> AdamScalars:
        """Return the constants of this step, rounded once."""
        gain = to_single(1 - self.beta1)
        from_grad = gain >= 0.5
        return AdamScalars(
            grad_scale=to_single(self.grad_scale),
            coupled_decay=0.0 if self.decoupled else to_single(self.weight_decay),
            decay_factor=to_single(1 - self.lr * self.weight_decay) if self.decoupled else 1.0,
            lerp=gain - 1 if from_grad else gain,  # exact
            lerp_from_grad=float(from_grad),
            beta2=to_single(self.beta2),
            one_minus_beta2=to_single(1 - self.beta2),
            sqrt_bc2=to_single(math.sqrt(1 - self.beta2**self.step)),
            eps=to_single(self.eps),
            step_size=to_single(self.lr / (1 - self.beta1**self.step)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdScalars:
    """The constants of one SGD step, each already a single-precision number."""

    grad_scale: float
    weight_decay: float
    momentum_decay: float
    lr: float

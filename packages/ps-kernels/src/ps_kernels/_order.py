"""The order of the arithmetic, which every backend keeps so that all give the same bits.

[Note: order of arithmetic]
Every ``*``, ``+``, ``-``, ``/`` and ``sqrt`` below is one IEEE single-precision operation, rounded to nearest even; no
two are fused. Constants are computed in double precision from the arguments and rounded to single once, here.

    Adam   g = float32(grad) * grad_scale
           g = g + weight_decay * p                 only if not decoupled and weight_decay != 0
           p = p * (1 - lr * weight_decay)          only if decoupled and weight_decay != 0
           m = beta1 * m + (1 - beta1) * g
           v = beta2 * v + ((1 - beta2) * g) * g
           p = p - step_size * (m / (sqrt(v) / sqrt_bc2 + eps))
           with step_size = lr / (1 - beta1**step) and sqrt_bc2 = sqrt(1 - beta2**step)

    SGD    g = float32(grad) * grad_scale
           g = g + weight_decay * p                 only if weight_decay != 0
           m = momentum_decay * m + g               only with momentum; then g = m
           p = p - lr * g

    accumulate    a = a + float32(grad) * scale

    sum of squares    x * x, padded with zeros to blocks of BLOCK_NUMEL; in each block the upper half is added to the
                      lower until one number is left; those numbers are summed in the same way, until one is left;
                      that is added to the running sum

The 16-bit copy is the new p rounded to nearest even.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

BLOCK_NUMEL = 1 << 16
"""Elements summed as one block; a power of two."""


def to_single(value: float) -> float:
    """The single-precision number nearest to ``value``; too large becomes infinite."""
    return ctypes.c_float(value).value


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScalars:
    """The constants of one Adam step, each already a single-precision number."""

    grad_scale: float
    coupled_decay: float
    decay_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    sqrt_bc2: float
    eps: float
    step_size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamArguments:
    """What a caller of Adam chose, in double precision."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float

    def scalars(self) -> AdamScalars:
        """The constants of this step, rounded once."""
        return AdamScalars(
            grad_scale=to_single(self.grad_scale),
            coupled_decay=0.0 if self.decoupled else to_single(self.weight_decay),
            decay_factor=to_single(1 - self.lr * self.weight_decay) if self.decoupled else 1.0,
            beta1=to_single(self.beta1),
            one_minus_beta1=to_single(1 - self.beta1),
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

"""Step an optimizer in single precision, in one fixed order of operations that every backend follows.

[Note: order of operations]
Each operation's result is rounded to single. fma(a, b, c) is a * b + c rounded once. Constants are computed in double
and rounded once.

    g     = grad * grad_scale
    g     = fma(weight_decay, p, g)                     (weight decay that is not decoupled)
    p     = p * (1 - lr * weight_decay)                 (decoupled weight decay)
    Adam  m = fma(1 - beta1, g - m, m)                  (1 - beta1 >= 1/2: fma((1 - beta1) - 1, g - m, g))
          v = fma((1 - beta2) * g, g, beta2 * v)
          p = p - ((lr / bias1) * m) / (sqrt(v) / sqrt(bias2) + eps)      bias = 1 - beta ** step
    SGD   m = momentum * m + g
          p = fma(-lr, m, p)          (fma(-lr, g, p) without momentum)

These are PyTorch's operations where it is compiled for AVX2 or AVX-512; there the results are the same bits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from itertools import repeat

from ps_core._errors import InvalidInput
from ps_core._options import SGD, Adam, AdamW, Optimizer
from ps_core._reference.floats import Floats, add, quotient, root, single


def step_run(
    optimizer: Optimizer, step: int, grad_scale: float, p: Floats, m: Floats, v: Floats, grad: Floats
) -> tuple[Floats, Floats, Floats]:
    """Step a run of elements (``step`` counts from 1); return the new parameters, momenta and variances."""
    if step < 1:
        raise InvalidInput(f"optimizer steps are counted from 1, found {step}")
    lr, decay = optimizer.lr, optimizer.weight_decay
    factor = single(grad_scale)
    g = _f32(x * factor for x in grad)
    if isinstance(optimizer, AdamW):
        keep = single(1 - lr * decay)
        p = _f32(x * keep for x in p) if decay else p
    elif single(decay):
        g = _fused(p, repeat(single(decay), len(p)), g)
    if isinstance(optimizer, SGD):
        return (*_sgd(optimizer, p, m, g), v)
    return _adam(optimizer, step, p, m, v, g)


def step_one(
    optimizer: Optimizer, step: int, grad_scale: float, p: float, m: float, v: float, grad: float
) -> tuple[float, float, float]:
    """Step one element."""
    runs = step_run(optimizer, step, grad_scale, *(array("f", (x,)) for x in (p, m, v, grad)))
    return runs[0][0], runs[1][0], runs[2][0]


def _f32(values: Iterable[float]) -> Floats:
    return array("f", list(values))


def multiply_add(a: float, b: float, c: float) -> float:
    """Return ``a * b + c`` of singles as a double that rounds to the single nearest to the exact value.

    The product is exact and the sum is rounded to odd. An inexact, even sum is moved by one bit towards the exact
    value. So it never appears to lie halfway between two singles when it does not. [Note: rounding twice] explains the
    rest.
    """
    product = a * b
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    if error and not math.isnan(error) and int(math.frexp(total)[0] * 2.0**53) % 2 == 0:
        return math.nextafter(total, math.copysign(math.inf, error))
    return total


def _fused(a: Iterable[float], b: Iterable[float], c: Iterable[float]) -> Floats:
    return _f32(map(multiply_add, a, b, c))


def _adam(
    optimizer: Adam | AdamW, step: int, p: Floats, m: Floats, v: Floats, g: Floats
) -> tuple[Floats, Floats, Floats]:
    beta1, beta2 = optimizer.betas
    gain1, keep2, gain2 = single(1 - beta1), single(beta2), single(1 - beta2)
    root_bias2 = single(math.sqrt(1 - beta2**step))
    eps, step_size = single(optimizer.eps), single(optimizer.lr / (1 - beta1**step))
    apart = _f32(a - b for a, b in zip(g, m, strict=True))
    near, lerp = (m, gain1) if gain1 < 0.5 else (g, gain1 - 1)
    m = _fused(apart, repeat(lerp, len(m)), near)
    v = _fused(_f32(gain2 * x for x in g), g, _f32(keep2 * x for x in v))
    roots = _f32(map(root, v))
    corrected = _f32(x / root_bias2 for x in roots)
    denominators = _f32(x + eps for x in corrected)
    moves = _f32(map(quotient, _f32(step_size * x for x in m), denominators))
    return _f32(a - b for a, b in zip(p, moves, strict=True)), m, v


def _sgd(optimizer: SGD, p: Floats, m: Floats, g: Floats) -> tuple[Floats, Floats]:
    down, momentum = repeat(-single(optimizer.lr), len(p)), single(optimizer.momentum)
    if optimizer.momentum:
        g = m = add(_f32(momentum * x for x in m), g)
    return _fused(g, down, p), m

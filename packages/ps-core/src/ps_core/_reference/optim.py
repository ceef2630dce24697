"""Optimizer steps in single precision, in one fixed order of operations that every backend follows.

[Note: order of operations]
Everything is rounded to single after each operation. Constants are computed in double and rounded once.

    g     = grad * grad_scale
    g     = g + weight_decay * p                        (weight decay that is not decoupled)
    p     = p * (1 - lr * weight_decay)                 (decoupled weight decay)
    Adam  m = beta1 * m + (1 - beta1) * g
          v = beta2 * v + ((1 - beta2) * g) * g
          p = p - (lr / bias1) * (m / (sqrt(v) / sqrt(bias2) + eps))      bias = 1 - beta ** step
    SGD   m = momentum * m + g
          p = p - lr * m              (p - lr * g without momentum)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

from ps_core._errors import InvalidInput
from ps_core._options import SGD, Adam, AdamW, Optimizer
from ps_core._reference.floats import Floats, quotient, root, single


def step_run(
    optimizer: Optimizer, step: int, grad_scale: float, p: Floats, m: Floats, v: Floats, grad: Floats
) -> tuple[Floats, Floats, Floats]:
    """One step (counted from 1) of a run of elements: the new parameters, momenta and variances."""
    if step < 1:
        raise InvalidInput(f"optimizer steps are counted from 1, found {step}")
    lr, decay = optimizer.lr, optimizer.weight_decay
    factor = single(grad_scale)
    g = _f32(x * factor for x in grad)
    if isinstance(optimizer, AdamW):
        keep = single(1 - lr * decay)
        p = _f32(x * keep for x in p) if decay else p
    elif decay:
        factor = single(decay)
        g = _sum(g, _f32(x * factor for x in p))
    if isinstance(optimizer, SGD):
        return (*_sgd(optimizer, p, m, g), v)
    return _adam(optimizer, step, p, m, v, g)


def step_one(
    optimizer: Optimizer, step: int, grad_scale: float, p: float, m: float, v: float, grad: float
) -> tuple[float, float, float]:
    """One step of one element."""
    runs = step_run(optimizer, step, grad_scale, *(array("f", (x,)) for x in (p, m, v, grad)))
    return runs[0][0], runs[1][0], runs[2][0]


def _f32(values: Iterable[float]) -> Floats:
    return array("f", list(values))


def _sum(left: Floats, right: Floats) -> Floats:
    return _f32(a + b for a, b in zip(left, right, strict=True))


def _descend(p: Floats, step_size: float, direction: Floats) -> Floats:
    moves = _f32(step_size * x for x in direction)
    return _f32(a - b for a, b in zip(p, moves, strict=True))


def _adam(
    optimizer: Adam | AdamW, step: int, p: Floats, m: Floats, v: Floats, g: Floats
) -> tuple[Floats, Floats, Floats]:
    beta1, beta2 = optimizer.betas
    keep1, gain1, keep2, gain2 = single(beta1), single(1 - beta1), single(beta2), single(1 - beta2)
    root_bias2 = single(math.sqrt(1 - beta2**step))
    eps, step_size = single(optimizer.eps), single(optimizer.lr / (1 - beta1**step))
    m = _sum(_f32(keep1 * x for x in m), _f32(gain1 * x for x in g))
    gained = _f32(gain2 * x for x in g)
    v = _sum(_f32(keep2 * x for x in v), _f32(a * b for a, b in zip(gained, g, strict=True)))
    roots = _f32(map(root, v))
    corrected = _f32(x / root_bias2 for x in roots)
    denominators = _f32(x + eps for x in corrected)
    return _descend(p, step_size, _f32(map(quotient, m, denominators))), m, v


def _sgd(optimizer: SGD, p: Floats, m: Floats, g: Floats) -> tuple[Floats, Floats]:
    lr, momentum = single(optimizer.lr), single(optimizer.momentum)
    if not optimizer.momentum:
        return _descend(p, lr, g), m
    m = _sum(_f32(momentum * x for x in m), g)
    return _descend(p, lr, m), m

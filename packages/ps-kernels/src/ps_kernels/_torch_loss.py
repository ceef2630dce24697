"""Compute the cross entropy of PyTorch tensors. Keeps [Note: order of arithmetic]; the formulas are loss.h's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ps_kernels._arithmetic_order import (
    DOUBLE_LOG_OF_2,
    EXP_LEAST,
    EXP_TERMS,
    LOG2_OF_E,
    LOG_OF_2,
    LOG_TERMS,
    POWER_LANES,
    POWER_ROWS,
    ROOT_OF_2,
    ROUNDER,
)

_PIECE_NUMEL = 1 << 18
"""Logits worked on at a time."""


def cross_entropy(
    logits: Tensor, labels: Tensor, losses: Tensor, *, ignored: int, factor: float, gradient: bool
) -> int:
    """Write each row's loss, and its gradient in place of its logits.

    Return -1; or the first row with a wrong label, with nothing written.
    """
    counts = labels != ignored
    wrong = (counts & ((labels < 0) | (labels >= logits.shape[1]))).nonzero()
    if len(wrong):
        return int(wrong[0])
    places = labels.where(counts, 0)[:, None]
    at_once = max(1, _PIECE_NUMEL // logits.shape[1])
    for start in range(0, len(labels), at_once):
        piece = slice(start, start + at_once)
        x = logits[piece].float()
        largest = x.amax(1, keepdim=True)
        powers = exponential(x - largest)
        sums = _sums(powers)
        right = largest.double() - x.gather(1, places[piece])
        losses[piece] = (logarithm(sums) + right)[:, 0].where(counts[piece], 0.0)
        if gradient:
            powers *= torch.ones_like(sums) / sums
            powers.scatter_(1, places[piece], powers.gather(1, places[piece]) - 1)
            logits[piece] = powers.mul_(factor).masked_fill_(~counts[piece, None], 0.0)
    return -1


def exponential(x: Tensor) -> Tensor:
    """Return the exponentials of numbers of at most zero."""
    shifted = (x * LOG2_OF_E).add_(ROUNDER)
    whole = shifted - ROUNDER
    rest = (x - whole * LOG_OF_2[0]).sub_(whole * LOG_OF_2[1])
    y = torch.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y.mul_(rest).add_(term)
    y.mul_(rest * rest).add_(rest).add_(1.0)
    # The whole number's bits stand in the last of `shifted`; where that overflows the result is a nan or not used.
    scale = (shifted.view(torch.int32) << 23) + 0x3F800000
    return y.mul_(scale.view(torch.float32)).masked_fill_(x < EXP_LEAST, 0.0)


def logarithm(x: Tensor) -> Tensor:
    """Return the logarithms of numbers of at least one."""
    fraction, exponent = torch.frexp(x)
    m = fraction.double() * 2
    more = m > ROOT_OF_2
    m = torch.where(more, m * 0.5, m)
    t = (m - 1) / (m + 1)
    square = t * t
    y = torch.full_like(t, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        y.mul_(square).add_(term)
    return (exponent - 1 + more.int()).double() * DOUBLE_LOG_OF_2 + 2 * t * y


def _sums(powers: Tensor) -> Tensor:
    """Return the sum of each row."""
    group = POWER_ROWS * POWER_LANES
    padded = functional.pad(powers, (0, -powers.shape[1] % group))
    groups = padded.view(len(powers), -1, POWER_ROWS, POWER_LANES)
    of_groups = groups[:, :, 0].clone()
    for row in range(1, POWER_ROWS):
        of_groups += groups[:, :, row]
    sums = of_groups[:, 0].clone()
    for index in range(1, of_groups.shape[1]):
        sums += of_groups[:, index]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums

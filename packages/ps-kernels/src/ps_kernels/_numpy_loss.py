"""Compute the cross entropy of NumPy arrays. Keeps [Note: order of arithmetic]; the formulas are loss.h's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
from ps_kernels._arrays import Array
from ps_kernels._numpy_types import Singles, round_into, to_singles

_PIECE_NUMEL = 1 << 17
"""Logits worked on at a time."""


def cross_entropy(logits: Array, labels: Array, losses: Array, *, ignored: int, factor: float, gradient: bool) -> int:
    """Write each row's loss, and its gradient in place of its logits.

    Return -1; or the first row with a wrong label, with nothing written.
    """
    counts = labels != ignored
    wrong = np.flatnonzero(counts & ((labels < 0) | (labels >= logits.shape[1])))
    if wrong.size:
        return int(wrong[0])
    places = np.where(counts, labels, 0)[:, None]
    at_once = max(1, _PIECE_NUMEL // logits.shape[1])
    for start in range(0, len(labels), at_once):
        piece = slice(start, start + at_once)
        with np.errstate(all="ignore"):
            x = to_singles(logits[piece])
            largest = x.max(1, keepdims=True)
            powers = exponential(x - largest)
            sums = _sums(powers)
            right = largest.astype(np.float64) - np.take_along_axis(x, places[piece], 1)
            losses[piece] = np.where(counts[piece], (logarithm(sums) + right)[:, 0], 0)
            if gradient:
                powers *= np.float32(1) / sums
                np.put_along_axis(
                    powers, places[piece], np.take_along_axis(powers, places[piece], 1) - np.float32(1), 1
                )
                powers *= np.float32(factor)
                powers[~counts[piece]] = 0
                round_into(logits[piece], powers)
    return -1


def exponential(x: Singles) -> Singles:
    """Return the exponentials of numbers of at most zero."""
    shifted = x * np.float32(LOG2_OF_E) + np.float32(ROUNDER)
    whole = shifted - np.float32(ROUNDER)
    rest: Singles = x - whole * np.float32(LOG_OF_2[0]) - whole * np.float32(LOG_OF_2[1])
    y: Singles = np.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y = y * rest + np.float32(term)
    y = y * (rest * rest) + rest + np.float32(1)
    # The whole number's bits stand in the last of `shifted`; where that overflows the result is a nan or not used.
    y *= ((shifted.view(np.uint32) << np.uint32(23)) + np.uint32(0x3F800000)).view(np.float32)
    y[x < np.float32(EXP_LEAST)] = 0
    return y


def logarithm(x: Singles) -> NDArray[np.float64]:
    """Return the logarithms of numbers of at least one."""
    fraction, exponent = np.frexp(x)
    m, power = fraction.astype(np.float64) * 2, exponent - 1
    m, power = np.where(m > ROOT_OF_2, m * 0.5, m), power + (m > ROOT_OF_2)
    t = (m - 1) / (m + 1)
    y = np.full_like(t, LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        y = y * (t * t) + term
    found: NDArray[np.float64] = power * DOUBLE_LOG_OF_2 + 2 * t * y
    return found


def _sums(powers: Singles) -> Singles:
    """Return the sum of each row."""
    rows, columns = powers.shape
    group = POWER_ROWS * POWER_LANES
    padded = np.zeros((rows, -(-columns // group) * group), np.float32)
    padded[:, :columns] = powers
    groups = padded.reshape(rows, -1, POWER_ROWS, POWER_LANES)
    of_groups = groups[:, :, 0].copy()
    for row in range(1, POWER_ROWS):
        of_groups += groups[:, :, row]
    sums = of_groups[:, 0].copy()
    for index in range(1, of_groups.shape[1]):
        sums += of_groups[:, index]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    total: Singles = sums
    return total

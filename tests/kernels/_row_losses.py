"""A cross entropy in pure Python, operation by operation as loss.h has it, to hold compiled code against."""

from __future__ import annotations

import math
import struct

from ps_core._reference.floats import single

LANES, ROWS = 64, 64


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def exponential(x: float) -> float:
    """Of a single of at most zero; each operation is rounded to single."""
    if math.isnan(x):
        return math.nan
    if x < -87:
        return 0.0
    shifted = single(single(x * single(1.44269504089)) + 12582912.0)
    whole = single(shifted - 12582912.0)
    rest = single(single(x - single(whole * 0.693359375)) - single(whole * single(-2.12194440e-4)))
    y = single(1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = single(single(y * rest) + single(term))
    y = single(single(single(y * single(rest * rest)) + rest) + 1.0)
    return single(y * 2.0**whole)


def logarithm(x: float) -> float:
    """Of a single of at least one, in double precision."""
    exponent = (bits_of(x) >> 23) - 127
    m = x / 2.0**exponent
    if m > 1.4142135623730951:
        m, exponent = m * 0.5, exponent + 1
    t = (m - 1) / (m + 1)
    y = 1 / 19
    for odd in range(17, 0, -2):
        y = y * (t * t) + 1 / odd
    return exponent * 0.6931471805599453 + 2 * t * y


def sum_of(powers: list[float]) -> float:
    """In lanes, by groups of rows, then by halves."""
    padded = powers + [0.0] * (-len(powers) % (LANES * ROWS))
    sums = [0.0] * LANES
    for start in range(0, len(padded), LANES * ROWS):
        group = [0.0] * LANES
        for row in range(start, start + LANES * ROWS, LANES):
            group = [single(total + more) for total, more in zip(group, padded[row : row + LANES], strict=True)]
        sums = [single(total + more) for total, more in zip(sums, group, strict=True)]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [single(low + high) for low, high in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def row(logits: list[float], label: int, factor: float) -> tuple[float, list[float]]:
    """The loss and the gradient of one row of singles, both singles."""
    largest = max(logits)
    if any(math.isnan(x) for x in logits) or math.isinf(largest):
        return math.nan, [math.nan] * len(logits)
    powers = [exponential(single(x - largest)) for x in logits]
    total = sum_of(powers)
    share = single(1 / total)
    loss = single(logarithm(total) + (largest - logits[label]))
    shares = [single(power * share) for power in powers]
    shares[label] = single(shares[label] - 1.0)
    return loss, [single(each * factor) for each in shares]

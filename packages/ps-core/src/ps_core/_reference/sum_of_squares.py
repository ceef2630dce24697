"""Compute the sum of squares as an engine on real hardware does: in single precision, in one fixed order.

The executor of this package sums squares exactly (`floats.square_sum`), so that no order changes a bit. Code for arrays
rounds each sum, in the order that ps-kernels keeps. This module does the same in plain Python, for comparison.

[Note: order of squares]
Zeros fill up a last block of 65,536. A block is 16 groups of 16 rows of 256. A group's rows are added to its first, one
after another. Then halves are added until 16 sums are left. A block's 256 sums are halved until one is left. The
blocks' sums, with zeros up to a power of two, are halved likewise. Each square and each sum is rounded to single.
"""

from __future__ import annotations

from ps_core._reference.floats import Floats, add, singles

_ROWS, _LANES, _KEPT = 16, 256, 16
_GROUP, _BLOCK = _ROWS * _LANES, 1 << 16


def single_square_sum(values: Floats) -> float:
    """Return the sum of squares of singles, rounded in the order of [Note: order of squares]."""
    sums = singles(_block(values[start : start + _BLOCK]) for start in range(0, len(values), _BLOCK))
    size = 1 << max(len(sums) - 1, 0).bit_length()
    return _halved(sums + singles([0.0] * (size - len(sums))), 1)[0]


def _block(values: Floats) -> float:
    squares = singles(x * x for x in values) + singles([0.0] * (_BLOCK - len(values)))
    kept = singles(())
    for start in range(0, _BLOCK, _GROUP):
        row = squares[start : start + _LANES]
        for following in range(start + _LANES, start + _GROUP, _LANES):
            row = add(row, squares[following : following + _LANES])
        kept += _halved(row, _KEPT)
    return _halved(kept, 1)[0]


def _halved(sums: Floats, until: int) -> Floats:
    """Add the upper half to the lower, again and again, until ``until`` sums are left."""
    while len(sums) > until:
        half = len(sums) // 2
        sums = add(sums[:half], sums[half:])
    return sums

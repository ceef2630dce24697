"""Compute IEEE arithmetic in pure Python: single precision, bfloat16 and half, bit for bit.

[Note: rounding twice]
Python computes in double precision. A double result of one +, -, *, / or square root of singles may be rounded to
single. That gives exactly the single-precision result (53 >= 2 * 24 + 2 bits), denormal results included. So each
operation here is one Python expression, rounded once by storing it in an ``array('f')``. Values of 16 bits are rounded
from singles.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

from ps_core._extents import Precision

Floats: TypeAlias = "array[float]"
"""A run of singles; always of type code ``f``."""

Values = TypeVar("Values", "array[int]", "array[float]")

_SIGN, _EXPONENT = 0x8000_0000, 0x7F80_0000
_WORD = next(code for code in "IL" if array(code).itemsize == 4)


def singles(values: Iterable[float]) -> Floats:
    """Return the values rounded to single precision, to nearest even; too large becomes infinite."""
    return array("f", values)


def single(value: float) -> float:
    """Return one value rounded to single precision."""
    return array("f", (value,))[0]


def quotient(numerator: float, denominator: float) -> float:
    """Divide as IEEE defines it: by zero gives an infinity or not-a-number, never an exception."""
    if denominator:
        return numerator / denominator
    if numerator == 0 or math.isnan(numerator):
        return math.nan
    return math.copysign(math.inf, numerator) * math.copysign(1.0, denominator)


def root(value: float) -> float:
    """Return the square root; not-a-number below zero."""
    return math.sqrt(value) if value >= 0 else math.nan


def add(left: Floats, right: Floats) -> Floats:
    """Add element by element, each sum rounded."""
    return array("f", [a + b for a, b in zip(left, right, strict=True)])


def scale(values: Floats, factor: float) -> Floats:
    """Multiply each element by one single, each product rounded."""
    return array("f", [value * factor for value in values])


def _bits(values: Floats) -> array[int]:
    return array(_WORD, values.tobytes())


def to_bf16(values: Floats) -> array[int]:
    """Round singles to bfloat16, as 16-bit patterns: to nearest even; not-a-number stays, and is quiet."""
    return array(
        "H",
        [
            ((word + 0x7FFF + (word >> 16 & 1)) >> 16) if word & ~_SIGN <= _EXPONENT else (word >> 16 | 0x40)
            for word in _bits(values)
        ],
    )


def from_bf16(patterns: Iterable[int]) -> Floats:
    """Return the singles with these bfloat16 patterns."""
    made = array("f")
    made.frombytes(array(_WORD, [pattern << 16 for pattern in patterns]).tobytes())
    return made


def _half(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def pack(values: Floats, precision: Precision) -> bytes:
    """Return singles as little-endian bytes of the given precision, rounded to nearest even."""
    if precision is Precision.FP16:
        try:
            return struct.pack(f"<{len(values)}e", *values)
        except OverflowError:
            return b"".join(map(_half, values))
    if precision is Precision.BF16:
        return _little(to_bf16(values)).tobytes()
    return _little(values[:]).tobytes()


def unpack(data: bytes | bytearray | memoryview, precision: Precision) -> Floats:
    """Return the singles with these little-endian bytes of the given precision."""
    if precision is Precision.FP16:
        return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    if precision is Precision.BF16:
        halves = array("H")
        halves.frombytes(data)
        return from_bf16(_little(halves))
    made = array("f")
    made.frombytes(data)
    return _little(made)


def _little(values: Values, order: str = sys.byteorder) -> Values:
    if order != "little":
        values.byteswap()
    return values


def rounded(values: Floats, precision: Precision) -> Floats:
    """Round singles to values of the precision."""
    return values if precision is Precision.FP32 else unpack(pack(values, precision), precision)


def all_finite(values: Sequence[float]) -> bool:
    """Return True if no value is infinite or not-a-number."""
    return all(map(math.isfinite, values))


SQUARE_EXPONENT = 298
"""The square of any finite single is a whole multiple of 2 ** -298."""


def square_sum(values: Iterable[float]) -> int:
    """Return the exact sum of squares of finite singles, in units of 2 ** -298; any order gives the same."""
    return sum(int(math.ldexp(value, SQUARE_EXPONENT // 2)) ** 2 for value in values)


def norm_of(square_sums: int) -> float:
    """Return the Euclidean norm of a sum of `square_sum` results."""
    return math.sqrt(math.ldexp(float(square_sums), -SQUARE_EXPONENT))

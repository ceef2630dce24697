"""Compute CRC-32 of bytes as they come, and of a whole from the checksums of its pieces.

[Note: the checksum]
The checksum is zlib's CRC-32, which is in the standard library. It has to find damage, not forgery, and to be faster
than a disk. It finds every change within 32 consecutive bits. Of other changes one in four billion escapes it. SHA-256
took three to four times as long, and halved the rate of a save. One thread computes the checksum of each buffer, while
another writes that buffer or reads the next one. `cksfv` and `rhash` check the list of checksums.

The checksum of a whole follows from those of its pieces. Bytes that come after multiply the earlier value by a power of
x, in polynomials over two elements. So each of several processes sums up what it reads, and no process reads a file
twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""Coefficients from the highest bit down: this is 1, the bit below is x."""
_BITS = 32


class Checksum:
    """The checksum of bytes as they come; see [Note: the checksum]."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def update(self, data: bytes | memoryview) -> None:
        """Add more bytes."""
        self.value = zlib.crc32(data, self.value)

    @property
    def text(self) -> str:
        """Return the checksum as it is written in files."""
        return text_of(self.value)


def text_of(value: int) -> str:
    """Return a checksum as it is written in files."""
    return f"{value:08X}"


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of a whole from its pieces' checksums and sizes, in order."""
    total = 0
    for value, size in pieces:
        total = _product(_power(size), total) ^ value
    return total


@cache
def _squares() -> tuple[int, ...]:
    """Return x to the powers 1, 2, 4, 8 and so on."""
    found = [_ONE >> 1]
    for _ in range(_BITS - 1):
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


@cache
def _power(size: int) -> int:
    """Return the factor of a checksum that ``size`` bytes follow."""
    found, bits, place = _ONE, 8 * size, 0
    while bits:
        if bits & 1:
            found = _product(_squares()[place % _BITS], found)
        bits, place = bits >> 1, place + 1
    return found


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo the checksum's own."""
    found, bit = 0, _ONE
    while bit:
        if one & bit:
            found ^= other
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found

"""Single, bfloat16 and half precision: rounding, edge values, bytes."""

from __future__ import annotations

import math
import struct
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core._extents import Precision
from ps_core._reference import floats
from ps_core._reference.floats import (
    add,
    all_finite,
    from_bf16,
    norm_of,
    pack,
    quotient,
    root,
    rounded,
    scale,
    single,
    singles,
    square_sum,
    to_bf16,
    unpack,
)

SINGLES = st.floats(width=32, allow_nan=False)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        (0.1, 0x3DCCCCCD),
        (1 + 2**-24, 0x3F800000),  # a tie goes to even
        (1 + 3 * 2**-24, 0x3F800002),
        (2.0**-149, 0x00000001),
        (2.0**-150, 0x00000000),
        (1.5 * 2.0**-149, 0x00000002),
        (-0.0, 0x80000000),
        (3.4028235e38, 0x7F7FFFFF),
        (3.5e38, 0x7F800000),
        (-1e300, 0xFF800000),
    ],
)
def test_rounding_to_single(exact, expected):
    assert bits(single(exact)) == expected
    assert bits(singles([exact])[0]) == expected


def nearest(exact: Fraction) -> float:
    """The nearest single by trying the neighbours of a rough guess, ties to even."""
    guess = struct.unpack("<i", struct.pack("<f", abs(float(exact))))[0]
    around = [struct.unpack("<f", struct.pack("<i", bits))[0] for bits in range(max(0, guess - 2), guess + 3)]
    best = min(around, key=lambda x: (abs(Fraction(x) - abs(exact)), bits(x) & 1))
    return math.copysign(best, exact)


@given(st.floats(-(2.0**40), 2.0**40, width=32), st.floats(-(2.0**40), 2.0**40, width=32))
def test_one_operation_rounded_once_is_exact(a, b):
    results = [(a + b, Fraction(a) + Fraction(b)), (a * b, Fraction(a) * Fraction(b))]
    if b and abs(quotient(a, b)) < 2.0**120:
        results.append((quotient(a, b), Fraction(a) / Fraction(b)))
    for double, exact in results:
        assert single(double) == nearest(exact)


def test_division_and_roots_never_raise():
    assert quotient(3.0, 2.0) == 1.5
    assert quotient(1.0, -0.0) == -math.inf
    assert quotient(-2.0, 0.0) == -math.inf
    assert math.isnan(quotient(0.0, 0.0))
    assert math.isnan(quotient(math.nan, 0.0))
    assert root(9.0) == 3.0
    assert root(math.inf) == math.inf
    assert math.isnan(root(-1.0))
    assert math.isnan(root(math.nan))


def test_vector_operations_round_each_element():
    tiny = 2.0**-24
    assert list(add(singles([1, 2]), singles([tiny, 3]))) == [1, 5]
    assert list(scale(singles([3, -1]), 0.5)) == [1.5, -0.5]
    with pytest.raises(ValueError, match="zip"):
        add(singles([1]), singles([1, 2]))


@pytest.mark.parametrize(
    ("word", "pattern"),
    [
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # tie to even
        (0x3F818000, 0x3F82),
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # rounds up to infinity
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a signalling not-a-number that truncation would make infinite
        (0xFFC12345, 0xFFC1),
        (0x80000000, 0x8000),
        (0x00000001, 0x0000),
        (0x00008001, 0x0001),  # denormal
        (0x007FFFFF, 0x0080),
    ],
)
def test_bfloat16_patterns(word, pattern):
    value = array("f")
    value.frombytes(struct.pack("=I", word))
    assert list(to_bf16(value)) == [pattern]
    assert pack(value, Precision.BF16) == struct.pack("<H", pattern)


@given(SINGLES)
def test_bfloat16_is_nearest(value):
    back = from_bf16(to_bf16(singles([value])))[0]
    if math.isinf(back):
        assert abs(value) >= 2.0**127 * (2 - 2.0**-8)
        return
    pattern = to_bf16(singles([value]))[0]
    others = [from_bf16([pattern + step])[0] for step in (-1, 1) if 0 <= (pattern & 0x7FFF) + step < 0x7F80]
    distance = abs(Fraction(back) - Fraction(value))
    assert all(distance <= abs(Fraction(other) - Fraction(value)) for other in others)
    assert math.copysign(1, back) == math.copysign(1, value)


@pytest.mark.parametrize(
    ("value", "pattern"),
    [(1.0, 0x3C00), (65504.0, 0x7BFF), (65520.0, 0x7C00), (-1e9, 0xFC00), (2.0**-24, 1), (2.0**-25, 0), (-0.0, 0x8000)],
)
def test_half_patterns(value, pattern):
    assert pack(singles([value]), Precision.FP16) == struct.pack("<H", pattern)
    assert pack(singles([value, 1.0]), Precision.FP16) == struct.pack("<HH", pattern, 0x3C00)


def test_not_a_number_survives_every_precision():
    for precision in Precision:
        assert math.isnan(unpack(pack(singles([math.nan]), precision), precision)[0])


@given(st.lists(SINGLES, max_size=5), st.sampled_from(Precision))
def test_what_a_precision_can_hold_comes_back_from_its_bytes(values, precision):
    kept = rounded(singles(values), precision)
    data = pack(kept, precision)
    assert len(data) == len(values) * (4 if precision is Precision.FP32 else 2)
    assert unpack(data, precision).tobytes() == kept.tobytes()
    assert rounded(kept, precision).tobytes() == kept.tobytes()


def test_packing_single_does_not_share_memory():
    values = singles([1.0])
    pack(values, Precision.FP32)
    assert list(values) == [1.0]
    assert unpack(memoryview(struct.pack("<f", 2.5)), Precision.FP32)[0] == 2.5


def test_bytes_are_swapped_on_a_big_endian_machine():
    assert floats._little(array("H", [0x1234]), "big")[0] == 0x3412


@given(st.lists(FINITE, max_size=8), st.randoms())
def test_sums_of_squares_are_exact_in_any_order(values, rng):
    exact = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    shuffled = values[:]
    rng.shuffle(shuffled)
    total = square_sum(shuffled[:3]) + square_sum(shuffled[3:])
    assert Fraction(total, 2**298) == exact
    assert math.isclose(norm_of(total) ** 2, float(exact), rel_tol=1e-12, abs_tol=1e-300)


def test_finiteness():
    assert all_finite([1.0, -0.0])
    assert not all_finite([1.0, math.inf])
    assert not all_finite([math.nan])

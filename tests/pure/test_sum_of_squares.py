"""The sum of squares in single precision: its order, and how far it may be from the exact one."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from ps_core._reference.floats import norm_of, single, singles, square_sum
from ps_core._reference.sum_of_squares import single_square_sum


def test_nothing_and_few():
    assert single_square_sum(singles([])) == 0
    assert single_square_sum(singles([3, 4])) == 25


def test_rows_go_before_halves():
    """Ones below a large square are lost if added to it one by one, and kept if added to each other first."""
    large = 2.0**13  # squared, it swallows a single one
    one_by_one = singles([large] + [0.0] * 255 + ([1.0] + [0.0] * 255) * 15)
    assert single_square_sum(one_by_one) == large**2
    in_other_lanes = singles([large] + [1.0] * 15)
    assert single_square_sum(in_other_lanes) > large**2


def test_blocks_are_summed_apart():
    """In one row's lane the ones would be lost; in a block of their own they are not."""
    values = singles([2.0**13] + [0.0] * 65_535 + [1.0] * 32)
    assert single_square_sum(values) == 2.0**26 + 32
    assert single_square_sum(values + singles([0.0] * 200_000)) == 2.0**26 + 32


def test_too_large_is_infinite():
    assert single_square_sum(singles([3e38, 1.0])) == float("inf")


@given(st.integers(0, 5000), st.integers(0, 2**32))
def test_it_is_near_the_exact_sum(numel, seed):
    rng = random.Random(seed)
    values = singles(rng.gauss(0, 1) for _ in range(numel))
    exact = norm_of(square_sum(values)) ** 2
    assert abs(single_square_sum(values) - exact) <= 28 * 2**-24 * exact
    assert single(single_square_sum(values)) == single_square_sum(values)

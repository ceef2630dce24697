"""Optimizer steps against exact arithmetic rounded operation by operation."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core._errors import InvalidInput
from ps_core._options import SGD, Adam, AdamW
from ps_core._reference.floats import single, singles
from ps_core._reference.optim import step_one, step_run

MODEST = st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


def r(exact: Fraction) -> Fraction:
    """The nearest single to an exact value, even where two are; the values here are far from the range's upper end."""
    near = single(float(exact))
    word = struct.unpack("<i", struct.pack("<f", abs(near)))[0]
    words = [each for each in (word - 1, word, word + 1) if each >= 0]
    candidates = [(struct.unpack("<f", struct.pack("<i", each))[0], each) for each in words]
    found = min(candidates, key=lambda pair: (abs(Fraction(pair[0]) - abs(exact)), pair[1] % 2))
    return Fraction(found[0]) * (-1 if exact < 0 else 1)


def by_hand(optimizer, step, grad_scale, p, m, v, grad):
    """The documented order, one exact operation and one rounding at a time."""
    c = {name: Fraction(single(value)) for name, value in constants(optimizer, step).items()}
    p, m, v, g = (Fraction(x) for x in (p, m, v, grad))
    g = r(g * Fraction(single(grad_scale)))
    if isinstance(optimizer, AdamW):
        p = r(p * c["keep"])
    else:
        g = r(g + c["decay"] * p)
    if isinstance(optimizer, SGD):
        if optimizer.momentum:
            m = r(r(c["momentum"] * m) + g)
            g = m
        return r(p - c["lr"] * g), m, v
    apart = r(g - m)
    m = r(m + c["gain1"] * apart) if c["gain1"] < Fraction(1, 2) else r(g + (c["gain1"] - 1) * apart)
    v = r(r(c["beta2"] * v) + r(c["gain2"] * g) * g)
    denominator = r(r(r(Fraction(math.sqrt(v))) / c["root"]) + c["eps"])
    return r(p - r(r(c["size"] * m) / denominator)), m, v


def constants(optimizer, step):
    found = {"lr": optimizer.lr, "decay": optimizer.weight_decay, "keep": 1 - optimizer.lr * optimizer.weight_decay}
    if isinstance(optimizer, SGD):
        return {**found, "momentum": optimizer.momentum}
    beta1, beta2 = optimizer.betas
    return {
        **found,
        "gain1": 1 - beta1,
        "beta2": beta2,
        "gain2": 1 - beta2,
        "eps": optimizer.eps,
        "root": math.sqrt(1 - beta2**step),
        "size": optimizer.lr / (1 - beta1**step),
    }


OPTIMIZERS = [
    Adam(lr=0.01),
    Adam(lr=0.3, betas=(0.5, 0.7), weight_decay=0.2),
    AdamW(lr=0.01, weight_decay=0.1),
    AdamW(weight_decay=0.0, eps=1e-3),
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
]


@given(
    st.sampled_from(OPTIMIZERS),
    st.integers(1, 1000),
    st.sampled_from([1.0, 0.1, 2.0**-16]),
    st.tuples(MODEST, MODEST, MODEST.map(abs), MODEST),
)
def test_each_operation_is_rounded_once_in_the_documented_order(optimizer, step, grad_scale, values):
    assert step_one(optimizer, step, grad_scale, *values) == by_hand(optimizer, step, grad_scale, *values)


def test_a_run_is_its_elements_one_by_one():
    rows = [singles(column) for column in ([1, -2, 3.5], [0.5, 0, -1], [0.1, 2, 0], [1, 2, -3])]
    for optimizer in OPTIMIZERS:
        runs = step_run(optimizer, 3, 0.5, *rows)
        singly = [step_one(optimizer, 3, 0.5, *(row[index] for row in rows)) for index in range(3)]
        assert [tuple(run[index] for run in runs) for index in range(3)] == singly


def test_ends_of_the_range_follow_ieee():
    frozen = Adam(lr=0.1, eps=0.0)
    p, m, v = step_one(frozen, 1, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert math.isnan(p)
    assert (m, v) == (0, 0)
    p, m, v = step_one(Adam(), 1, 1.0, 1.0, 0.0, 0.0, 1e38)
    assert v == math.inf
    assert p == 1.0
    assert math.isnan(step_one(Adam(), 1, 1.0, 1.0, 0.0, -1.0, 0.0)[0])


def test_steps_are_counted_from_one():
    with pytest.raises(InvalidInput, match="counted from 1"):
        step_one(Adam(), 0, 1.0, 0, 0, 0, 0)


def test_the_first_adam_step_moves_by_the_learning_rate():
    p, _, _ = step_one(Adam(lr=0.25, eps=0.0), 1, 1.0, 1.0, 0.0, 0.0, 7.0)
    assert p == pytest.approx(0.75, rel=1e-6)

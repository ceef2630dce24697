"""Sums in a fixed order: the same bits from every backend, whatever the lengths and types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ps_kernels
from ps_core._reference import floats
from ps_kernels import InvalidArgument, _native

EVERY = [*(name for name in _native.LEVELS if ps_kernels.backends()[name] == "available"), "torch", "numpy"]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = [0.0, -0.0, 1e-45, 6e-8, 65504.0, 3e38, float("inf"), float("-inf"), float("nan")]
LENGTHS = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 129, (1 << 17) + 1]), st.integers(0, 300))


def drawn(kind: str, count: int, length: int, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((count, length)) * 10.0 ** rng.integers(-6, 5, (count, length))
    odd = rng.random((count, length)) < 0.1
    with np.errstate(over="ignore"):
        single = np.where(odd, rng.choice(SPECIAL, (count, length)), parts).astype(np.float32)
    return list(torch.from_numpy(single).to(KINDS[kind]))


def of_numpy(tensor: torch.Tensor) -> Any:
    """Return a NumPy array over the tensor's memory. (Any: the array's type differs; bfloat16 becomes uint16.)"""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()


def run(backend: str, parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    if backend == "numpy":
        ps_kernels.sum_in_order(list(map(of_numpy, parts)), of_numpy(out), backend=backend)
    else:
        ps_kernels.sum_in_order(parts, out, backend=backend)
    return out


@given(
    kind=st.sampled_from(list(KINDS)),
    into=st.sampled_from(list(KINDS)),
    count=st.integers(1, 9),
    length=LENGTHS,
    start=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_every_backend_adds_in_order_and_rounds_once(
    bits: Any, kind: str, into: str, count: int, length: int, start: int, seed: int
) -> None:
    parts = [part[start:] for part in drawn(kind, count, length + start, seed)]  # not all are aligned to a line
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()
    for backend in EVERY:
        found = run(backend, parts, torch.full((length,), 7.0, dtype=KINDS[into]))
        np.testing.assert_array_equal(bits(found), bits(wanted.to(KINDS[into])), err_msg=backend)


@pytest.mark.parametrize("backend", EVERY)
def test_the_pure_reference_agrees(bits: Any, backend: str) -> None:
    parts = drawn("bfloat16", 4, 200, 3)
    rows = [part.float().tolist() for part in parts]
    wanted = []
    for column in zip(*rows, strict=True):
        total = column[0]
        for value in column[1:]:
            total = floats.single(total + value)
        wanted.append(total)
    found = run(backend, parts, torch.zeros(200))
    np.testing.assert_array_equal(bits(found), bits(torch.tensor(wanted)))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("backend", EVERY)
def test_the_sum_may_take_the_place_of_a_part(bits: Any, backend: str, place: int) -> None:
    parts = drawn("bfloat16", 3, 1000, 5)
    wanted = run(backend, parts, torch.empty(1000, dtype=torch.bfloat16))
    found = run(backend, parts, parts[place])
    np.testing.assert_array_equal(bits(found), bits(wanted))


def test_denormals_are_kept_where_pytorch_is_told_to_flush_them() -> None:
    tiny, out = torch.full((100,), 1e-40), torch.empty(100)
    torch.set_flush_denormal(True)
    try:
        ps_kernels.sum_in_order([tiny, tiny], out)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(out, tiny + tiny)
    assert out[0] > 0


def test_the_parts_may_be_the_rows_of_a_matrix() -> None:
    out = torch.empty(5)
    ps_kernels.sum_in_order(torch.arange(15.0).view(3, 5), out)
    assert torch.equal(out, torch.arange(15.0).view(3, 5).sum(0))


NEGATED = torch.full((1,), 1 + 2j).conj().imag
"""-2, where memory holds 2."""
CONJUGATED = torch.full((1,), 1 + 2j).conj()
ONES, WIDE = torch.ones(8), torch.ones(12)
WRONG: list[tuple[list[torch.Tensor], torch.Tensor, str]] = [
    ([], torch.empty(8), "parts: expected at least one array, found none"),
    ([ONES, torch.ones(9)], torch.empty(8), "parts[1]: expected shape (8,), found (9,)"),
    ([ONES, torch.ones(8, dtype=torch.bfloat16)], torch.empty(8), "parts[1]: expected float32, found bfloat16"),
    ([torch.ones(8, dtype=torch.float64)], torch.empty(8), "parts[0]: expected float32 or float16 or bfloat16"),
    ([ONES], torch.empty(8, dtype=torch.int64), "out: expected float32 or float16 or bfloat16"),
    ([torch.ones(16)[::2]], torch.empty(8), "parts[0]: not contiguous"),
    ([ONES, WIDE[:8]], WIDE[4:], "out and parts[1] share memory; expected separate arrays"),
    ([NEGATED], torch.empty(1), "parts[0]: a view that negates its memory (is_neg())"),
    ([torch.ones(1)], NEGATED, "out: a view that negates its memory (is_neg())"),
    ([CONJUGATED], torch.empty(1), "parts[0]: a view that conjugates its memory (is_conj())"),
    ([torch.ones(8, device="meta")], torch.empty(8, device="meta"), "out: expected on the CPU, found on meta"),
]


@pytest.mark.parametrize(("parts", "out", "message"), WRONG)
def test_wrong_arguments(parts: list[torch.Tensor], out: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        ps_kernels.sum_in_order(parts, out)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ps_kernels.accumulate(torch.zeros(1), NEGATED),
        lambda: ps_kernels.sumsq_finite(NEGATED, torch.zeros(2)),
        lambda: ps_kernels.gather([torch.ones(1), NEGATED], torch.zeros(2), [0, 1]),
        lambda: ps_kernels.scatter(torch.ones(1), [0], [NEGATED]),
        lambda: ps_kernels.scatter(NEGATED, [0], [torch.ones(1)]),
    ],
)
def test_no_kernel_takes_a_view_that_negates_its_memory(call: Callable[[], None]) -> None:
    """Compiled code sees the memory, and would compute with other signs."""
    assert NEGATED.is_neg()
    with pytest.raises(InvalidArgument, match=re.escape("a view that negates its memory (is_neg())")):
        call()
    assert NEGATED.tolist() == [-2]


def test_copies_take_complex_numbers_and_no_view_that_conjugates_them() -> None:
    values, whole, back = (
        torch.full((1,), 1 + 2j),
        torch.zeros(2, dtype=torch.cfloat),
        torch.zeros(1, dtype=torch.cfloat),
    )
    ps_kernels.gather([values], whole, [1])
    ps_kernels.scatter(whole, [1], [back])
    assert back.tolist() == [1 + 2j]
    for call in (
        lambda: ps_kernels.gather([CONJUGATED], whole, [0]),
        lambda: ps_kernels.gather([values], whole.conj(), [0]),
        lambda: ps_kernels.scatter(whole, [0], [CONJUGATED]),
    ):
        with pytest.raises(InvalidArgument, match=re.escape("a view that conjugates its memory (is_conj())")):
            call()

"""Norms, copies, sums, rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ps_kernels
from ps_kernels import _backends, _batch, _numpy

Make = Callable[[np.ndarray], Any]


def halved(numbers: list[np.float32], left: int = 1) -> list[np.float32]:
    """The upper half added to the lower, until so many are left."""
    while len(numbers) > left:
        half = len(numbers) // 2
        numbers = [a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers


def naive_sum_of_squares(x: np.ndarray) -> np.float32:
    """[Note: order of arithmetic], read literally: blocks of 16 groups of 16 rows of 256, then halves."""
    squares = [np.float32(y) * np.float32(y) for y in x]
    squares += [np.float32(0)] * (-len(squares) % 65_536)
    blocks = []
    for start in range(0, len(squares), 65_536):
        sums = []
        for group in range(start, start + 65_536, 4096):
            lanes = squares[group : group + 256]
            for row in range(group + 256, group + 4096, 256):
                lanes = [a + b for a, b in zip(lanes, squares[row : row + 256], strict=True)]
            sums += halved(lanes, 16)
        blocks += halved(sums)
    return halved(blocks + [np.float32(0)] * ((1 << (len(blocks) - 1).bit_length()) - len(blocks)))[0]


@pytest.mark.parametrize("numel", [2, 3, 1000, 4096 + 255, (2 << 16) + 5])
def test_sum_of_squares_in_the_order_of_the_note(make: Make, numel: int) -> None:
    x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    out = make(np.zeros(2, np.float32))
    ps_kernels.sumsq_finite(make(x), out)
    assert out[0] == naive_sum_of_squares(x)
    assert out[1] == 0


@pytest.mark.parametrize("numel", [0, 1, 65_536, 200_001])
def test_sums_of_squares_agree_and_add_up(numel: int) -> None:
    x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    out, tensor_out = np.ones(2, np.float32), torch.ones(2)
    ps_kernels.sumsq_finite(x, out, backend="numpy")
    ps_kernels.sumsq_finite(torch.from_numpy(x), tensor_out, backend="torch")
    assert out.tolist() == tensor_out.tolist()
    assert out[0] == pytest.approx(1 + (x.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert out[1] == 1, "the flag is never taken back"


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("where", [0, 70_000])
def test_a_number_that_is_not_finite_is_flagged(make: Make, bad: float, kind: type, where: int) -> None:
    x = np.zeros(70_001, np.float32)
    x[where] = bad
    x = (x.view(np.uint32) >> 16).astype(np.uint16) if kind is np.uint16 else x.astype(kind)
    out = make(np.zeros(2, np.float32))
    ps_kernels.sumsq_finite(make(x), out)
    assert out[1] == 1


def test_squares_that_overflow_are_not_flagged(make: Make) -> None:
    out = make(np.zeros(2, np.float32))
    ps_kernels.sumsq_finite(make(np.full(3, 1e30, np.float32)), out)
    assert out.tolist() == [np.inf, 0]


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
def test_accumulate(make: Make, kind: type) -> None:
    grad = np.full(40_000, 0x3FC0, np.uint16) if kind is np.uint16 else np.full(40_000, 1.5, kind)
    accumulator = make(np.full(40_000, 2.0, np.float32))
    ps_kernels.accumulate(accumulator, make(grad), scale=0.5)
    ps_kernels.accumulate(accumulator, make(grad))
    assert set(accumulator.tolist()) == {4.25}


def test_gather_and_scatter_are_inverse(make: Make) -> None:
    pieces = [np.arange(6, dtype=np.float32).reshape(2, 3), np.full((), 9, np.float32), np.zeros((0, 4), np.float32)]
    chunk = make(np.full(12, -1, np.float32))
    ps_kernels.gather([make(piece) for piece in pieces], chunk, [4, 0, 12])
    assert chunk.tolist() == [9, -1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1]
    back = [make(np.full_like(piece, 7)) for piece in pieces]
    ps_kernels.scatter(chunk, [4, 0, 12], back)
    assert [x.tolist() for x in back] == [piece.tolist() for piece in pieces]


def test_pieces_are_copied_again_and_again(make: Make) -> None:
    tensors, chunk = [make(np.zeros(2, np.float32)), make(np.zeros(3, np.float16))], make(np.zeros(6, np.float32))
    pieces = ps_kernels.Pieces(tensors, chunk, [4, 0])
    for number in (1, 2):
        tensors[0][:], tensors[1][:] = number, -number
        pieces.gather()
        assert chunk.tolist() == [-number, -number, -number, 7 * (number - 1), number, number]
        chunk[:] = 7 * number
        pieces.scatter()
        assert [x.tolist() for x in tensors] == [[7 * number] * 2, [7 * number] * 3]
    with pytest.raises(ps_kernels.InvalidArgument, match="of the chunk overlap"):
        ps_kernels.Pieces(tensors, chunk, [2, 0])


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("chunk_kind", [np.float32, np.float16, np.uint16])
def test_gather_and_scatter_cast(make: Make, bits: Callable[[Any], np.ndarray], kind: type, chunk_kind: type) -> None:
    def held(values: torch.Tensor, kind: type) -> np.ndarray:
        if kind is np.uint16:
            return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return values.to(torch.float16 if kind is np.float16 else torch.float32).numpy()

    def values_of(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(array)

    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(99, generator=generator) * 10 ** torch.randint(-9, 9, (99,), generator=generator)
    source = held(drawn, kind)
    chunk, back = make(np.zeros(100, chunk_kind)), make(np.zeros(99, kind))
    ps_kernels.gather([make(source)], chunk, [1])
    there = held(values_of(source), chunk_kind)
    np.testing.assert_array_equal(bits(chunk)[1:], bits(there))
    ps_kernels.scatter(chunk, [1], [back])
    np.testing.assert_array_equal(bits(back), bits(held(values_of(there), kind)))


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Every upper half with each lower half that decides, against torch."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        ours = np.empty(1 << 16, np.uint16)
        _numpy.round_into(ours, x)
        theirs = torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(ours[numbers], theirs[numbers])
        assert ((ours[~numbers] & 0x7FFF) > 0x7F80).all(), "a nan stays a nan"


def test_backends_say_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ps_kernels.backends()
    assert list(found) == ["cuda", "avx512", "avx2", "neon", "scalar", "torch", "numpy"]
    assert {found["torch"], found["numpy"]} == {"available"}
    monkeypatch.setattr(_backends, "find_spec", lambda name: None)
    assert ps_kernels.backends()["numpy"] == "numpy is not installed: pip install numpy"
    ps_kernels.set_threads(1)  # nothing to set, no error


def test_set_threads() -> None:
    before = torch.get_num_threads()
    try:
        ps_kernels.set_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        ps_kernels.set_threads(before)


def test_many_tensors_take_the_quick_look_and_odd_ones_the_thorough_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say the same of sound arguments; what is wrong is left to the thorough one, which says what."""
    chunk, tensors = torch.zeros(100), [torch.ones(3, 2), torch.nn.Parameter(torch.full((4,), 2.0)), torch.ones(0)]
    thorough = _batch._one_by_one
    monkeypatch.setattr(_batch, "_one_by_one", lambda *arguments: pytest.fail("the quick look was enough"))
    quick = _batch.check_batch(tensors, chunk, [10, 4, 100])
    mixed = _batch.check_batch([*tensors, torch.ones(5).half()], chunk, [10, 4, 100, 50])
    monkeypatch.setattr(_batch, "_one_by_one", thorough)
    slow = thorough(tensors, quick.whole, [10, 4, 100])
    assert [getattr(quick, name) for name in ("starts", "numels", "addresses", "nbytes", "dtypes")] == [
        getattr(slow, name) for name in ("starts", "numels", "addresses", "nbytes", "dtypes")
    ]
    assert mixed.nbytes == [24, 16, 0, 10]
    wrong: list[tuple[list[Any], list[Any], str]] = [
        ([torch.ones(2), torch.ones(2).double()], [0, 2], r"tensors\[1\]: expected float32 or"),
        ([torch.ones(2), torch.ones(4)[::2]], [0, 2], r"tensors\[1\]: not contiguous"),
        ([torch.ones(2), torch.ones(2, device="meta")], [0, 2], r"tensors\[1\]: expected a torch array on cpu"),
        ([torch.ones(2), torch.ones(2)], [0, 99], r"tensors\[1\]: 2 elements from offset 99"),
        ([torch.ones(2), torch.ones(2)], [0, 2.0], r"offsets: expected whole numbers, found 2.0 for tensors\[1\]"),
        ([torch.ones(2), torch.ones(2)], [5, 4], r"pieces \(4, 6\) and \(5, 7\) of the chunk overlap"),
        ([torch.ones(2), chunk[50:52]], [0, 2], r"chunk and tensors\[1\] share memory"),
        ([torch.ones(2), [1.0]], [0, 2], r"tensors\[1\]: expected a torch tensor or a numpy array, found list"),
    ]
    for parts, offsets, message in wrong:
        with pytest.raises(ps_kernels.InvalidArgument, match=message):
            ps_kernels.gather(parts, chunk, offsets)
    assert not chunk.any()


def test_pieces_keep_what_they_were_given() -> None:
    """The list may change, and the tensors go, without harm."""
    tensors, chunk = [torch.ones(3), torch.full((2,), 2.0).half()], torch.zeros(5)
    offsets = [0, 3]
    pieces = ps_kernels.Pieces(tensors, chunk, offsets)
    tensors.clear()
    offsets.clear()
    pieces.gather()
    assert chunk.tolist() == [1, 1, 1, 2, 2]

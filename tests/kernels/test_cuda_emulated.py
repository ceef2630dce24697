"""The CUDA sources, unmodified, run on the CPU: the same bits as the numpy and torch backends."""

from __future__ import annotations

import mmap
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ps_kernels
from _emulated import EmulatedLauncher, build, of_one_type
from ps_kernels import _api, _backends, _cuda
from ps_kernels._arithmetic_order import AdamArguments
from ps_kernels._batch import check_batch
from ps_kernels._cuda import CudaBackend, split
from ps_kernels._cuda_source import OPTIONS, TUNINGS, Tuning, options

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: the emulation was not built")
KINDS = [torch.float32, torch.bfloat16, torch.float16]
OUTS = [None, torch.bfloat16, torch.float16]
NORESERVE = 0x4000
"""Linux: take no memory for what is not touched. Python names it from 3.13 on."""
SPECIAL = [0.0, -0.0, 1e-41, -1e-45, 1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan, 1.0, -65520.0, 6e-8]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    return EmulatedLauncher.made(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedLauncher]:
    """Calls for torch tensors go to the emulated kernels; on a fresh record."""
    backends = {"torch": CudaBackend(launcher), "numpy": _backends.load("numpy")}
    monkeypatch.setattr(_api, "choose", lambda name, library, device, wanted: backends[library])
    launcher.launched.clear()
    launcher.order, launcher.processors = 0, 1
    yield launcher
    assert launcher.launched, "the emulated kernels were not used"


def drawn(numel: int, offset: int, seed: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many magnitudes, special ones among them, ``offset`` elements after an aligned address."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(numel) * 10.0 ** rng.integers(-12, 4, numel)
    places = rng.integers(0, max(numel, 1), len(SPECIAL))
    if numel:
        values[places] = SPECIAL
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    room = torch.zeros(numel + 16, dtype=kind)
    first = -room.data_ptr() % 16 // room.element_size() + offset
    tensor = room[first : first + numel]
    tensor.copy_(torch.from_numpy(singles))
    return tensor


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy; bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.numpy().copy()


Bits = Callable[[Any], np.ndarray]


def agree(bits: Bits, tensors: list[torch.Tensor], arrays: list[np.ndarray]) -> None:
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(bits(tensor), bits(array))


LENGTHS = [0, 1, 3, 5, 64, 1023, 2051]
OFFSETS = [(0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (3, 3, 3, 3, 3), (0, 1, 2, 3, 1), (0, 0, 0, 2, 0)]


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_kind", OUTS)
def test_steps(
    emulated: EmulatedLauncher, bits: Bits, kind: torch.dtype, out_kind: torch.dtype | None, offsets: tuple[int, ...]
) -> None:
    for numel in LENGTHS:
        states = [drawn(numel, offset, seed) for seed, offset in enumerate(offsets[:3])]
        states[2].abs_()
        tensors = [*states, drawn(numel, offsets[3], 7, kind)]
        if out_kind is not None:
            tensors.append(drawn(numel, offsets[4], 8, out_kind))
        arrays = [as_numpy(each) for each in tensors]
        for step in (1, 2):
            for those in (tensors, arrays):
                ps_kernels.adam_step(*those, step=step, lr=0.01, weight_decay=0.1, decoupled=step == 1, grad_scale=0.3)
                ps_kernels.sgd_step(those[0], those[1], *those[3:], lr=0.1, momentum_decay=0.9, weight_decay=0.1)
                ps_kernels.sgd_step(those[0], None, *those[3:], lr=0.1)
                ps_kernels.accumulate(those[2], those[3], scale=0.25)
        agree(bits, tensors, arrays)
    assert {name.partition("_")[0] for name, _ in emulated.launched} == {"adam", "sgd", "accumulate"}


def test_the_16_bit_parameters_may_overwrite_the_gradient(emulated: EmulatedLauncher, bits: Bits) -> None:
    tensors = [drawn(1001, 0, seed) for seed in (1, 2)] + [drawn(1001, 0, 3).abs(), drawn(1001, 0, 4, torch.bfloat16)]
    arrays = [as_numpy(each) for each in tensors]
    for those in (tensors, arrays):
        ps_kernels.adam_step(*those, those[3], step=3, lr=0.01)
    agree(bits, tensors, arrays)
    assert emulated.launched == [("adam_bfloat16_bfloat16", 1)]


def tuned(packs: int, folder: Path) -> EmulatedLauncher:
    """The step's kernels for bfloat16 gradients, which pass the caches by, with so many packs."""
    more = set(options("step", Tuning(packs=packs, past=3))) - set(OPTIONS)
    assert len(more) == 1 + (packs > 1)
    kernels = [f"{kind}_bfloat16{out}" for kind in ("adam", "sgd") for out in ("_none", "_bfloat16", "_float16")]
    built = build(of_one_type(), [*kernels, "accumulate_bfloat16"], folder, "step", sorted(more))
    return EmulatedLauncher(libraries={"step": built})


@pytest.mark.parametrize("packs", sorted({each.packs for each in TUNINGS}))
def test_no_tuning_changes_a_bit(packs: int, bits: Bits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, numpy = tuned(packs, tmp_path), _backends.load("numpy")
    tunings = [each for each in TUNINGS if each.packs == packs]
    for tuning, out_kind in product(tunings, OUTS[:2]):
        backends = {"torch": CudaBackend(launcher, tuning), "numpy": numpy}
        monkeypatch.setattr(_api, "choose", lambda name, library, device, wanted, backends=backends: backends[library])
        for numel, offset in product((7, 5003), (0, 1)):
            tensors = [drawn(numel, offset, seed) for seed in range(3)]
            tensors[2].abs_()
            tensors += [drawn(numel, offset, 7, torch.bfloat16)]
            tensors += [drawn(numel, offset, 8, out_kind)] if out_kind else []
            arrays = [as_numpy(each) for each in tensors]
            for those in (tensors, arrays):
                ps_kernels.adam_step(*those, step=2, lr=0.01, weight_decay=0.1, grad_scale=-0.3)
                ps_kernels.sgd_step(those[0], those[1], *those[3:], lr=0.1, momentum_decay=0.9, weight_decay=0.1)
                ps_kernels.sgd_step(those[0], None, *those[3:], lr=0.1)
                ps_kernels.accumulate(those[2], those[3], scale=0.25)
            agree(bits, tensors, arrays)


@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_blocks_are_enough_and_no_more(launcher: EmulatedLauncher, tuning: Tuning) -> None:
    class Counting:
        grids: list[tuple[int, int]] = []  # noqa: RUF012 - one test's

        def launch(self, kernel: object, grid: tuple[int, int], arguments: object, on: object) -> None:
            self.grids.append(grid)

        def multiprocessors(self, on: object) -> int:
            return 3

    backend, a_block = CudaBackend(Counting(), tuning), tuning.threads * 4 * tuning.packs
    for numel, blocks in ((1, 1), (a_block, 1), (a_block + 4, 2), (1000 * a_block, 1000)):
        tensors = [torch.empty(numel, device="meta") for _ in range(2)]
        backend.accumulate(*tensors, 1.0)
        assert Counting.grids[-1] == (min(blocks, 3 * tuning.blocks), tuning.threads)


@settings(max_examples=40)
@given(
    lr=st.floats(0, 1e38),
    betas=st.tuples(st.floats(0, 0.999999), st.floats(0, 0.999999)),
    eps=st.floats(0, 1),
    decay=st.floats(0, 10),
    step=st.integers(1, 2**31),
    words=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), min_size=1, max_size=9),
)
def test_adam_of_any_numbers(
    launcher: EmulatedLauncher,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    step: int,
    words: list[tuple[int, int, int, int]],
) -> None:
    arrays = [np.array(column, np.uint32).view(np.float32) for column in zip(*words, strict=True)]
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    arguments = AdamArguments(
        step=step, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=decay, decoupled=True, grad_scale=1.0
    )
    _backends.load("numpy").adam(tuple(arrays[:3]), arrays[3], None, arguments.scalars())
    CudaBackend(launcher).adam(tuple(tensors[:3]), tensors[3], None, arguments.scalars())
    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(np.nan_to_num(tensor.numpy(), nan=7.5), np.nan_to_num(array, nan=7.5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("numel", [0, 1, 3, 1001, 65_536, 65_537, 200_001])
@pytest.mark.parametrize("processors", [1, 100])
def test_sum_of_squares(
    emulated: EmulatedLauncher, kind: torch.dtype, offset: int, numel: int, processors: int
) -> None:
    room = torch.randn(numel + 16, generator=torch.Generator().manual_seed(numel)).to(kind)
    x = room[offset : offset + numel]
    theirs = np.array([3.0, 0.0], np.float32)
    ps_kernels.sumsq_finite(as_numpy(x), theirs)
    emulated.processors = processors
    for order in (0, 1, 2, 3):
        emulated.order = order
        ours = torch.tensor([3.0, 0.0])
        ps_kernels.sumsq_finite(x, ours)
        assert ours.tolist() == theirs.tolist()
    assert numel == 0 or theirs[0] > 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", [1, 100])
def test_sums_of_squares_of_spans_are_one_launch(
    emulated: EmulatedLauncher, kind: torch.dtype, processors: int
) -> None:
    """Empty spans among them, short and long ones, out of order and overlapping; each span's bits are its own."""
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(1)).to(kind)
    x[250_000] = np.inf
    spans = [(5, 5), (0, 0), (3, 70_004), (70_004, 70_005), (9, 9), (8, 65_544), (65_536, 200_001), (240_000, 300_001)]
    emulated.processors = processors
    for order in (0, 1, 2):
        emulated.order = order
        emulated.launched.clear()
        ours = torch.tensor([[3.0, 0.0]] * len(spans))
        ps_kernels.sumsq_finite(x, ours, spans=spans)
        assert [name for name, _ in emulated.launched] == [f"norm_spans_{str(kind).removeprefix('torch.')}"]
        alone = torch.tensor([[3.0, 0.0]] * len(spans))
        for (start, stop), row in zip(spans, alone, strict=True):
            ps_kernels.sumsq_finite(x[start:stop], row)
        assert torch.equal(ours, alone)
        assert [row[1] for row in ours.tolist()] == [0.0] * 7 + [1.0]
    nothing = torch.zeros(1, 2)
    ps_kernels.sumsq_finite(x, nothing, spans=[(4, 4)])
    ps_kernels.sumsq_finite(x, nothing[:0], spans=[])
    assert not nothing.any()


def test_tables_of_spans_are_kept_for_the_same_spans(
    emulated: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other arrays too, and only so many. Spans may be lists, or numbers that change later."""
    monkeypatch.setattr(_cuda, "_MOST_TABLES", 2)
    backend = CudaBackend(emulated)
    monkeypatch.setattr(_api, "choose", lambda name, library, device, wanted: backend)
    stop = np.array(3)
    cases: list[Any] = [[[0, 3]], [(0, stop)], np.array([[0, 3]]), [(0, 3), (3, 9)], [(2, 5)], [(2, 6)]]
    for index, spans in enumerate(cases):
        x, row = torch.full((9,), index + 1.0), torch.zeros(len(spans), 2)
        ps_kernels.sumsq_finite(x, row, spans=spans)
        assert row[:, 0].tolist() == [(index + 1.0) ** 2 * (last - first) for first, last in spans]
    stop += 1
    row = torch.zeros(1, 2)
    ps_kernels.sumsq_finite(torch.ones(9), row, spans=[(0, stop)])
    assert row.tolist() == [[4.0, 0.0]]
    assert [spans for spans, _ in backend._tables] == [((0, 3),), ((0, 3), (3, 9))]


def test_the_last_sums_are_halved_too(launcher: EmulatedLauncher) -> None:
    """As many blocks as no test would wait for: their sums, by themselves."""
    for count in (1, 2, 5, 511, 1024, 70_001):
        sums = torch.rand(count, generator=torch.Generator().manual_seed(count))
        padded = np.zeros(1 << (count - 1).bit_length(), np.float32)
        padded[:count] = sums.numpy()
        while padded.size > 1:
            padded = padded[: padded.size // 2] + padded[padded.size // 2 :]
        out = torch.zeros(2)
        launcher.run(("norm", "norm_total"), (1, 512), (sums.data_ptr(), count, out.data_ptr()), (0, 1))
        assert out.tolist() == [padded[0], 0]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_is_flagged(emulated: EmulatedLauncher, kind: torch.dtype, bad: float) -> None:
    for where in (0, 70_000):
        x, out = torch.zeros(70_001, dtype=kind), torch.zeros(2)
        x[where] = bad
        ps_kernels.sumsq_finite(x, out)
        assert out[1] == 1
    out = torch.zeros(2)
    ps_kernels.sumsq_finite(torch.full((3,), 1e30), out)
    assert out.tolist() == [np.inf, 0], "a square that overflows is none of them"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_kind", KINDS)
def test_gather_and_scatter_in_one_launch_each(
    emulated: EmulatedLauncher, bits: Bits, kind: torch.dtype, chunk_kind: torch.dtype
) -> None:
    rng = np.random.default_rng(5)
    lengths = [0, 1, 40_000, 0, 7, 16_384, 333, 8_193]
    gaps = rng.integers(0, 5, len(lengths))
    offsets = [int(x) for x in np.cumsum(gaps) + np.cumsum([0, *lengths[:-1]])]
    pieces = [drawn(numel, int(rng.integers(0, 8)), numel, kind) for numel in lengths]
    chunk = torch.zeros(offsets[-1] + lengths[-1] + 3, dtype=chunk_kind)
    array = as_numpy(chunk)
    ps_kernels.gather([as_numpy(piece) for piece in pieces], array, offsets)
    ps_kernels.gather(pieces, chunk, offsets)
    agree(bits, [chunk], [array])
    back = [torch.empty_like(piece) for piece in pieces]
    arrays = [as_numpy(piece) for piece in back]
    ps_kernels.scatter(array, offsets, arrays)
    ps_kernels.scatter(chunk, offsets, back)
    agree(bits, back, arrays)
    assert [name for name, _ in emulated.launched] == ["copy_pieces"] * 2


@pytest.mark.parametrize("apart", range(16))
def test_bytes_are_copied_whatever_their_alignment(launcher: EmulatedLauncher, apart: int) -> None:
    source = torch.randint(-128, 127, (40_000,), dtype=torch.int8)
    target = torch.zeros_like(source)
    batch = check_batch([source[3 + apart : 33_003 + apart]], target, [3])
    CudaBackend(launcher).copy_all(batch, scatter=False)
    assert torch.equal(target[3:33_003], source[3 + apart : 33_003 + apart])
    assert not target[:3].any()
    assert not target[33_003:].any()


def test_nothing_to_do_launches_nothing(launcher: EmulatedLauncher) -> None:
    launcher.launched.clear()
    backend = CudaBackend(launcher)
    empty = torch.empty(0)
    for tensors in ([], [empty]):
        backend.copy_all(check_batch(tensors, empty, [0] * len(tensors)), scatter=False)
        backend.copier(check_batch(tensors, empty, [0] * len(tensors)), scatter=True)()
    backend.accumulate(empty, empty, 1.0)
    backend.set_threads(3)
    assert not launcher.launched


def test_where_groups_start() -> None:
    room = torch.zeros(64)
    first = -room.data_ptr() % 16 // 4
    singles = [room[first + k :] for k in range(4)]
    halves = [torch.zeros(64, dtype=torch.float16)[k:] for k in range(4)]
    assert [split(21, [each]) for each in singles] == [(0, 5), (3, 4), (2, 4), (1, 5)]
    assert split(21, [singles[1], halves[1]]) == (3, 4)
    assert split(21, [singles[0], halves[1]]) == (0, 0), "nowhere together"
    assert split(2, [singles[1]]) == (0, 0)


def reserved(numel: int, dtype: np.dtype[Any] | type) -> np.ndarray:
    """Zeros of which only what is touched takes memory."""
    size = numel * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)


@pytest.mark.skipif(sys.platform != "linux", reason="memory cannot be reserved without being taken")
@pytest.mark.parametrize("head", [0, 1])
def test_indices_beyond_2_to_the_31(launcher: EmulatedLauncher, head: int) -> None:
    """A few blocks of the grid of a run of 2^31 + 2,051 elements: the first, and those past the last 32-bit index."""
    numel = 2**31 + 2051
    param, grad = reserved(numel + 8, np.float32), reserved(numel + 8, np.uint16)
    groups = (numel - head) // 4
    grid = -(-groups // 256)
    places = [0, 2**31 - 1, 2**31 + 1, 2**31 + 1000, numel - 1]
    grad[places] = 0x3F80
    arguments = (param.ctypes.data, grad.ctypes.data, numel, head, groups, 0.5)
    if head:  # then no address is aligned for groups, so there are none
        arguments, grid = (*arguments[:3], 0, 0, 0.5), -(-numel // 256)
    kernel = ("step", "accumulate_bfloat16")
    launcher.run(kernel, (grid, 256), arguments, (0, 1))
    launcher.run(kernel, (grid, 256), arguments, (grid - 13, 13))
    assert [param[place] for place in places] == [0.5] * 5
    assert [param[place + 1] for place in places] == [0.0] * 5
    launcher.run(kernel, (1 << 22, 256), arguments, (places[1] // (4 if not head else 1) // 256 % (1 << 22), 1))
    assert param[2**31 - 1] == 1.0, "an index reached by a stride"


@pytest.mark.skipif(sys.platform != "linux", reason="memory cannot be reserved without being taken")
def test_norms_and_copies_beyond_2_to_the_31(launcher: EmulatedLauncher) -> None:
    numel = 2**31 + 65_536 + 3
    x, sums, out = reserved(numel, np.uint16), reserved(1 << 16, np.float32), np.zeros(2, np.float32)
    x[2**31 + 5], x[numel - 1] = 0x4000, 0x4040
    arguments = (x.ctypes.data, numel, 1, sums.ctypes.data, out.ctypes.data)
    launcher.run(("norm", "norm_bfloat16"), (1 << 16, 512), arguments, (1 << 15, 2))
    assert (sums[1 << 15], sums[(1 << 15) + 1]) == (4.0, 9.0)
    target, tiles = reserved(numel, np.float32), -(-numel // (1 << 14))
    table = np.array([[x.ctypes.data], [target.ctypes.data], [numel], [3], [0]], np.int64)
    launcher.run(("copy", "copy_pieces"), (tiles, 256), (table.ctypes.data, 1, tiles), (tiles - 5, 5))
    assert (target[2**31 + 5], target[numel - 1]) == (2.0, 3.0)


RACE = """
#include "common.h"
extern "C" __global__ void good(float *out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = (float)threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}
extern "C" __global__ void bad(float *out) {
    __shared__ float other[64];
    other[threadIdx.x] = (float)threadIdx.x;
    out[threadIdx.x] = other[63 - threadIdx.x];
}
extern "C" __global__ void uneven(float *out) {
    if (threadIdx.x > 3) __syncthreads();
    out[0] = 0.0f;
}
extern "C" __global__ void crooked(float *out) {
    struct alignas(16) Four { float at[4]; };
    Four four = *reinterpret_cast<Four *>(out + 1);
    out[0] = four.at[0];
}
"""


def test_the_emulation_finds_faults(tmp_path: Path) -> None:
    """A missing barrier shows in another order; an uneven barrier and a crooked access are errors."""
    text = RACE.replace('#include "common.h"', "")
    launcher = EmulatedLauncher(libraries={"it": build(text, ("good", "bad", "uneven", "crooked"), tmp_path, "it")})

    def run(name: str) -> set[tuple[float, ...]]:
        results = set()
        for launcher.order in (0, 1, 2):
            room = torch.zeros(80)
            out = room[-room.data_ptr() % 16 // 4 :][:64]
            launcher.run(("it", name), (1, 64), (out.data_ptr(),), (0, 1))
            results.add(tuple(out.tolist()))
        return results

    assert run("good") == {tuple(float(63 - i) for i in range(64))}
    assert len(run("bad")) > 1
    with pytest.raises(AssertionError, match="not all threads"):
        run("uneven")
    with pytest.raises(AssertionError, match="not aligned"):
        run("crooked")

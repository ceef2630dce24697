"""What tests/kernels asks of every backend on the CPU, asked of the CUDA kernels on a device."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import ps_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
    pytest.mark.filterwarnings("default"),
]
KINDS = [torch.float32, torch.bfloat16, torch.float16]
WORDS = {2: torch.int16, 4: torch.int32}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for which nan it is."""
    words = WORDS[one.element_size()]
    one, other = one.cpu(), other.cpu()
    return bool(((one.view(words) == other.view(words)) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_conversions_of_all_16_bit_numbers(kind: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(kind)
    singles = torch.empty(1 << 16)
    there = singles.cuda()
    ps_kernels.gather([patterns], singles, [0], backend="torch")
    ps_kernels.gather([patterns.cuda()], there, [0], backend="cuda")
    assert same(there, singles)
    near = singles.view(torch.int32)[:, None] + torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    near = near.to(torch.int32).reshape(-1).view(torch.float32)
    halves = torch.empty(near.numel(), dtype=kind)
    halves_there = halves.cuda()
    ps_kernels.gather([near], halves, [0], backend="torch")
    ps_kernels.gather([near.cuda()], halves_there, [0], backend="cuda")
    assert same(halves_there, halves)


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_of_any_bits(step: int, decoupled: bool) -> None:
    """Parameters, states and gradients of random bits: denormals, infinities and nans among them."""
    rng = torch.Generator().manual_seed(step)
    here = [torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int32, generator=rng).view(torch.float32)
            for _ in range(4)]  # fmt: skip
    there = [each.cuda() for each in here]
    for arrays, backend in ((here, "torch"), (there, "cuda")):
        ps_kernels.adam_step(*arrays, step=step, lr=0.3, weight_decay=0.1, decoupled=decoupled, backend=backend)
    assert all(same(one, other) for one, other in zip(here, there, strict=True))


def test_the_16_bit_parameters_may_overwrite_the_gradient() -> None:
    rng = torch.Generator().manual_seed(1)
    here = [*torch.rand(3, 100_003, generator=rng), torch.rand(100_003, generator=rng).bfloat16()]
    there = [each.cuda() for each in here]
    for arrays, backend in ((here, "torch"), (there, "cuda")):
        p, m, v, g = arrays
        ps_kernels.adam_step(p, m, v, g, g, step=3, lr=0.01, backend=backend)
    assert all(same(one, other) for one, other in zip(here, there, strict=True))


def test_any_cut_gives_the_same_bits() -> None:
    rng = torch.Generator().manual_seed(2)
    whole = [each.cuda() for each in torch.rand(4, 100_000, generator=rng)]
    parts = [each.clone() for each in whole]
    ps_kernels.adam_step(*whole, step=5, lr=1e-3)
    for cut in (slice(0, 1), slice(1, 130), slice(130, 70_001), slice(70_001, 100_000)):
        ps_kernels.adam_step(*(x[cut] for x in parts), step=5, lr=1e-3)
    assert all(same(one, other) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_is_flagged_wherever_it_is(kind: torch.dtype, bad: float) -> None:
    for where in (0, 255, 4096, 65_535, 65_536, 70_000):
        x, out = torch.zeros(70_001, dtype=kind, device="cuda"), torch.zeros(2, device="cuda")
        x[where] = bad
        ps_kernels.sumsq_finite(x, out)
        assert out[1] == 1
    x[where] = 1
    ps_kernels.sumsq_finite(x, out.zero_())
    assert out.tolist() == [1, 0]


def test_squares_that_overflow_are_not_flagged() -> None:
    out = torch.zeros(2, device="cuda")
    ps_kernels.sumsq_finite(torch.full((100_000,), 1e30, device="cuda"), out)
    assert out.tolist() == [float("inf"), 0]


@pytest.mark.parametrize("apart", range(16))
def test_bytes_are_copied_whatever_their_alignment(apart: int) -> None:
    source = torch.randint(-128, 127, (40_000,), dtype=torch.int8, device="cuda")
    target = torch.zeros_like(source)
    ps_kernels.gather([source[3 + apart : 33_003 + apart]], target, [3])
    assert torch.equal(target[3:33_003], source[3 + apart : 33_003 + apart])
    assert not target[:3].any()
    assert not target[33_003:].any()


def test_pieces_on_one_stream_after_another() -> None:
    """Their table was made on the default stream; the memory is another's only once every stream is done with it."""
    tensors = [torch.full((1000 + index,), float(index), device="cuda") for index in range(50)]
    offsets = [sum(each.numel() for each in tensors[:index]) for index in range(50)]
    chunk = torch.zeros(offsets[-1] + tensors[-1].numel(), device="cuda")
    pieces = ps_kernels.Pieces(tensors, chunk, offsets)
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            chunk.zero_()
            pieces.gather()
        stream.synchronize()
        assert torch.equal(chunk, torch.cat(tensors))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        chunk.fill_(7.0)
        pieces.scatter()
    del pieces
    torch.full((5 * 50,), -1, dtype=torch.int64, device="cuda")  # would take the table's place if that were free
    torch.cuda.synchronize()
    assert all(bool((each == 7).all()) for each in tensors)


def test_nothing_at_all() -> None:
    empty, out = torch.empty(0, device="cuda"), torch.zeros(2, device="cuda")
    ps_kernels.sumsq_finite(empty, out)
    ps_kernels.accumulate(empty, empty.clone())
    ps_kernels.gather([], empty, [])
    ps_kernels.adam_step(empty, empty.clone(), empty.clone(), empty.clone(), step=1, lr=0.1)
    assert out.tolist() == [0, 0]


def test_indices_beyond_2_to_the_31() -> None:
    numel = 2**31 + 2051
    if torch.cuda.mem_get_info()[0] < 12 * numel:
        pytest.skip("less than 24 GiB of the device's memory are free")
    grad = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    places = [0, 2**31 - 1, 2**31 + 1, numel - 1]
    grad[places] = 2.0
    total, sums = torch.zeros(2, device="cuda"), torch.zeros(numel, device="cuda")
    ps_kernels.sumsq_finite(grad, total)
    ps_kernels.accumulate(sums, grad, scale=0.5)
    assert total.tolist() == [16, 0]
    assert sums[places].tolist() == [1] * 4
    assert sums.sum(dtype=torch.float64) == 4
    ps_kernels.gather([sums], grad, [0])
    assert grad[places].tolist() == [1] * 4


def test_backends_that_cannot_take_cuda_tensors_say_so() -> None:
    with pytest.raises(ps_kernels.InvalidArgument, match="backend 'numpy': cannot work on param"):
        ps_kernels.sgd_step(torch.ones(2, device="cuda"), None, torch.ones(2, device="cuda"), lr=1, backend="numpy")

"""ps-kernels beside what else could do the work, side by side in one run. Ratios are what counts; none gates anything.

``PS_BENCH_NUMEL`` sets the length of the arrays; the figures in docs/kernels.md are for 200 million.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import ps_kernels

NUMEL = int(os.environ.get("PS_BENCH_NUMEL", "4194304"))
PIECE_NUMEL = 1 << 17
SMALL_NUMEL, SMALL_COUNT = 1 << 12, 1000
THREADS = sorted({1, min(2, torch.get_num_threads())})
LEVELS = [name for name, state in ps_kernels.backends().items() if state == "available"]
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    rng = torch.Generator().manual_seed(1)
    p, m, v, g = (torch.rand(NUMEL, generator=rng) for _ in range(4))
    return p, m, v, g.bfloat16(), torch.empty(NUMEL, dtype=torch.bfloat16)


@pytest.fixture(params=THREADS, ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    ps_kernels.set_threads(request.param)
    yield request.param
    ps_kernels.set_threads(before)


def three_passes(arrays: Arrays, piece_numel: int) -> None:
    """Cast the gradient, PyTorch's fused step, cast the parameters: a piece at a time."""
    p, m, v, g, out = arrays
    step = [torch.tensor(3.0)]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    for start in range(0, NUMEL, piece_numel):
        piece = slice(start, start + piece_numel)
        grads = [g[piece].float()]
        torch._fused_adamw_(
            [p[piece]], grads, [m[piece]], [v[piece]], [], step, amsgrad=False, maximize=False, **numbers
        )
        out[piece].copy_(p[piece])


def streams(arrays: Arrays) -> None:
    """The 28 bytes of a step with next to no arithmetic: two sums over singles, and a copy of 16-bit numbers."""
    p, m, v, g, out = arrays
    for start in range(0, NUMEL, PIECE_NUMEL):
        piece = slice(start, start + PIECE_NUMEL)
        p[piece].neg_()
        m[piece].neg_()
        v[piece].neg_()
        out[piece].copy_(g[piece])


@pytest.mark.benchmark(group="adam step")
@pytest.mark.parametrize("backend", [name for name in LEVELS if name in ("avx512", "avx2", "neon", "scalar")])
def test_adam_of_ps_kernels(benchmark: Any, arrays: Arrays, threads: int, backend: str) -> None:
    benchmark(ps_kernels.adam_step, *arrays, step=3, lr=1e-3, backend=backend)


@pytest.mark.benchmark(group="adam step")
def test_adam_of_the_torch_fallback(benchmark: Any, arrays: Arrays, threads: int) -> None:
    benchmark(ps_kernels.adam_step, *arrays, step=3, lr=1e-3, backend="torch")


@pytest.mark.benchmark(group="adam step")
@pytest.mark.parametrize("piece_numel", [PIECE_NUMEL, NUMEL], ids=["pieces", "whole"])
def test_adam_of_torch_in_three_passes(benchmark: Any, arrays: Arrays, threads: int, piece_numel: int) -> None:
    benchmark(three_passes, arrays, piece_numel)


@pytest.mark.benchmark(group="adam step")
def test_streams_without_arithmetic(benchmark: Any, arrays: Arrays, threads: int) -> None:
    benchmark(streams, arrays)


@pytest.mark.benchmark(group="adam step")
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_adam_of_deepspeed(benchmark: Any, arrays: Arrays) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    p, _, _, g, out = arrays
    parameter = torch.nn.Parameter(p)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3)

    def step() -> None:
        parameter.grad = g.float()
        optimizer.step()
        out.copy_(parameter.detach())

    benchmark(step)


@pytest.mark.benchmark(group="sum of squares")
def test_sum_of_squares_of_ps_kernels(benchmark: Any, arrays: Arrays, threads: int) -> None:
    benchmark(ps_kernels.sumsq_finite, arrays[3], torch.zeros(2))


@pytest.mark.benchmark(group="sum of squares")
def test_reading_only(benchmark: Any, arrays: Arrays, threads: int) -> None:
    """The largest of the same bytes taken as whole numbers: the least work that reads them all."""
    benchmark(arrays[3].view(torch.int32).amax)


@pytest.mark.benchmark(group="sum of squares")
def test_norm_of_torch(benchmark: Any, arrays: Arrays, threads: int) -> None:
    benchmark(lambda: torch.linalg.vector_norm(arrays[3], dtype=torch.float32))


def small() -> tuple[list[torch.Tensor], torch.Tensor, list[int]]:
    tensors = [torch.ones(SMALL_NUMEL, dtype=torch.bfloat16) for _ in range(SMALL_COUNT)]
    offsets = [index * SMALL_NUMEL for index in range(SMALL_COUNT)]
    return tensors, torch.ones(SMALL_NUMEL * SMALL_COUNT, dtype=torch.bfloat16), offsets


def loop_of_copies() -> Callable[[], None]:
    tensors, chunk, offsets = small()

    def copy() -> None:
        for tensor, offset in zip(tensors, offsets, strict=True):
            chunk[offset : offset + SMALL_NUMEL].copy_(tensor)

    return copy


@pytest.mark.benchmark(group="1,000 small tensors")
def test_gather(benchmark: Any, threads: int) -> None:
    benchmark(ps_kernels.Pieces(*small()).gather)


@pytest.mark.benchmark(group="1,000 small tensors")
def test_scatter(benchmark: Any, threads: int) -> None:
    benchmark(ps_kernels.Pieces(*small()).scatter)


@pytest.mark.benchmark(group="1,000 small tensors")
def test_gather_checked_each_time(benchmark: Any, threads: int) -> None:
    benchmark(ps_kernels.gather, *small())


@pytest.mark.benchmark(group="1,000 small tensors")
def test_a_loop_of_copies(benchmark: Any, threads: int) -> None:
    benchmark(loop_of_copies())


@pytest.mark.benchmark(group="1,000 small tensors")
def test_one_copy_of_as_much(benchmark: Any, threads: int) -> None:
    _, chunk, _ = small()
    benchmark(torch.empty_like(chunk).copy_, chunk)

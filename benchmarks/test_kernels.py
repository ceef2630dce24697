"""ps-kernels beside what else could do the work, side by side in one run. Ratios are what counts; none gates anything.

``PS_BENCH_NUMEL`` sets the length of the arrays; the figures in docs/kernels.md are for 200 million, printed by
kernels_step.py, whose contenders are timed here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kernels_step as step
import ps_kernels

NUMEL = int(os.environ.get("PS_BENCH_NUMEL", "4194304"))
SMALL_NUMEL, SMALL_COUNT = 1 << 12, 1000
THREADS = sorted({1, min(2, torch.get_num_threads())})
every_library = step.Threads()
WHY_NO_DEEPSPEED = step.why_no_deepspeed()
OURS = [f"ps-kernels {level}" for level in ("avx512", "avx2", "neon") if ps_kernels.backends()[level] == "available"]
OTHERS = [f"{who}, {how}" for who in ("PyTorch", "DeepSpeed") for how in (*step.PIECES, "whole", "whole, new buffer")]


@pytest.fixture(scope="module")
def arrays() -> Any:
    return step.Arrays.made(NUMEL)


@pytest.fixture(scope="module")
def contenders(arrays: Any) -> dict[str, Callable[[], None]]:
    return dict(step.contenders(arrays, every_library, WHY_NO_DEEPSPEED))


@pytest.fixture(params=THREADS, ids=lambda count: f"{count}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    every_library.set(request.param)
    yield request.param
    every_library.set(before)


@pytest.mark.benchmark(group="adam step")
@pytest.mark.parametrize("name", [*OURS, "streams without arithmetic", *OTHERS])
def test_adam(benchmark: Any, contenders: dict[str, Callable[[], None]], threads: int, name: str) -> None:
    if name not in contenders:
        pytest.skip(f"WITHOUT DEEPSPEED: {WHY_NO_DEEPSPEED}")
    benchmark(contenders[name])


@pytest.mark.benchmark(group="adam step")
@pytest.mark.parametrize("backend", ["scalar", "torch"])
def test_adam_of_fallbacks(benchmark: Any, arrays: Any, threads: int, backend: str) -> None:
    if ps_kernels.backends()[backend] != "available":
        pytest.skip(ps_kernels.backends()[backend])
    benchmark(step.of_ps_kernels(arrays, backend))


@pytest.mark.benchmark(group="sum of squares")
def test_sum_of_squares_of_ps_kernels(benchmark: Any, arrays: Any, threads: int) -> None:
    benchmark(ps_kernels.sumsq_finite, arrays.g, torch.zeros(2))


@pytest.mark.benchmark(group="sum of squares")
def test_reading_only(benchmark: Any, arrays: Any, threads: int) -> None:
    """The largest of the same bytes taken as whole numbers: the least work that reads them all."""
    benchmark(arrays.g.view(torch.int32).amax)


@pytest.mark.benchmark(group="sum of squares")
def test_norm_of_torch(benchmark: Any, arrays: Any, threads: int) -> None:
    benchmark(lambda: torch.linalg.vector_norm(arrays.g, dtype=torch.float32))


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

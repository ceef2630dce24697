"""ps-kernels beside what PyTorch offers, in one run; the second is the yardstick of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ps_kernels

NUMEL = 1 << 22
Arrays = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def arrays() -> Arrays:
    rng = torch.Generator().manual_seed(1)
    p, m, v, g = (torch.rand(NUMEL, generator=rng) for _ in range(4))
    return p, m, v, g.bfloat16(), torch.empty(NUMEL, dtype=torch.bfloat16)


def three_passes(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    """Cast the gradient, step, cast the parameters."""
    step = [torch.tensor(3.0)]
    grads = [g.float()]
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_([p], grads, [m], [v], [], step, amsgrad=False, maximize=False, **numbers)
    out.copy_(p)


@pytest.mark.benchmark(group="adam step, 4M parameters")
def test_adam_of_ps_kernels(benchmark: Any, arrays: Arrays) -> None:
    benchmark(ps_kernels.adam_step, *arrays, step=3, lr=1e-3)


@pytest.mark.benchmark(group="adam step, 4M parameters")
def test_adam_of_torch_in_three_passes(benchmark: Any, arrays: Arrays) -> None:
    benchmark(three_passes, *arrays)


@pytest.mark.benchmark(group="sum of squares, 4M elements")
def test_sum_of_squares_of_ps_kernels(benchmark: Any, arrays: Arrays) -> None:
    benchmark(ps_kernels.sumsq_finite, arrays[3], torch.zeros(2))


@pytest.mark.benchmark(group="sum of squares, 4M elements")
def test_norm_of_torch(benchmark: Any, arrays: Arrays) -> None:
    benchmark(lambda: torch.linalg.vector_norm(arrays[3], dtype=torch.float32))

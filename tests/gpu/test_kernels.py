"""PyTorch's backend on a CUDA device gives the bits it gives on the CPU."""

from __future__ import annotations

import pytest
import torch

import ps_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
NUMEL = 300_001


def drawn() -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    p, m, g = (torch.randn(NUMEL, generator=rng) for _ in range(3))
    return [p, m, torch.rand(NUMEL, generator=rng), g.bfloat16(), torch.empty(NUMEL, dtype=torch.bfloat16)]


def test_adam() -> None:
    here = drawn()
    there = [each.cuda() for each in here]
    for step in (1, 2, 3):
        for arrays in (here, there):
            ps_kernels.adam_step(*arrays, step=step, lr=1e-2, weight_decay=0.1, grad_scale=0.3, backend="torch")
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))


def test_sgd_and_accumulate() -> None:
    here = drawn()
    there = [each.cuda() for each in here]
    for p, m, v, g, out in (here, there):
        ps_kernels.accumulate(v, g, scale=0.5, backend="torch")
        ps_kernels.sgd_step(p, m, v, out, lr=0.1, momentum_decay=0.9, weight_decay=0.1, backend="torch")
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))


def test_sum_of_squares() -> None:
    x = drawn()[3]
    here, there = torch.zeros(2), torch.zeros(2, device="cuda")
    ps_kernels.sumsq_finite(x, here)
    ps_kernels.sumsq_finite(x.cuda(), there, backend="torch")
    assert torch.equal(here, there.cpu())


def test_devices_are_not_mixed() -> None:
    p, m, v, g, _ = drawn()
    with pytest.raises(ps_kernels.InvalidArgument, match="grad: expected a torch array on cpu"):
        ps_kernels.adam_step(p, m, v, g.cuda(), step=1, lr=0.1)

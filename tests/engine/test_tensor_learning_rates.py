"""Learning rates that are tensors, with the optimizers of ``torch.optim``: PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _runs import let_go
from ps_core import Budget, TorchOptimizer
from ps_core.engine import chunked


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "NAdam", "Adamax", "ASGD", "RMSprop", "SGD", "Adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_that_is_a_tensor(kind: str, dtype: torch.dtype) -> None:
    """PyTorch computes with it in its type; it is read at each step, also if it was written to."""

    def trained(make: Callable[[nn.Module, Tensor], tuple[nn.Module, Any]]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        rate = torch.tensor(0.0123, dtype=dtype)
        model, optimizer = make(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)), rate)
        for step in range(5):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"].mul_(0.7)
        found = {name: value.clone() for name, value in model.state_dict().items()}
        if make is not plain:
            let_go(model)
        return found

    def plain(model: nn.Module, rate: Tensor) -> tuple[nn.Module, Any]:
        return model, getattr(torch.optim, kind)(model.parameters(), lr=rate, foreach=False)

    def under_a_budget(model: nn.Module, rate: Tensor) -> tuple[nn.Module, Any]:
        spec = TorchOptimizer(getattr(torch.optim, kind), lr=rate)
        return chunked(model, spec, device="emulated", budget=Budget(device="24KiB", host="1MiB"), precision="fp32")

    wanted, found = trained(plain), trained(under_a_budget)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())

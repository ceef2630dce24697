"""Gradients whose memory is not what they say: negated by a flag, absent, or one element for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import AdamW, Budget
from ps_core.engine import chunked, release

NUMEL, STEPS = 40, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUDGETS = {"cpu": Budget(host="64MiB"), "emulated": Budget(device="64MiB", host="64MiB")}


def negated(dtype: torch.dtype) -> Tensor:
    return torch._neg_view(torch.arange(1.0, NUMEL + 1).to(dtype))


def without_memory(dtype: torch.dtype) -> Tensor:
    return torch._efficientzerotensor(NUMEL, dtype=dtype)


def of_one_element(dtype: torch.dtype) -> Tensor:
    return torch.full((1,), 0.5, dtype=dtype).expand(NUMEL)


class Odd(torch.autograd.Function):
    """A sum whose gradient is what ``made`` returns."""

    # Any: torch gives these no types.
    @staticmethod
    def forward(ctx: Any, weight: Tensor, made: Callable[[], Tensor]) -> Tensor:
        ctx.made = made
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.made(), None


class Model(nn.Module):
    def __init__(self, made: Callable[[], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.weight, self.linear = made, nn.Parameter(torch.randn(NUMEL)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = Odd.apply(self.weight, self.made)
        return summed.float() + self.linear(x).float().sum()


def trained(device: str, precision: str, accumulation: int, made: Callable[[], Tensor]) -> dict[str, Tensor]:
    model, optimizer = chunked(
        Model(made), AdamW(lr=0.01), device=device, precision=precision, budget=BUDGETS[device],
        accumulation_steps=accumulation,
    )  # fmt: skip
    x = torch.ones(2, 4, dtype=DTYPES[precision])
    for _ in range(STEPS):
        for _ in range(accumulation):
            (model(x) / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    release(model)
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("device", BUDGETS)
@pytest.mark.parametrize("odd", [negated, without_memory, of_one_element])
def test_such_a_gradient_trains_as_its_copy_does(
    odd: Callable[[torch.dtype], Tensor], device: str, precision: str, accumulation: int
) -> None:
    """Kernels read memory: a negated gradient trained the other way, and one without memory raised in the step."""
    dtype = DTYPES[precision]
    found = trained(device, precision, accumulation, lambda: odd(dtype))
    wanted = trained(device, precision, accumulation, lambda: odd(dtype).clone())
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert not torch.equal(wanted["weight"], Model(lambda: odd(dtype)).weight.to(dtype)), "it was stepped"


class Stacked(nn.Module):
    """Two parameters for which autograd makes views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(NUMEL)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.stack((self.one, self.other)).sum(0)).sum()


@pytest.mark.parametrize("device", BUDGETS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_share_memory_are_summed_apart(device: str, precision: str, clipped: bool) -> None:
    """PyTorch's own sums are wrong here: it adds to the one, and so to the other."""
    model, optimizer = chunked(
        Stacked(), AdamW(), device=device, precision=precision, budget=BUDGETS[device], max_grad_norm=None
    )
    try:
        for factor in (1.0, 2.0):
            model(torch.full((NUMEL,), factor, dtype=DTYPES[precision])).backward()
            if clipped:
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
        expected = torch.full((NUMEL,), 1.25 if clipped else 3.0)
        for parameter in model.parameters():
            assert torch.equal(parameter.grad.float().cpu(), expected)
        optimizer.zero_grad()
    finally:
        release(model)

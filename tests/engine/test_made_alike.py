"""Tensors made like a parameter: of its shape, strides, type and device, and without fetching its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import AdamW, Budget
from ps_core.engine import HostEmbedding, chunked, release, statistics
from ps_core.engine._parameters.function_kinds import SHAPED

MAKERS: dict[str, Callable[[Any], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": lambda each: torch.ones_like(each, dtype=torch.float64),
    "full_like": lambda each: torch.full_like(each, 3.0, requires_grad=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda each: torch.randn_like(each, device="cpu"),
    "randint_like": lambda each: torch.randint_like(each, 9),
    "new_zeros": lambda each: each.new_zeros(2, 3),
    "new_ones": lambda each: each.new_ones((4,), dtype=torch.int32),
    "new_full": lambda each: each.new_full((2,), 1.5),
    "new_tensor": lambda each: each.new_tensor([1.0, 2.0]),
    "empty_like": lambda each: torch.empty_like(each, memory_format=torch.contiguous_format).fill_(1.0),
    "new_empty": lambda each: each.new_empty(3).fill_(2.0),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = HostEmbedding(10, 4)
        self.convolution = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(4, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKERS)
def test_made_without_fetching(name: str, precision: str) -> None:
    make, dtype = MAKERS[name], {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    plain = Net().to(dtype)
    budget = Budget(device="64KiB", host="1MiB")
    model, _ = chunked(Net(), AdamW(), device="emulated", precision=precision, budget=budget)
    try:
        for managed, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.manual_seed(0)
            meant = make(other)
            torch.manual_seed(0)
            found = make(managed)
            assert type(found) is Tensor
            assert torch.equal(found, meant)
            assert (found.dtype, found.stride(), found.requires_grad, found.device) == (
                meant.dtype,
                meant.stride(),
                meant.requires_grad,
                meant.device,
            )
        assert statistics(model).fetches == 0
    finally:
        release(model)


def test_every_function_is_tried() -> None:
    assert {function.__name__ for function in SHAPED} == set(MAKERS)

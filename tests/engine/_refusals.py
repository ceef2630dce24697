"""Refusals of uses, each provoked by a case that then follows what its message says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget, UnsupportedParameter
from ps_core.engine import chunked, release

X = torch.ones(2, 4)
IDS = torch.arange(6).view(2, 3)
CASES: dict[str, Callable[[], None]] = {}
"""By a part of the message that no other refusal has."""


def case(text: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[text] = function
        return function

    return add


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(UnsupportedParameter) as caught:
        yield
    assert text in str(caught.value)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def managed(model: nn.Module | None = None, *, trained: bool = True) -> Any:
    where = {"device": "emulated", "budget": Budget(device="64KiB", host="1MiB")}
    return chunked(net() if model is None else model, SGD(lr=0.1) if trained else None, precision="fp32", **where)


def train(model: nn.Module, optimizer: Any, x: torch.Tensor = X) -> None:
    """A step that changes something, under management or not."""
    before = [value.clone() for value in model.state_dict().values()]
    model(x).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not all(torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True))


def manage_and_train(model: nn.Module, x: torch.Tensor = X) -> None:
    managed_model, optimizer = managed(model)
    train(managed_model, optimizer, x)
    release(managed_model)

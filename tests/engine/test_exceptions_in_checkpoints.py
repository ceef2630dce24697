"""An exception within a checkpoint leaves no hooks, also where PyTorch keeps them as long as the exception."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from _cases import finish, rows, square
from _models import Residual
from _runs import HOST, chunked_model
from ps_core import Budget
from ps_core.engine._parameters.saved_tensors import active_pair

OLDER = """
def checkpoint(function, *args):
    gen = _checkpoint_without_reentrant_generator(function, True, noop_context_fn, "default", False, True, *args)
    next(gen)
    ret = function(*args)
    try:
        next(gen)
    except StopIteration:
        return ret
"""
"""Runs a checkpoint as PyTorch before 2.13 does: an exception leaves its generator, and so its hooks, open."""


def older() -> Callable[..., Tensor]:
    namespace: dict[str, Any] = dict(vars(checkpoints))
    exec(OLDER, namespace)
    found: Callable[..., Tensor] = namespace["checkpoint"]
    return found


class Net(nn.Module):
    """Blocks in checkpoints, the second of which is in a checkpoint of two others."""

    def __init__(self, checkpoint: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = Residual(), Residual(), Residual()
        self.checkpoint = checkpoint
        self.fails = False

    def inner(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("mine")
        return self.second(x)

    def both(self, x: Tensor) -> Tensor:
        return self.third(self.checkpoint(self.inner, x))

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(self.both, self.checkpoint(self.first, x))


def losses(checkpoint: Callable[..., Tensor], budget: Budget, *, fails: bool) -> list[Tensor]:
    """Losses of four steps; before the third, ``fails``: a pass raises, and the exception is kept to the end."""
    torch.manual_seed(0)
    kept, found = [], []
    with chunked_model(Net(checkpoint), device="emulated", budget=budget) as (model, optimizer):
        for index in range(4):
            if fails and index == 2:
                model.fails = True
                with pytest.raises(RuntimeError, match="mine") as error:
                    model(*rows(9))
                kept.append(error)
                assert active_pair(True) is None
                model.fails = False
            loss = square(model, *rows(index))
            assert active_pair(True) is None
            loss.backward()
            kept.clear()
            finish(optimizer)
            found.append(loss.detach())
        assert active_pair(True) is None
    return found


@pytest.mark.parametrize(
    "checkpoint", [older(), partial(checkpoints.checkpoint, use_reentrant=False)], ids=["older", "this"]
)
def test_no_hooks_are_left(checkpoint: Callable[..., Tensor]) -> None:
    budget = Budget(device="64KiB", host=HOST)
    assert losses(checkpoint, budget, fails=True) == losses(checkpoint, budget, fails=False)

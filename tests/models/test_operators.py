"""What a training step computes, operator by operator: a block of ours does nothing that a plain one does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models_figures as figures

LENGTH, VOCABULARY = 16, 64


class Counted(TorchDispatchMode):
    """Operators that make or change something; views are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = func._schema.returns
        if not any(row.alias_info is not None and not row.alias_info.is_write for row in rows):
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(make: Callable[..., Callable[[], Any]], layers: int, dtype: torch.dtype) -> Counter[str]:
    """Of a whole step: forward, backward and optimizer."""
    shape = figures.Shape(layers=layers, hidden=32, heads=2, vocabulary=VOCABULARY, batch=2, length=LENGTH)
    step = make(shape, dtype, torch.zeros(2, LENGTH, dtype=torch.long))
    step()
    with Counted() as counted:
        step()
    return counted.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_a_plain_block(dtype: torch.dtype) -> None:
    plain, ours = (operators(make, 3, dtype) - operators(make, 2, dtype) for make in (figures.plain, figures.ours))
    assert ours == plain
    assert ours["addmm"] == 4
    assert sum(ours.values()) < 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_logits_cost_no_more_than_their_change_of_type(dtype: torch.dtype) -> None:
    whole = partial(figures.ours, loss_chunk_tokens=None)
    beyond = operators(whole, 1, dtype) - operators(figures.plain, 1, dtype)
    there_and_back = 0 if dtype is torch.float32 else 2
    assert beyond == Counter({"constant_pad_nd": 1, "_to_copy": there_and_back}) + Counter()


def test_chunks_multiply_the_loss_alone() -> None:
    """One more chunk costs its own product with the table, both gradients', and what is small beside them."""
    counts = [operators(partial(figures.ours, loss_chunk_tokens=rows), 1, torch.bfloat16) for rows in (16, 8)]
    beyond = counts[1] - counts[0]
    assert beyond["mm"] == 2 * 3
    assert sum(beyond.values()) <= 2 * 28
    assert not beyond["embedding_dense_backward"] + beyond["native_layer_norm"]

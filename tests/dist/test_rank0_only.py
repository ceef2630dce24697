"""`rank0_only`: all ranks make state dicts, and one keeps the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _crew import Crew
from ps_core import AdamW, Budget
from ps_core.engine import chunked, rank0_only


def stepped(collectives: Any) -> tuple[Any, Any]:
    """A model and its optimizer after a step, in 16 bits, so that there are masters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    model, optimizer = chunked(
        model, AdamW(lr=0.1), device="emulated", budget=Budget(device="1MiB", host="4MiB"), collectives=collectives
    )
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Every tensor of both state dicts but the counts of steps."""
    entries = optimizer.state_dict()["state"].values()
    states = [value for entry in entries for key, value in entry.items() if key != "step"]
    assert len(states) == 12
    return [*model.state_dict().values(), *states]


def kept_by_one(collectives: Any) -> None:
    model, optimizer = stepped(collectives)
    whole = tensors(model, optimizer)
    with rank0_only(model):
        with pytest.raises(KeyError), rank0_only(model):
            raise KeyError
        found = tensors(model, optimizer)
    again = tensors(model, optimizer)
    for each, value, after in zip(found, whole, again, strict=True):
        assert torch.equal(after, value)
        assert not after.is_meta
        assert (each.shape, each.dtype) == (value.shape, value.dtype)
        if collectives.process:
            assert each.is_meta
        else:
            assert torch.equal(each, value)


def test_rank_0_alone_keeps_the_values(two: Crew) -> None:
    two.run(kept_by_one)


def test_so_does_the_first_of_all_copies(two: Crew) -> None:
    two.run(kept_by_one, replicate=2)


def test_one_process_keeps_them() -> None:
    model, optimizer = stepped(None)
    whole = tensors(model, optimizer)
    with rank0_only(model):
        assert all(map(torch.equal, tensors(model, optimizer), whole))

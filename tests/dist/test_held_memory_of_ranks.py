"""On ranks, too, the error says which tensors keep the memory of parameters in use, and what it names works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, materialized, release


def reads(each: Together) -> float:
    model, seeded = nn.Sequential(*[nn.Linear(96, 96) for _ in range(10)]), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=seeded)
    budget = Budget(device=256 * 2**10, host="64MiB")
    model, optimizer = chunked(
        model, AdamW(), precision="fp32", device="emulated", budget=budget, collectives=each, max_grad_norm=1.0
    )
    for _ in range(2):
        model(torch.ones(4, 96)).square().mean().backward()
        optimizer.step()
    with pytest.raises(DoesNotFit, match=r"materialized\(model\).* '0\.weight' and 13 other parameters") as caught:
        [parameter.data for parameter in model.parameters()]
    del caught
    with materialized(model):
        norm = sum(float(parameter.data.square().sum()) for parameter in model.parameters())
    model(torch.ones(4, 96)).square().mean().backward()
    optimizer.step()
    release(model)
    return norm


def test_ranks_that_read_all_parameters_are_told_what_is_in_use() -> None:
    first, second = run(2, reads)[0]
    assert first == second > 0

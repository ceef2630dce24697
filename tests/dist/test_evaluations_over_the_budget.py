"""An evaluation takes more memory than the common plan leaves free: on every rank, or on one of them."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, run
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics

STEPS, LOOKS, SAMPLES = 4, 2, 100


class Sampling(nn.Module):
    """Layers before a head that looks at each row many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor, samples: int = 1) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.repeat(samples, 1))


torch.manual_seed(0)
MADE = Sampling()


def train(model: Any, optimizer: Any) -> None:
    for _ in range(STEPS):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated(each: Together, larger: tuple[int, ...]) -> tuple[int, int, int]:
    """Return how many evaluations raised, how many passes left the plan, and how many later passes followed it."""
    budget, options = Budget(device="200KiB", host="64MiB"), Options(group_bytes="16KiB")
    told: dict[str, Any] = {"device": "emulated", "precision": "fp32", "budget": budget, "options": options}
    model, optimizer = chunked(deepcopy(MADE), AdamW(), collectives=each, **told)
    train(model, optimizer)
    raised = 0
    for _ in range(LOOKS):
        try:
            with torch.no_grad():
                model(torch.ones(8, 64), SAMPLES if each.mesh.rank in larger else 1)
        except DoesNotFit:
            raised += 1
    before = statistics(model)
    train(model, optimizer)
    after = statistics(model)
    release(model)
    return raised, after.divergences, after.planned_passes - before.planned_passes


@pytest.mark.parametrize("larger", [(0, 1), (1,)], ids=["every rank", "one rank"])
def test_it_raises_where_it_does_not_fit_and_training_goes_on_by_the_plan(larger: tuple[int, ...]) -> None:
    for rank, found in enumerate(run(2, partial(evaluated, larger=larger))[0]):
        raised = LOOKS if rank in larger else 0
        assert found == (raised, raised, STEPS)

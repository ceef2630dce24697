"""Blocks that are recomputed hold on to several groups at once; plans for little memory leave these where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _models import VOCABULARY, WIDTH, Residual
from _reference import Make, Result, Settings
from _runs import check_same, managed, stand_in, tightest
from ps_core import AdamW, Budget, Options
from ps_core.engine import statistics
from ps_core.engine._parameters.managed_parameter import ManagedParameter

STEPS = 4


class Recomputed(nn.Module):
    """Blocks of several groups each, every one checkpointed; norms keep views of their weights, as LLaMA's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(Residual(), nn.RMSNorm(WIDTH), Residual()) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def training(missed: list[int]) -> Callable[[Make], list[Tensor]]:
    """Some steps; after each, how often the model has left its plan so far."""

    def loop(make: Make) -> list[Tensor]:
        model, optimizer = make(Recomputed(), AdamW(lr=1e-3))
        losses = []
        for index in range(STEPS):
            tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(index))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if isinstance(model.head.weight, ManagedParameter):
                missed.append(statistics(model).divergences)
        return losses

    return loop


@pytest.mark.parametrize(("precision", "accumulation_steps"), [("fp32", 1), ("bf16", 2)])
def test_a_block_that_is_recomputed_stays_in_place_under_the_tightest_plan(
    precision: str, accumulation_steps: int
) -> None:
    options = Options(group_bytes=4096, poison=True)
    settings = Settings(precision=precision, accumulation_steps=accumulation_steps, options=options)
    missed: list[int] = []

    def attempt(size: int) -> Result:
        missed.clear()
        return managed(training(missed), settings, stand_in, Budget(device=size, host="64MiB"))

    size, _ = tightest(attempt)
    got = attempt(size)
    assert missed == [0] * STEPS
    assert got.statistics[0].planned_passes >= STEPS - 1
    assert got.evictions > 0
    check_same(training([]), settings, got)

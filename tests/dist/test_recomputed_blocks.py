"""Ranks whose blocks are recomputed, in little memory: a recorded pass has what is held, so its plan is followed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from _models import VOCABULARY, Language
from _one_process import adds_like
from _threads import Together, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics

STEPS = 5


def made(each: Together | None, precision: str, budget: Budget, parts: int) -> Any:
    """A model whose first pass is not foreseen, since it returns no loss."""
    model, drawn = Language(layers=4, checkpointing=True), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=drawn)  # ranks are threads, which share PyTorch's own generator
    return chunked(
        model,
        AdamW(lr=1e-2),
        precision=precision,
        device="cpu" if each is None else "emulated",
        budget=budget,
        accumulation_steps=parts,
        collectives=each,
        options=Options(group_bytes=3000, poison=each is not None),
    )


def passed(model: nn.Module, step: int, part: int, count: int) -> float:
    tokens = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(100 * step + part))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) / count
    loss.backward()
    return float(loss.detach())


def train(each: Together, precision: str, kib: int) -> None:
    model, optimizer = made(each, precision, Budget(device=f"{kib}KiB", host="16MiB"), 1)
    single, reference = made(None, precision, Budget(host="16MiB"), max(2, each.ranks))
    for step in range(STEPS):
        passed(model, step, each.rank, each.ranks)
        one = partial(passed, single, step, count=each.ranks)
        adds_like(each.mesh, single, reference, one, each.ranks, rounds=precision != "fp32")
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), step
    told = statistics(model)
    assert told.divergences == 0, told.last_divergence
    assert told.planned_passes == STEPS - 1
    release(model)
    release(single)


@pytest.mark.parametrize(
    ("ranks", "precision", "kib"),
    [(2, "fp32", 96), (2, "fp32", 108), (2, "bf16", 48), (2, "bf16", 54), (3, "bf16", 48)],
)
def test_a_recorded_pass_has_what_recomputed_blocks_hold(ranks: int, precision: str, kib: int) -> None:
    run(ranks, train, precision, kib)

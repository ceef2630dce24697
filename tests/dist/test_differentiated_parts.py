"""Several ranks whose models differentiate a part within another backward pass: the bits of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from _differentiated import MODELS, WIDTH
from _one_process import adds_like, check_weights
from _threads import Together, run
from _zero_cases import states
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics

STEPS = 4


def made(each: Together | None, name: str, precision: str, parts: int) -> Any:
    model, drawn = MODELS[name](), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=drawn)  # ranks are threads, which share PyTorch's own generator
    return chunked(
        model,
        AdamW(lr=1e-2),
        precision=precision,
        device="cpu" if each is None else "emulated",
        budget=Budget(host="16MiB") if each is None else Budget(device="128KiB", host="16MiB"),
        accumulation_steps=parts,
        collectives=each,
        options=Options(group_bytes=3000, poison=each is not None),
    )


def passed(model: nn.Module, step: int, part: int, count: int) -> float:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + part))
    loss = model(x.to(next(model.parameters()).dtype)).float().square().mean() / count
    loss.backward()
    return float(loss.detach())


def train(each: Together, name: str, precision: str) -> None:
    model, optimizer = made(each, name, precision, 1)
    single, reference = made(None, name, precision, max(2, each.ranks))
    for step in range(STEPS):
        passed(model, step, each.rank, each.ranks)
        one = partial(passed, single, step, count=each.ranks)
        adds_like(each.mesh, single, reference, one, each.ranks, rounds=precision != "fp32")
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
        found, wanted = states(optimizer), states(reference)
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), step
    memory = statistics(model).tiers["device"]
    assert memory.peak_bytes <= memory.budget_bytes
    check_weights(model)
    release(model)
    release(single)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_train_as_one_process(name: str, precision: str) -> None:
    run(2, train, name, precision)

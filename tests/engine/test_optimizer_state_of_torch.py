"""A run under management goes on in plain PyTorch with torch's own optimizer, and the other way round."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from _cases import next_token, tokens
from _checkpoints import TIERS
from _models import Language
from _reference import GROUP_BYTES
from _twins import ADAMW, NO_DECAY, assert_near, twin, with_groups
from ps_core import Options
from ps_core.engine import chunked, materialized, release

SPEC = with_groups(ADAMW, NO_DECAY)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for index in range(first, first + count):
        next_token(model, *tokens(index)).backward()
        optimizer.step()
        optimizer.zero_grad()


def language(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Language(tied=True)


@pytest.mark.parametrize("tiers", ["cpu", "emulated"])
def test_there_and_back(tiers: str) -> None:
    device, budget = TIERS[tiers]
    told = {"device": device(), "precision": "fp32", "options": Options(group_bytes=GROUP_BYTES)}
    managed, optimizer = chunked(language(0), SPEC, budget=budget, **told)
    try:
        train(managed, optimizer, 0, 3)
        plain = language(1)
        plain.load_state_dict(managed.state_dict())
        torchs = twin(SPEC, plain)
        torchs.load_state_dict(optimizer.state_dict())
        before = [each.detach().clone() for each in plain.parameters()]
        train(managed, optimizer, 3, 2)
        train(plain, torchs, 3, 2)
        with materialized(managed):
            assert_near(managed, plain, before, 2)
        managed.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(torchs.state_dict())
        before = [each.detach().clone() for each in plain.parameters()]
        train(managed, optimizer, 5, 2)
        train(plain, torchs, 5, 2)
        with materialized(managed):
            assert_near(managed, plain, before, 2)
    finally:
        release(managed)

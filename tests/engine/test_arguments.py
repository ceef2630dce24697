"""Arguments of `chunked` of another kind than it expects: one line that names what was given, and nothing changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ps_core import AdamW, Budget, InvalidInput
from ps_core.engine import chunked, release

MODEL_SGD = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": MODEL_SGD}, r"SGD\(...\) of ps_core, or None; found torch.optim.sgd.SGD"),
        ({"optimizer": torch.optim.AdamW}, "or None; found torch.optim.adamw.AdamW"),
        ({"optimizer": "adamw"}, "or None; found 'adamw'"),
        ({"budget": "1MiB"}, "budget must be a ps_core.Budget, .* found '1MiB'"),
        ({"options": {"prefetch": 2}}, "options must be a ps_core.Options, .* found builtins.dict"),
        ({"collectives": "nccl"}, r"collectives must be what ps_dist.connect\(\) gives, or None; found 'nccl'"),
        ({"device": 0}, "device must be a text like 'emulated' or 'cuda:1', found 0"),
        ({"device": torch.device("meta")}, "device must be 'cpu', 'emulated', 'cuda' or one CUDA device .* 'meta'"),
    ],
)
def test_something_else_is_named(arguments: dict[str, Any], words: str) -> None:
    model, given = nn.Linear(4, 4), {"optimizer": None} | arguments
    with pytest.raises(InvalidInput, match=words):
        chunked(model, given.pop("optimizer"), **given)
    assert type(model.weight) is nn.Parameter


def test_a_device_of_pytorch() -> None:
    model, _ = chunked(nn.Linear(4, 4), AdamW(), device=torch.device("cpu"), budget=Budget(host="1MiB"))
    release(model)

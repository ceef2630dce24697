"""Inputs of a model are cast to its precision, in containers that stay what they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from ps_core import Options
from ps_core.engine import chunked, release


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Batch:
    values: Tensor
    name: str = "batch"


class Sees(nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.given: Any = None

    def forward(self, given: Any) -> Tensor:
        self.given = given
        return self.layer(torch.zeros(1, 2, dtype=self.layer.weight.dtype))


def made(value: Tensor) -> list[Any]:
    return [
        value,
        [value, 1],
        (value, None),
        {"a": value},
        OrderedDict(a=value),
        defaultdict(list, a=value),
        Pair(value, value),
        Batch(value),
        BaseModelOutput(last_hidden_state=value),
        {"deep": [Pair(value, value), {"a": (value,)}]},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", range(len(made(torch.ones(1)))))
def test_containers_stay_what_they_are(kind: int, dtype: torch.dtype) -> None:
    value = torch.ones(1, 2)
    given, wanted = made(value.to(dtype))[kind], made(value.bfloat16())[kind]
    model, _ = chunked(Sees(), None, device="cpu", precision="bf16")
    try:
        model(given)
        found = model.given
    finally:
        release(model)
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)
    assert repr(given) == repr(made(value.to(dtype))[kind]), "what the caller has is not changed"


def test_what_is_cast_already_is_handed_on_as_it_is() -> None:
    model, _ = chunked(Sees(), None, device="cpu", precision="bf16")
    try:
        for given in [*made(torch.ones(1, 2).bfloat16()), torch.arange(3), Batch(torch.arange(3)), torch.Size([2])]:
            model(given)
            assert model.given is given
    finally:
        release(model)


def test_it_can_be_switched_off() -> None:
    model, _ = chunked(Sees(), None, device="cpu", precision="bf16", options=Options(cast_inputs=False))
    try:
        model(given := torch.ones(1, dtype=torch.float64))
        assert model.given is given
    finally:
        release(model)


def test_an_encoder_and_decoder_generate() -> None:
    """Their encoder's output, which can be indexed by numbers, is an argument of the model."""
    config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0)
    torch.manual_seed(0)
    plain = T5ForConditionalGeneration(config).to(torch.bfloat16).eval()
    torch.manual_seed(0)
    model, _ = chunked(T5ForConditionalGeneration(config).eval(), None, device="cpu", precision="bf16")
    try:
        tokens = torch.tensor([[5, 6, 7]])
        assert torch.equal(
            model.generate(tokens, max_new_tokens=3), plain.generate(tokens, max_new_tokens=3, do_sample=False)
        )
    finally:
        release(model)

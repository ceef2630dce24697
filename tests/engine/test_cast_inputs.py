"""Inputs of a model are cast to its precision, in containers that stay what they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from ps_core import Budget, Options
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


class Normalises(nn.Module):
    """A batch norm, whose running statistics are buffers in fp32, and a method besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))

    def score(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(-1)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_errors_about_types_say_what_the_precision_has_to_do_with_them(device: str, precision: str) -> None:
    budget = Budget(device="1MiB" if device == "emulated" else None, host="1MiB")
    model, _ = chunked(Normalises(), None, device=device, budget=budget, precision=precision)
    for call in (model, model.score):
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                call(X)
            (note,) = caught.value.__notes__
            assert f"precision={precision!r}" in note
            assert all(text in note for text in ("keep_fp32", "cast_inputs=False", "precision='fp32'"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        model(torch.ones(3, 5))
    assert not hasattr(caught.value, "__notes__"), "that one has nothing to do with the precision"
    model.score(X.to(model.layer.weight.dtype))
    release(model)
    keeps = replace(budget), Options(keep_fp32=("norm.*",))
    for own, options, kind in ((*keeps, precision), (replace(budget), Options(), "fp32")):
        model, _ = chunked(Normalises(), None, device=device, budget=own, precision=kind, options=options)
        assert model(X).isfinite().all()
        release(model)


def test_errors_about_types_in_fp32_have_no_note() -> None:
    model, _ = chunked(Normalises(), None, device="cpu", budget=Budget(host="1MiB"), precision="fp32")
    with pytest.raises(RuntimeError) as caught:
        model.score(X.bfloat16())
    assert not hasattr(caught.value, "__notes__")
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

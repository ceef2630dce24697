"""Hugging Face's generate() where hardly anything fits, and save_pretrained() of what is under management."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import _zoo as zoo
from _cases import ADAMW, hugging_face, tokens
from _runs import HOST, chunked_model, stand_in, tightest
from ps_core import Budget, Options
from ps_core.engine import load_weights, statistics

OPTIONS = Options(poison=True, group_bytes=2048)
MODELS = {"gpt2": zoo.gpt2, "llama": zoo.llama}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3, "do_sample": False},
    "without_cache": {"do_sample": False, "use_cache": False},
}


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build().eval()


def written(model: nn.Module, how: dict[str, Any]) -> torch.Tensor:
    (prompt,) = tokens(0, 2, 5)
    torch.manual_seed(7)
    with torch.no_grad():
        return model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **how
        )


ROWS = [*(("gpt2", how, "bf16") for how in WAYS), ("llama", "sampled", "bf16"), ("llama", "greedy", "fp32")]


@pytest.mark.parametrize(("name", "how", "precision"), ROWS)
def test_generate_under_a_tight_budget_is_plain_generate(name: str, how: str, precision: str) -> None:
    plain = made(MODELS[name]).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    expected = written(plain, WAYS[how])
    assert expected.shape == (2, 13)

    def attempt(size: int) -> torch.Tensor:
        told = {"spec": None, "device": stand_in(), "budget": Budget(device=size, host=HOST)}
        with chunked_model(made(MODELS[name]), precision=precision, options=OPTIONS, **told) as (model, optimizer):
            assert optimizer is None
            found = written(model, WAYS[how])
            assert statistics(model).evictions > 0, f"everything fitted into {size:,} bytes"
            assert statistics(model).bytes_per_parameter < (2.3 if precision == "bf16" else 4.6)
            return found

    _, found = tightest(attempt, rounds=0)
    assert torch.equal(expected, found)


@pytest.mark.parametrize(("name", "shards"), [("gpt2", "10MB"), ("llama", "50KB")])
def test_save_pretrained_of_a_managed_model_loads_back(tmp_path: Path, name: str, shards: str) -> None:
    (batch,) = tokens(0)
    with chunked_model(made(MODELS[name]), spec=ADAMW, options=OPTIONS) as (model, optimizer):
        model.train()
        hugging_face(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model.save_pretrained(tmp_path, max_shard_size=shards)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            expected = model(batch).logits
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shards == "50KB")
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in again.state_dict().items())
    with torch.no_grad():
        assert torch.equal(expected, again(batch).logits)
    with chunked_model(made(MODELS[name], seed=3), spec=None, options=OPTIONS) as (model, _):
        load_weights(model, tmp_path)
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_what_save_pretrained_leaves_out_for_being_tied(tmp_path: Path) -> None:
    with chunked_model(made(zoo.gpt2), spec=ADAMW, options=OPTIONS) as (model, _):
        assert model.lm_head.weight is model.transformer.wte.weight
        model.save_pretrained(tmp_path)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert "transformer.wte.weight" in found
    assert "lm_head.weight" not in found

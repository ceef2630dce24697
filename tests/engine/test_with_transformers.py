"""What transformers' models are told: checkpointing before or after, other kinds of attention, generation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _hugging_face import HOST, batch, llama
from _reference import Make, Settings
from _runs import check_under_the_tightest_budget, managed
from ps_core import AdamW, Budget, Options, PatrickStarError, UnsupportedParameter
from ps_core.engine import chunked, release, statistics

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # it renames what switches checkpointing on

SPEC = AdamW(lr=1e-2)
STEPS = 4


def loop(when: str = "", *, reentrant: bool = False, attention: str = "sdpa") -> Any:
    def train(make: Make) -> list[Tensor]:
        arguments = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        model: Any = llama(attn_implementation=attention)
        assert model.config._attn_implementation == attention
        model.train()
        if when == "before":
            model.gradient_checkpointing_enable(**arguments)
        model, optimizer = make(model, SPEC)
        if when == "after":
            model.gradient_checkpointing_enable(**arguments)
        logs = []
        for index in range(STEPS):
            if when == "midway" and index == 2:
                model.gradient_checkpointing_enable(**arguments)
            loss = model(**batch(index)).loss
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(loss.detach())
        return logs

    return train


@pytest.mark.parametrize(("when", "precision"), [("before", "bf16"), ("after", "fp32"), ("midway", "bf16")])
def test_checkpointing_before_or_after(when: str, precision: str) -> None:
    check_under_the_tightest_budget(loop(when), Settings(precision=precision))


@pytest.mark.parametrize("when", ["before", "after"])
def test_reentrant_checkpointing_is_refused_with_the_remedy(when: str) -> None:
    with pytest.raises(PatrickStarError, match=r"gradient_checkpointing_kwargs=\{\"use_reentrant\": False\}"):
        managed(loop(when, reentrant=True), Settings(), "emulated", Budget(device="1MiB", host=HOST))


def test_scaled_dot_product_attention() -> None:
    check_under_the_tightest_budget(loop(attention="sdpa"), Settings(precision="bf16"))


def test_generation_under_a_budget() -> None:
    """Without an optimizer: 2 bytes a parameter, and the same tokens."""
    prompt = batch(3)["input_ids"][:, :5]

    def tokens(model: Any) -> Tensor:
        return model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)

    plain: Any = llama().eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)

    def generate(make: Make) -> list[Tensor]:
        model, none = make(llama().eval(), None)
        assert none is None
        found = tokens(model)
        assert statistics(model).bytes_per_parameter < 2.1
        return [found]

    got = managed(generate, Settings(precision="bf16"), "emulated", Budget(device=80_000, host=HOST))
    assert got.evictions > 0
    assert torch.equal(got.logs[0], tokens(plain))


def test_parts_of_the_model_may_be_called() -> None:
    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(llama(), SPEC)
        whole: Any = model
        logs = []
        for index in range(2):
            hidden = whole.model(input_ids=batch(index)["input_ids"]).last_hidden_state
            scores = whole.lm_head(hidden[:, :-1]).float()
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch(index)["labels"][:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(loss.detach())
        return logs

    check_under_the_tightest_budget(train, Settings(precision="fp32"))


def test_a_router_that_casts_its_weight_and_the_remedy_that_the_refusal_names() -> None:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    layers = {"num_layers": 2, "num_decoder_layers": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_experts": 4, "vocab_size": 64}
    config = SwitchTransformersConfig(**layers, **sizes, decoder_start_token_id=0)
    tokens = batch(0)["input_ids"]

    def step(options: Options) -> None:
        torch.manual_seed(0)
        budget = Budget(device="384KiB", host=HOST)
        made = SwitchTransformersForConditionalGeneration(config)
        model, optimizer = chunked(made, SPEC, device="emulated", budget=budget, precision="bf16", options=options)
        try:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            assert not optimizer.last_skipped
        finally:
            release(model)

    with pytest.raises(
        UnsupportedParameter, match=r"router\.classifier\.weight' is under .* given other data"
    ) as caught:
        step(Options())
    named = re.search(r"options=Options\(keep_fp32=\('(.*)',\)\)", str(caught.value))
    assert named is not None
    step(Options(keep_fp32=(named[1],)))

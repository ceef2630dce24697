"""Hugging Face models built without memory: from their config if that gives them, else by ``_init_weights``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _unreal import HUGGING_FACE, IMAGE, SMALL, assert_same, both, hugging_face, on_meta
from ps_core.engine._parameters.meta_init.initial_values import initial_values


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name: str) -> None:
    plain, got, (expected, drawn) = both(hugging_face(name))
    assert_same(plain, got)
    assert torch.equal(expected, drawn)
    tied = [[id(each) for _, each in one.named_parameters(remove_duplicate=False)] for one in (plain, got)]
    assert len(set(tied[0])) == len(set(tied[1]))


def test_hugging_face_in_bf16_and_inside_another_module() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SMALL)

    def make() -> nn.Module:
        before = nn.Linear(64, 64)
        inner = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return nn.Sequential(before, inner, nn.Linear(64, 4))

    plain, got, (expected, drawn) = both(make)
    assert got[1].dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    assert_same(plain, got)
    assert torch.equal(expected, drawn)


def test_hugging_face_with_tensors_of_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SMALL)

    class Own(transformers.BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(5).index_add(0, torch.tensor([1, 2]), torch.randn(2)))
            self.shift = nn.Parameter(torch.zeros(5))
            nn.init.normal_(self.shift[1:])
            self.gain = nn.Parameter(torch.full((3,), 2.0))
            self.steps = torch.arange(4)

    plain, got, (expected, drawn) = both(lambda: Own(config))
    assert got.shift[0] == 0
    assert_same(plain, got)
    assert torch.equal(expected, drawn)


def test_a_changed_hugging_face_model_has_the_same_distributions_and_says_so() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=301, n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    plain = transformers.GPT2LMHeadModel(config)
    model = on_meta(lambda: transformers.GPT2LMHeadModel(config))
    model.extra = on_meta(lambda: nn.Linear(64, 64))
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel.*extra.bias is in one of them.*not the same"):
        values = {name: value.clone() for name, _, value in initial_values(model)}
    assert values.keys() == {*dict(plain.named_parameters()), "extra.weight", "extra.bias"}
    assert not any(each.is_meta for each in model.buffers())
    for name, expected in plain.named_parameters():
        if expected.dim() == 1:
            assert torch.equal(values[name], expected), name
        else:
            # Five standard errors of the spread of the smaller sample.
            room = 5 / (2 * expected.numel()) ** 0.5
            assert values[name].std().item() == pytest.approx(expected.std().item(), rel=2**0.5 * room), name
    assert values["extra.weight"].std().item() == pytest.approx(0.02, rel=5 / (2 * 4096) ** 0.5)


def test_hugging_face_built_with_further_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SMALL)

    class Demanding(transformers.BertModel):
        def __init__(self, config: Any, depth: int) -> None:
            super().__init__(config, add_pooling_layer=depth > 1)

    for make, why in (
        (lambda: transformers.BertModel(config, add_pooling_layer=False), "pooler.dense.bias is in one of them"),
        (lambda: Demanding(config, 1), r"TypeError: .*missing 1 required positional argument: 'depth'"),
    ):
        model, state = on_meta(make), torch.get_rng_state()
        with pytest.warns(UserWarning, match=why):
            values = [value for _, _, value in initial_values(model)]
        assert all(bool(torch.isfinite(value).all()) for value in values)
        assert model.embeddings.position_ids.tolist() == [list(range(512))]
        # What the failed attempt drew is not counted.
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            with pytest.warns(UserWarning, match=why):
                again = [value for _, _, value in initial_values(on_meta(make))]
        assert all(torch.equal(one, other) for one, other in zip(values, again, strict=True))


def test_a_config_that_was_changed_afterwards() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**IMAGE)
    model = on_meta(lambda: transformers.ViTModel(config))
    model.config.image_size = 32
    with pytest.warns(UserWarning, match=r"position_embeddings is torch.float32 \(1, 65, 32\) there"):
        values = {name: value for name, _, value in initial_values(model)}
    assert values["embeddings.position_embeddings"].std().item() == pytest.approx(0.02, rel=0.2)

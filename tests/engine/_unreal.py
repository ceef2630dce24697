"""Models built without memory, beside the same built with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core.engine._parameters.meta_init.initial_values import initial_values

Make = Callable[[], nn.Module]


def on_meta(make: Make) -> nn.Module:
    with torch.device("meta"):
        return make()


def both(make: Make, seed: int = 3) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """The model built plainly, the one given its values, and what each generator draws next."""
    torch.manual_seed(seed)
    plain = make()
    expected_next = torch.rand(8)
    unreal = on_meta(make)
    objects = dict(unreal.named_parameters())
    assert any(each.is_meta for each in (*objects.values(), *unreal.buffers())), "nothing to do"
    torch.manual_seed(seed)
    names = []
    for name, parameter, value in initial_values(unreal):
        assert parameter is objects[name]
        assert value.data_ptr() == parameter.data_ptr()
        assert not value.requires_grad
        names.append(name)
    assert names == list(objects)
    return plain, unreal, [expected_next, torch.rand(8)]


def assert_same(plain: nn.Module, got: nn.Module) -> None:
    """Parameters, buffers and tensors that are plain attributes, to the bit."""
    for of in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(plain, of)()), dict(getattr(got, of)())
        assert list(expected) == list(found)
        for name, value in expected.items():
            other = found[name]
            assert (value.dtype, value.stride(), other.device) == (other.dtype, other.stride(), value.device), name
            assert value.requires_grad == other.requires_grad
            assert torch.equal(value, other), name
    for one, other in zip(plain.modules(), got.modules(), strict=True):
        for name, value in vars(one).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, vars(other)[name]), name


SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
SEQ2SEQ = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "bert, classifier": ("BertForSequenceClassification", "BertConfig", SMALL),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_key_value_heads": 2}),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**SMALL, "tie_word_embeddings": True}),
    "llama 3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SMALL, "rope_scaling": {**ROPE, "original_max_position_embeddings": 64}},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", SEQ2SEQ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", SMALL),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1},
    ),
}


def hugging_face(name: str) -> Make:
    transformers = pytest.importorskip("transformers")
    model, config, arguments = HUGGING_FACE[name]
    made = getattr(transformers, config)(**arguments)
    return lambda: getattr(transformers, model)(made)

"""Names, order and sizes of tensors are those of transformers, for every family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.shapes import tensors

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "pure" / "configs"


def listed(config: dict[str, object], architecture: str) -> list[tuple[str, int]]:
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(made)
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_tensors_are_those_of_transformers(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    found = shape_from_config(path)
    architecture = (config.get("architectures") or [ARCHITECTURES[config["model_type"]]])[0]
    assert [(tensor.name, tensor.numel) for tensor in tensors(found)] == listed(config, architecture)


@pytest.mark.parametrize("name", ["gpt2-xl", "bert-base"])
def test_presets_are_those_of_transformers(name: str) -> None:
    found = shape(name)
    if name.startswith("bert"):
        config: dict[str, object] = {"model_type": "bert"}
        assert [(t.name, t.numel) for t in tensors(found)] == listed(config, "BertForPreTraining")
        masked_only = replace(found, next_sentence=False)
        assert [(t.name, t.numel) for t in tensors(masked_only)] == listed(config, "BertForMaskedLM")
    else:
        config = {"model_type": "gpt2", "n_embd": found.hidden, "n_layer": found.layers, "n_head": found.heads}
        assert [(t.name, t.numel) for t in tensors(found)] == listed(config, "GPT2LMHeadModel")

"""Directories of Hugging Face's: their weights give their logits, and come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core._errors import InvalidInput
from ps_core._workloads.named_shapes import gpt
from ps_models import BERT, GPT, BERTClassifier, GPTClassifier, GPTConfig, Llama

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

VOCABULARY = 97
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 16}
GPT2 |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "layer_norm_epsilon": 1e-3}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
SHARED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
# What each reads: their class, its configuration, ours.
CASES: dict[str, tuple[str, str, dict[str, Any], Any]] = {
    "gpt": ("GPT2LMHeadModel", "gpt2", GPT2, GPT),
    "gpt untied": ("GPT2LMHeadModel", "gpt2", {**GPT2, "tie_word_embeddings": False}, GPT),
    "gpt classifier": ("GPT2ForSequenceClassification", "gpt2", {**GPT2, "num_labels": 3}, GPTClassifier),
    "bert": ("BertForPreTraining", "bert", {**SIZES, "layer_norm_eps": 1e-3}, BERT),
    "bert words": ("BertForMaskedLM", "bert", SIZES, BERT),
    "bert classifier": ("BertForSequenceClassification", "bert", {**SIZES, "num_labels": 3}, BERTClassifier),
    "llama": ("LlamaForCausalLM", "llama", {**SHARED, "attention_bias": True, "tie_word_embeddings": True}, Llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", SHARED, Llama),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", SHARED, Llama),
    "mistral": ("MistralForCausalLM", "mistral", {**SHARED, "sliding_window": None}, Llama),
}


def theirs_of(name: str) -> Any:
    kind, family, entries, _ = CASES[name]
    model = getattr(transformers, kind)(transformers.AutoConfig.for_model(family, **entries)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.05, 0.2, generator=generator)
    return model


def inputs() -> dict[str, Tensor]:
    """Three rows, one of them padded on the right."""
    ids = torch.randint(1, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 8:] = mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def labels_of(name: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    if "classifier" in name:
        return {"labels": torch.tensor([0, 2, 1])}
    labels = {"labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}
    return labels | ({"next_sentence_label": torch.tensor([1, 0, 0])} if name == "bert" else {})


@torch.no_grad()
def check_same(name: str, ours: nn.Module, theirs: Any) -> None:
    given = inputs()
    if "bert" in name:
        given["token_type_ids"] = (torch.arange(12) > 6).long().expand(3, -1)
    found, expected = ours(**given), theirs(**given)
    counts = given["attention_mask"].bool() if "classifier" not in name else slice(None)
    pairs = [(found.logits, expected["prediction_logits" if name == "bert" else "logits"])]
    if name == "bert":
        assert torch.allclose(found.seq_relationship_logits, expected.seq_relationship_logits, atol=1e-5)
    for one, other in pairs:
        assert one.abs().max() > 0.1
        assert (one - other)[counts].abs().max() <= 1e-5
    given |= labels_of(name, given)
    assert ours(**given).loss.item() == pytest.approx(theirs(**given).loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs, ours_kind = theirs_of(name), CASES[name][3]
    theirs.save_pretrained(tmp_path / "theirs")
    ours = ours_kind.from_pretrained(tmp_path / "theirs")
    assert not ours.training
    check_same(name, ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    again = getattr(transformers, CASES[name][0]).from_pretrained(tmp_path / "ours")
    again.config.pad_token_id = 0
    check_same(name, ours, again)
    expected = dict(theirs.named_parameters())
    for found in (dict(again.named_parameters()), dict(ours.named_parameters())):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in expected)


@pytest.mark.parametrize("name", ["gpt", "bert", "llama"])
def test_tiles_are_put_together_in_files(name: str, tmp_path: Path) -> None:
    theirs, ours_kind = theirs_of(name), CASES[name][3]
    theirs.save_pretrained(tmp_path / "theirs")
    tiled = ours_kind.from_pretrained(tmp_path / "theirs", tiles=3)
    assert any(".tiles.2.weight" in each for each in tiled.state_dict())
    check_same(name, tiled, theirs)
    tiled.save_pretrained(tmp_path / "ours")
    whole = dict(ours_kind.from_pretrained(tmp_path / "ours").named_parameters())
    assert all(torch.equal(whole[each], value) for each, value in theirs.named_parameters())


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    safetensors.save_file(change(safetensors.load_file(file)), file)


def test_old_files_and_those_of_bare_models(tmp_path: Path) -> None:
    """As the hub's first ones are: no prefix, masks beside the weights, norms named gamma and beta, heads again."""
    theirs = theirs_of("gpt")
    theirs.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda found: (
            {name.removeprefix("transformer."): value for name, value in found.items()}
            | {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "lm_head.weight": found["transformer.wte.weight"].clone()}
        ),
    )
    check_same("gpt", GPT.from_pretrained(tmp_path), theirs)
    theirs = theirs_of("bert")
    theirs.save_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    rewrite(
        tmp_path,
        lambda found: {
            next((name.removesuffix(new) + was for new, was in old.items() if name.endswith(new)), name): value
            for name, value in found.items()
        },
    )
    check_same("bert", BERT.from_pretrained(tmp_path), theirs)


def test_pieces_and_16_bit_types(tmp_path: Path) -> None:
    theirs = theirs_of("llama").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours = Llama.from_pretrained(tmp_path)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, expected[name])


def test_a_classifier_of_a_language_model_draws_its_head(tmp_path: Path) -> None:
    theirs = theirs_of("bert")
    theirs.save_pretrained(tmp_path)
    torch.manual_seed(0)
    ours = BERTClassifier.from_pretrained(tmp_path)
    assert torch.equal(ours.bert.pooler.dense.weight, theirs.bert.pooler.dense.weight)
    assert 0.01 < ours.classifier.weight.std() < 0.03
    assert ours.classifier.weight.shape == (2, 32)
    loss = ours.train()(**inputs(), labels=torch.tensor([0, 1, 1])).loss
    loss.backward()
    assert ours.classifier.weight.grad.abs().sum() > 0


def test_a_loaded_model_does_not_live_in_its_file(tmp_path: Path) -> None:
    theirs_of("gpt").save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    before = ours(**inputs()).logits
    with torch.no_grad():
        GPT(ours.config).save_pretrained(tmp_path)
    assert torch.equal(ours(**inputs()).logits, before)
    assert not torch.equal(GPT.from_pretrained(tmp_path)(**inputs()).logits, before)


def test_a_configuration_comes_back(tmp_path: Path) -> None:
    config = GPTConfig(shape=gpt(2, 32, heads=4, vocabulary=50, positions=8), dropout=0.25, norm_epsilon=1e-3)
    GPT(config).save_pretrained(tmp_path)
    found = GPT.from_pretrained(tmp_path, checkpoint_blocks=(1,)).config
    assert (found.dropout, found.norm_epsilon, found.checkpoint_blocks) == (0.25, 1e-3, (1,))
    assert (found.shape.layers, found.shape.hidden, found.shape.vocabulary) == (2, 32, 50)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("gpt", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt", {"embd_pdrop": 0.7}, "embd_pdrop is 0.7"),
        ("bert", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ("mistral", {"sliding_window": 4}, "sliding_window is 4"),
        ("gpt", {"n_embd": 64}, r"is \(96,\) in the file, config.json says \(192,\)"),
        ("gpt", {"n_layer": 3}, "12 tensors are missing"),
        ("gpt", {"n_layer": 1}, "12 tensors are not the model's"),
    ],
)
def test_what_ours_cannot_be_is_refused(name: str, entry: dict[str, Any], message: str, tmp_path: Path) -> None:
    theirs_of(name).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    with pytest.raises(InvalidInput, match=message):
        CASES[name][3].from_pretrained(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot read .*config\.json"):
        GPT.from_pretrained(tmp_path)
    theirs_of("gpt").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"has no model\.safetensors"):
        GPT.from_pretrained(tmp_path)

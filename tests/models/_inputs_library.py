"""Cases of the models themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from _inputs_of_train import changed, row, without
from ps_core._workloads.named_shapes import shape
from ps_models import GPT, GPTClassifier, GPTConfig, build, use_chunked_loss
from ps_models._generate import generate
from ps_models._layers import TiledLinear

IDS = torch.arange(16).view(2, 8)


def runs(name: str = "gpt-2x32", **overrides: Any) -> None:
    """Build a model, and make a forward and a backward pass."""
    torch.manual_seed(0)
    model: Any = build(name, "cpu", **overrides)
    model(IDS, labels=IDS).loss.backward()


def overridden(part: str, wrong: dict[str, Any], *right: dict[str, Any], name: str = "gpt-2x32") -> None:
    row(part, lambda: runs(name, **wrong), *(lambda each=each: runs(name, **each) for each in right))


overridden("cannot override {}; known: {}", {"nonsense": 1}, {"vocabulary": 99})
overridden("{} must be at least 0 and below 1", {"dropout": 1.0}, {"dropout": 0.5})
overridden("loss_chunk_tokens must be", {"loss_chunk_tokens": 0}, {"loss_chunk_tokens": 1}, {"loss_chunk_tokens": None})
overridden("tiles must be at least 1", {"tiles": 0}, {"tiles": 2})
overridden(
    "offload_checkpoints needs checkpoint_blocks",
    {"offload_checkpoints": True},
    {"offload_checkpoints": True, "checkpoint_blocks": True},
)
overridden("checkpoint_blocks names block", {"checkpoint_blocks": {2}}, {"checkpoint_blocks": {0, 1}})
overridden("head_tiles must be at least 1", {"head_tiles": 0}, {"head_tiles": 2, "tied_head": False})
overridden("leave head_tiles out, or tied_head=False", {"head_tiles": 2}, {}, {"head_tiles": 2, "tied_head": False})
overridden("leave cpu_embedding out{}", {"cpu_embedding": True}, {}, {"cpu_embedding": True, "tied_head": False})
overridden("experts_chosen must be", {"experts": 2, "experts_chosen": 3}, {"experts": 2, "experts_chosen": 2})
overridden("of no experts", {"experts_chosen": 1}, {"experts": 2, "experts_chosen": 1})


def tiled(count: int) -> torch.Tensor:
    return TiledLinear(4, count, lambda width: torch.nn.Linear(2, width))(torch.ones(2))


row("is of the {} family, {} needs", lambda: GPT(GPTConfig(shape=shape("bert-2x32"))), runs)
row(
    "BERT's masked-word head is tied to its token table",
    lambda: build("bert-2x32", tied_head=False),
    lambda: build("bert-2x32"),
)
row("outputs can be cut into", lambda: tiled(5), lambda: tiled(4))
row(
    "a GPTClassifier has no head of words to cut",
    lambda: GPTClassifier(GPTConfig(shape=untied(), head_tiles=2), classes=3),
    lambda: GPTClassifier(GPTConfig(shape=untied()), classes=3),
    lambda: GPT(GPTConfig(shape=untied(), head_tiles=2)),
)


def llama(adapted: tuple[str, ...] = (), chunks: int = 4) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, **sizes))
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=list(adapted)))
    use_chunked_loss(model, chunks)
    model(IDS, labels=IDS).loss.backward()


row("tokens: expected a whole number", lambda: llama(chunks=0), lambda: llama(chunks=1))
row("use_chunked_loss: {} has no part", lambda: use_chunked_loss(torch.nn.Linear(2, 2)), llama)
row(
    "use_chunked_loss: the head of {} is a {}.{}",
    lambda: llama(("q_proj", "lm_head")),
    lambda: llama(("q_proj",)),
)


def untied() -> Any:
    from dataclasses import replace

    return replace(shape("gpt-2x32"), tied_head=False)


def model_of(name: str = "gpt-2x32", **overrides: Any) -> Any:
    torch.manual_seed(0)
    return build(name, "cpu", **overrides)


row(
    "generate needs rows of at least one token",
    lambda: generate(model_of(), IDS[:, :0], 1),
    lambda: generate(model_of(), IDS, 1),
)
row(
    "temperature must be at least 0 and top_k at least 1",
    lambda: generate(model_of(), IDS, 1, temperature=-1.0),
    lambda: generate(model_of(), IDS, 1, temperature=0.5, top_k=1),
)
row(
    "is longer than the {} positions of the model",
    lambda: model_of(positions=8)(torch.zeros(1, 9, dtype=torch.int64)),
    lambda: model_of(positions=8)(torch.zeros(1, 8, dtype=torch.int64)),
)
row(
    "labels: expected one for each of {} tokens",
    lambda: model_of()(IDS, labels=IDS[:, :3]),
    lambda: model_of()(IDS, labels=IDS),
)
row(
    "logits_to_keep must be at least 0",
    lambda: model_of()(IDS, logits_to_keep=-1),
    lambda: model_of()(IDS, logits_to_keep=1),
)


def twice(**overrides: Any) -> None:
    model_of(**overrides)(IDS, labels=IDS).loss.backward(create_graph=True)


row(
    "expected a loss over whole logits; set loss_chunk_tokens=None",
    lambda: twice(loss_chunk_tokens=4),
    lambda: twice(loss_chunk_tokens=None),
)
row(
    "create_graph=True through a loss in tiles",
    lambda: twice(loss_chunk_tokens=4, head_tiles=2, tied_head=False),
    lambda: twice(loss_chunk_tokens=None, head_tiles=2, tied_head=False),
)
row(
    "has no next-sentence head: build it with next_sentence=True",
    lambda: model_of("bert-2x32", next_sentence=False)(IDS, next_sentence_label=torch.zeros(2, dtype=torch.int64)),
    lambda: model_of("bert-2x32", next_sentence=True)(IDS, next_sentence_label=torch.zeros(2, dtype=torch.int64)),
)


# Folders.


def saved(name: str = "saved") -> Path:
    if not Path(name).exists():
        model_of().save_pretrained(name)
    return Path(name)


def with_value(key: str, value: Any) -> Path:
    changed(saved(), Path("other"), "config.json", lambda found: found.update({key: value}))
    return Path("other")


def reads(read: Callable[[], Path], kind: type = GPT) -> Callable[[], Any]:
    return lambda: kind.from_pretrained(read())


def listed() -> Path:
    changed(saved(), Path("listed"), "config.json", lambda found: None)
    Path("listed/config.json").write_text("[]", "utf-8")
    return Path("listed")


def indexed(name: str) -> Path:
    bare()
    index = {"weight_map": {"weight": name}}
    Path("bare/model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return Path("bare")


def bare() -> Path:
    changed(saved(), Path("bare"), "config.json", lambda found: None)
    Path("bare/model.safetensors").unlink()
    return Path("bare")


row("cannot read {}: {}", reads(lambda: Path("empty")), reads(saved))
row("{}: expected a JSON object, found", reads(listed), reads(saved))
row(
    "config.json: {} is {}, of what this model can be only",
    reads(lambda: with_value("activation_function", "tanh")),
    reads(saved),
)
row("expected a directory that save_pretrained wrote", reads(bare), reads(saved))
row(
    "{}: its weight_map names {}, expected files of its own folder",
    reads(lambda: indexed("../saved/model.safetensors")),
    reads(saved),
)
row("is {} in the file, config.json says", reads(lambda: with_value("n_embd", 64)), reads(saved))
row("the file is of another class of model, or damaged", reads(lambda: with_value("n_layer", 3)), reads(saved))
without("files of weights need safetensors: {}", "safetensors", lambda: saved("again"), model_of)


def kept(name: str = "gpt-2x32", device: str = "cpu", **overrides: Any) -> None:
    build(name, device, **overrides).save_pretrained("kept")


row("a model on meta has no weights to save", lambda: kept(device="meta"), kept)
row(
    "config.json cannot say token_types=0",
    lambda: kept("bert-2x32", token_types=0),
    lambda: kept("bert-2x32", token_types=1),
)
row(
    "config.json would mean {}; build it with that",
    lambda: kept("llama-10m", layers=1, out_bias=True),
    lambda: kept("llama-10m", layers=1, out_bias=True, qkv_bias=True),
)
row(
    "head_dim must be even",
    lambda: runs("llama-10m", layers=1, head_dim=63),
    lambda: runs("llama-10m", layers=1, head_dim=62),
)
row(
    "id2label must be an object, a label for each class",
    reads(lambda: with_value("id2label", 5), GPTClassifier),
    reads(saved, GPTClassifier),
)

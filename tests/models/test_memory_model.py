"""The memory model's peak against the one found by counting every tensor of a real forward and backward."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ps_core._workloads.hf import shape_from_config
from ps_core._workloads.named_shapes import gpt
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload
from ps_models import GPT, GPTConfig


class Tracked(TorchDispatchMode):
    """Counts every storage an operator gives that was not there before. Memory inside an operator is not seen."""

    def __init__(self, ignored: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen = {parameter.untyped_storage()._cdata for parameter in ignored.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


def peak_of(model: nn.Module, run: Callable[[], torch.Tensor], ids: torch.Tensor) -> int:
    """Peak bytes of forward and backward besides parameters, each gradient dropped as soon as it has arrived."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in model.parameters()]
    with Tracked(model) as tracked:
        tracked.count(ids.untyped_storage())
        run().backward()
    for hook in hooks:
        hook.remove()
    return tracked.peak


def numbers(below: int, batch: int, seq: int) -> torch.Tensor:
    return torch.randint(below, (batch, seq), generator=torch.Generator().manual_seed(0))


# Wide logits (the head's backward is the peak) and narrow ones (a block's backward is), many layers and few.
SHAPES = {
    "wide logits": (gpt(2, 128, heads=4, vocabulary=4096, positions=128), 4),
    "wide blocks": (gpt(2, 256, heads=4, vocabulary=128, positions=128), 2),
    "many layers": (gpt(6, 64, heads=2, vocabulary=64, positions=64), 4),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_predicted_peak_is_just_above_the_one_found(name: str, dtype: torch.dtype, checkpointing: bool) -> None:
    made, batch = SHAPES[name]
    made = replace(made, tied_head=False)  # autograd itself would hold a tied table's first part back
    model = GPT(GPTConfig(shape=made, checkpoint_blocks=checkpointing, loss_chunk_tokens=None)).to(dtype)
    ids = numbers(made.vocabulary, batch, made.positions)
    work = Workload(batch=batch, seq=made.positions, precision_bytes=dtype.itemsize, checkpointing=checkpointing)
    predicted = analytic_trace(made, work).peak_nonmodel_bytes
    found = peak_of(model, lambda: model(ids, labels=ids).loss, ids)
    assert 1.0 <= predicted / found <= 1.05


ROTARY: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
BERT: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2: dict[str, object] = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": 128}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
THEIRS = {
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "BertForPreTraining": ("bert", BERT),
    "LlamaForCausalLM": ("llama", ROTARY),
    "Qwen3ForCausalLM": ("qwen3", ROTARY),
}


@pytest.mark.parametrize("architecture", THEIRS)
def test_predicted_peak_of_models_of_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    family, entries = THEIRS[architecture]
    config = transformers.AutoConfig.for_model(family, **entries)
    config._attn_implementation = "sdpa"
    config.use_cache = False  # a cache copies keys and values, for generation only
    ids = numbers(256, 4, 128)
    made = shape_from_config(json.dumps({"model_type": family, "architectures": [architecture], **entries}))
    labels = {"labels": ids}
    if made.next_sentence:
        labels["next_sentence_label"] = torch.zeros(4, dtype=torch.long)
    model = getattr(transformers, architecture)(config).to(torch.bfloat16).train()
    found = peak_of(model, lambda: model(input_ids=ids, **labels).loss, ids)
    work = Workload(batch=4, seq=128, checkpointing=False, fused=False)
    assert 1.0 <= analytic_trace(made, work).peak_nonmodel_bytes / found <= 1.12

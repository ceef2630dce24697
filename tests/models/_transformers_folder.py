"""Tiny models and tokenizers of transformers in folders, made here; and a plain loop over them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<end>{% endgeneration %}{% else %}{{ message['content'] }}<end>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<end>", "<|user|>", "<|assistant|>", "<|system|>")
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 264}
MODELS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        vocab_size=264,
        n_positions=64,
        **{f"{name}_pdrop": 0.0 for name in ("embd", "attn", "resid")},
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "rwkv": transformers.RwkvConfig(
        hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, vocab_size=264, rescale_every=0
    ),
    "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, vocab_size=264),
    "bert": transformers.BertConfig(**SIZES, is_decoder=True),
}


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE, starts: bool = False) -> Any:
    """Save a tokenizer of bytes; ``starts``: one that puts <s> before a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if starts:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=list(SPECIAL[2:]),
        chat_template=template,
    )
    found.save_pretrained(folder)
    return found


def save_model(folder: Path, kind: str = "llama", **how: Any) -> Any:
    """Save a model with weights of a seed."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder, **how)
    return model


def save_lines(path: Path, rows: Sequence[object]) -> Path:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


PAIRS = [{"prompt": f"What is {n} and {n}? ", "completion": f"It is {2 * n}" + "!" * (n % 5)} for n in range(40)]
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": f"{n}"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": f"{n} {n}"},
        ]
    }
    for n in range(40)
]


def plain_losses(
    model: Any, batches: Sequence[Sequence[dict[str, torch.Tensor]]], rates: Sequence[float]
) -> Iterator[float]:
    """Train in plain PyTorch: batches of each step, whose losses count by their trained tokens; yield the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([each for each in groups if each["params"]], betas=(0.9, 0.95), eps=1e-8, fused=True)
    model.train()
    for step, rate in zip(batches, rates, strict=True):
        counts = [int((each["labels"][:, 1:] >= 0).sum()) for each in step]
        total = 0.0
        for batch, count in zip(step, counts, strict=True):
            loss = model(**batch, use_cache=False).loss / (sum(counts) / count)
            loss.backward()
            total += loss.item()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield total

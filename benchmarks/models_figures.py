"""Tokens a second of our GPT beside a plain PyTorch one and Hugging Face's GPT-2, in the same run.

    python benchmarks/models_figures.py [--rounds 9] [--precision fp32 bf16] [--processor-time]

Contenders take turns, a training step each (forward, backward, fused AdamW); a ratio is taken within a round, so that
what disturbs the machine disturbs both. Printed are medians, and the quartiles and the range of the ratios. With
``--processor-time`` it is one thread's seconds on the processor that count, for where other programs keep the machine
busy.
"""

from __future__ import annotations

import argparse
import math
import statistics as numbers
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import ps_kernels
from ps_models import build, use_chunked_loss
from regime import check_regime
from turns import ratios, spread, take_turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT, and the batch it is trained on."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocabulary: int = 16384
    batch: int = 4
    length: int = 256


class PlainBlock(nn.Module):
    """As people write it: fused attention, two linear layers, norms before them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.attn_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.c_fc, self.mlp_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(hidden, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Plain(nn.Module):
    """The smallest GPT that trains well: learned positions, tied head, whole logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.length, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 / math.sqrt(2 * shape.layers) if name.endswith("proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.ln_f(x), self.wte.weight)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.flatten(), ignore_index=-1)


def following(ids: Tensor) -> Tensor:
    """The token after each; -1, which does not count, after the last."""
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -1)], dim=1)


def plain(shape: Shape, dtype: torch.dtype, ids: Tensor) -> Callable[[], Tensor]:
    model = Plain(shape).to(dtype)
    targets = following(ids)
    return stepping(model, lambda: model(ids, targets))


def ours(shape: Shape, dtype: torch.dtype, ids: Tensor, **options: Any) -> Callable[[], Tensor]:
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads}
    model = build("gpt2", "cpu", **sizes, vocabulary=shape.vocabulary, positions=shape.length, **options).to(dtype)
    return stepping(model, lambda: model(ids, labels=ids).loss)


def theirs(shape: Shape, dtype: torch.dtype, ids: Tensor, *, chunks: bool = False) -> Callable[[], Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "vocab_size": shape.vocabulary}
    tokens = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_positions=shape.length, attn_implementation="sdpa", **sizes, **tokens, **dropout)
    model = GPT2LMHeadModel(config).to(dtype).train()
    if chunks:
        use_chunked_loss(model)
    return stepping(model, lambda: model(input_ids=ids, labels=ids).loss)


def stepping(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A training step of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return step


def compare(
    shape: Shape, precision: str, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Medians of our tokens a second as a part of the others'."""
    dtype = DTYPES[precision]
    ids = torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    watched = Plain(shape).to(dtype)
    check_regime(watched, lambda: watched(ids, following(ids)), shape.vocabulary)
    contenders = {
        "ours": ours(shape, dtype, ids),
        "ours, whole logits": ours(shape, dtype, ids, loss_chunk_tokens=None),
        "plain PyTorch": plain(shape, dtype, ids),
        "transformers": theirs(shape, dtype, ids),
        "transformers, loss in chunks": theirs(shape, dtype, ids, chunks=True),
    }
    seconds = take_turns(contenders, rounds, warm_up=1, clock=clock)
    assert all(step().isfinite() for step in contenders.values())
    tokens = shape.batch * shape.length
    print(f"{precision}: {shape}, {rounds} rounds")
    for name, taken in seconds.items():
        print(f"  {name:28} {tokens / numbers.median(taken):10.0f} tokens/s")
    found = {}
    pairs = [(name, other) for name in ("ours", "ours, whole logits") for other in ("plain PyTorch", "transformers")]
    for name, other in (*pairs, ("transformers, loss in chunks", "transformers")):
        rates = ratios(seconds[other], seconds[name])
        found[f"{name} / {other}"] = numbers.median(rates)
        print(f"  {name} / {other}: {spread(rates)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of our GPT beside others.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    parser.add_argument("--processor-time", action="store_true")
    told = parser.parse_args()
    if told.processor_time:
        ps_kernels.set_threads(1)  # and PyTorch's; others' waiting would count
    for precision in told.precision:
        compare(Shape(), precision, told.rounds, time.process_time if told.processor_time else time.perf_counter)


if __name__ == "__main__":
    main()

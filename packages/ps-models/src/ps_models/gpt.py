"""GPT in one file: pre-norm blocks, learned positions, fused attention, head tied to the token table.

Tensors have the names, order and layout of Hugging Face's ``GPT2LMHeadModel``, so its weights load unchanged.
Letters at the end of a tensor's name are its shape: b batch, l sequence, h hidden, a heads, d head width,
v vocabulary, n = b x l.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ps_core._errors import InvalidInput
from ps_core._workloads.shapes import Family, TransformerShape, shape

IGNORED = -100
"""The label of a token that has no part in the loss."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A shape, and what it leaves open."""

    shape: TransformerShape
    checkpointing: bool = False
    """Keep only every block's input for backward and recompute the rest."""
    norm_epsilon: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.shape.family is not Family.GPT2:
            raise InvalidInput(f"{self.shape.name} is of the {self.shape.family.value} family, GPT needs a gpt2 shape")


@dataclass(frozen=True)
class GPTOutput:
    """What a forward pass gives."""

    logits: Tensor
    loss: Tensor | None = None
    """Mean negative log-likelihood of the next token, in fp32; None without labels."""


class Projection(nn.Module):
    """A linear map whose weight is stored (inputs, outputs), as GPT-2's are."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return functional.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = Projection(shape.hidden, 3 * shape.hidden, bias=shape.qkv_bias)
        self.c_proj = Projection(shape.hidden, shape.hidden, bias=shape.out_bias)

    def forward(self, x_blh: Tensor) -> Tensor:
        """Shape blh to blh."""
        batch, length, hidden = x_blh.shape
        q_blh, k_blh, v_blh = self.c_attn(x_blh).split(hidden, dim=2)
        q_bald, k_bald, v_bald = (
            x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for x in (q_blh, k_blh, v_blh)
        )
        y_bald = functional.scaled_dot_product_attention(q_bald, k_bald, v_bald, is_causal=True)
        out: Tensor = self.c_proj(y_bald.transpose(1, 2).reshape(batch, length, hidden))
        return out


class MLP(nn.Module):
    """Two projections with a GELU (its tanh form, as GPT-2's) between."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.c_fc = Projection(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.c_proj = Projection(shape.ffn, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x_blh: Tensor) -> Tensor:
        """Shape blh to blh."""
        out: Tensor = self.c_proj(functional.gelu(self.c_fc(x_blh), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.shape.hidden, eps=config.norm_epsilon)
        self.attn = Attention(config.shape)
        self.ln_2 = nn.LayerNorm(config.shape.hidden, eps=config.norm_epsilon)
        self.mlp = MLP(config.shape)

    def forward(self, x_blh: Tensor) -> Tensor:
        """Shape blh to blh."""
        x_blh = x_blh + self.attn(self.ln_1(x_blh))
        out: Tensor = x_blh + self.mlp(self.ln_2(x_blh))
        return out


class Transformer(nn.Module):
    """Everything but the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = config.shape
        self.wte = nn.Embedding(shape.vocabulary, shape.hidden)
        self.wpe = nn.Embedding(shape.positions, shape.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden, eps=config.norm_epsilon)
        self.checkpointing = config.checkpointing

    def forward(self, input_ids_bl: Tensor) -> Tensor:
        """Token numbers bl to blh."""
        positions_l = torch.arange(input_ids_bl.shape[1], device=input_ids_bl.device)
        x_blh: Tensor = self.wte(input_ids_bl) + self.wpe(positions_l)
        for block in self.h:
            if self.checkpointing and torch.is_grad_enabled():
                x_blh = checkpoint(block, x_blh, use_reentrant=False)
            else:
                x_blh = block(x_blh)
        out: Tensor = self.ln_f(x_blh)
        return out


class GPT(nn.Module):
    """The language model. ``transformer.wte`` is also its head where the shape ties them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        shape = config.shape
        self.lm_head = None if shape.tied_head else nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights, tensor after tensor; equal generators give equal weights. On meta: nothing happens."""
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                # Every block adds twice to the residual stream; its growth with depth is taken out here.
                residual = (2 * self.config.shape.layers) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                parameter.normal_(0.0, std * residual, generator=generator)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPTOutput:
        """Logits of the token after each one; with labels (usually the input itself) also the loss.

        Labels are shifted here: the logits at a token are held against the label of the next. `IGNORED` ones do not
        count.
        """
        positions = self.config.shape.positions
        if input_ids.shape[1] > positions:
            raise InvalidInput(
                f"a sequence of {input_ids.shape[1]} is longer than the {positions} positions of the model"
            )
        x_blh = self.transformer(input_ids)
        table_vh = self.transformer.wte.weight if self.lm_head is None else self.lm_head.weight
        logits_blv = functional.linear(x_blh, table_vh)
        if labels is None:
            return GPTOutput(logits_blv)
        ahead_nv = logits_blv[:, :-1].flatten(0, 1).float()
        loss = functional.cross_entropy(ahead_nv, labels[:, 1:].flatten(), ignore_index=IGNORED)
        return GPTOutput(logits_blv, loss)


def build(name: str, device: str | torch.device = "meta", **overrides: int | float | bool) -> GPT:
    """The GPT of that name (`ps_core` knows the names), on ``device``.

    Overrides replace fields of its `TransformerShape` or `GPTConfig`; a changed ``hidden`` or ``heads`` brings head
    width and MLP width along.
    """
    found = shape(name)
    of_shape = {field.name for field in fields(TransformerShape)} - {"name", "family"}
    of_config = {field.name for field in fields(GPTConfig)} - {"shape"}
    unknown = sorted(set(overrides) - of_shape - of_config)
    if unknown:
        raise InvalidInput(f"cannot override {unknown[0]!r}; known: {', '.join(sorted(of_shape | of_config))}")
    changes = {key: value for key, value in overrides.items() if key in of_shape}
    if "hidden" in changes or "heads" in changes:
        hidden, heads = int(changes.get("hidden", found.hidden)), int(changes.get("heads", found.heads))
        follow = {"heads": heads, "kv_heads": heads, "head_dim": hidden // max(1, heads)}
        changes = {**follow, **({"ffn": 4 * hidden} if "hidden" in changes else {}), **changes}
    options = {key: value for key, value in overrides.items() if key in of_config}
    # The dataclasses check every value; their field types cannot be told from a name here.
    config = replace(GPTConfig(shape=replace(found, **changes)), **options)  # type: ignore[arg-type]
    with torch.device(device):
        return GPT(config)

"""Define GPT in one file: pre-norm blocks, learned positions, fused attention, a head tied to the token table.

Tensors have the names, order and layout of Hugging Face's ``GPT2LMHeadModel``, so its weights load unchanged. Letters
at the end of a tensor's name are its shape: b batch, l sequence, h hidden, v vocabulary. Of attention, a is the heads
and d a head's width. The letter n is b x l.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ps_core import InvalidInput
from ps_core._units import check_number, check_whole
from ps_core._workloads.shapes import Family
from ps_models._config import DecoderConfig
from ps_models._files import GPT2_FILES
from ps_models._generate import generate
from ps_models._layers import (
    Embedding,
    Initialiser,
    Linear,
    Projection,
    linear,
    own_head,
    positions,
    run_blocks,
    token_table,
    visible,
    words,
)
from ps_models._loss import add_balance, all_logits, language_loss
from ps_models._moe import feed_forward, with_balance
from ps_models._pretrained import Pretrained

__all__ = ["GPT", "GPTClassifier", "GPTConfig", "GPTOutput"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """A shape of the gpt2 family, and the options that it does not decide."""

    norm_epsilon: float = 1e-5
    position_std: float = 0.01
    """Deviation of the initial position table; GPT-2's own is half that of its token table."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_family("GPT", Family.GPT2)
        check_number("norm_epsilon", self.norm_epsilon)
        check_number("position_std", self.position_std)

    @property
    def residual_std(self) -> float:
        """Return the deviation for projections that add to the residual stream, corrected for its growth with depth."""
        return self.init_std / math.sqrt(2 * self.shape.layers)

    def projection(self, inputs: int, outputs: int, *, bias: bool, std: float) -> nn.Module:
        """Return a linear map of a block."""
        return linear(Projection, inputs, outputs, bias=bias, init=Initialiser(std), tiles=self.tiles)


@dataclass(frozen=True)
class GPTOutput:
    """The output of a forward pass."""

    loss: Tensor | None = None
    """Mean negative log-likelihood of the next token, in fp32; None without labels."""
    logits: Tensor | None = None
    """Logits; None if the loss was computed in chunks."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = config.shape
        self.heads, self.dropout = shape.heads, config.attention_dropout
        self.c_attn = config.projection(shape.hidden, 3 * shape.hidden, bias=shape.qkv_bias, std=config.init_std)
        self.c_proj = config.projection(shape.hidden, shape.hidden, bias=shape.out_bias, std=config.residual_std)

    def forward(self, x_blh: Tensor, visible_b1ll: Tensor | None) -> Tensor:
        """Map shape blh to blh."""
        batch, length, hidden = x_blh.shape
        q_blh, k_blh, v_blh = self.c_attn(x_blh).split(hidden, dim=2)
        q_bald, k_bald, v_bald = (
            x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2) for x in (q_blh, k_blh, v_blh)
        )
        y_bald = functional.scaled_dot_product_attention(
            q_bald,
            k_bald,
            v_bald,
            attn_mask=visible_b1ll,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=visible_b1ll is None,
        )
        out: Tensor = self.c_proj(y_bald.transpose(1, 2).reshape(batch, length, hidden))
        return out


class MLP(nn.Module):
    """Two projections with a GELU (its tanh form, as GPT-2's) between."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        shape = config.shape
        self.c_fc = config.projection(shape.hidden, shape.ffn, bias=shape.mlp_bias, std=config.init_std)
        self.c_proj = config.projection(shape.ffn, shape.hidden, bias=shape.mlp_bias, std=config.residual_std)

    def forward(self, x_h: Tensor) -> Tensor:
        """Map shape (..., h) to (..., h)."""
        out: Tensor = self.c_proj(functional.gelu(self.c_fc(x_h), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.shape.hidden, eps=config.norm_epsilon)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.shape.hidden, eps=config.norm_epsilon)
        self.mlp = feed_forward(config, lambda: MLP(config))
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_blh: Tensor, visible_b1ll: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map shape blh to blh, and the balance of experts."""
        x_blh = x_blh + self.drop(self.attn(self.ln_1(x_blh), visible_b1ll))
        added, balance = with_balance(self.mlp(self.ln_2(x_blh)))
        return x_blh + self.drop(added), balance


class Transformer(nn.Module):
    """Everything but the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        self.wte = token_table(config, Initialiser(config.init_std))
        self.wpe = Embedding(shape.positions, shape.hidden, init=Initialiser(config.position_std))
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.hidden, eps=config.norm_epsilon)

    def forward(self, input_ids_bl: Tensor, attention_mask_bl: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Map token numbers bl to blh, and return the balance of experts."""
        positions_l = positions(input_ids_bl.shape[1], self.config.shape.positions, input_ids_bl)
        x_blh = self.drop(self.wte(input_ids_bl) + self.wpe(positions_l))
        x_blh, balance = run_blocks(self.h, self.config, x_blh, visible(attention_mask_bl, causal=True))
        return self.ln_f(x_blh), balance


class GPT(Pretrained):
    """The language model. ``transformer.wte`` is also its head if the shape ties them."""

    files, config_type = GPT2_FILES, GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        config.check_head("a GPT")
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = own_head(config)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        return_logits: bool = False,
        logits_to_keep: int = 0,
    ) -> GPTOutput:
        """Return logits of the token after each one; with labels, usually the input itself, the loss.

        Labels are shifted here: the logits at a token are compared with the label of the next. Labels of -100 do not
        count. ``attention_mask`` is 0 where a token is padding. With labels, logits are made a chunk at a time and not
        returned. ``return_logits`` or the config's ``loss_chunk_tokens`` may change that. Without labels
        ``logits_to_keep=1`` makes those of the last token only; 0 those of all.
        """
        x_blh, balance = self.transformer(input_ids, attention_mask)
        tables = words(self.lm_head, self.transformer.wte)
        if labels is None:
            return GPTOutput(logits=all_logits(x_blh, tables, logits_to_keep))
        return GPTOutput(
            *language_loss(x_blh, tables, labels, self.config, balance=balance, return_logits=return_logits)
        )

    generate = generate


class GPTClassifier(Pretrained):
    """GPT with scores of classes in place of the language head, read at each sequence's last token."""

    files, config_type = GPT2_FILES, GPTConfig
    classifies = True

    def __init__(self, config: GPTConfig, classes: int = 2) -> None:
        if config.head_tiles > 1:
            raise InvalidInput(
                f"head_tiles={config.head_tiles}: a GPTClassifier has no head of words to cut, only scores of "
                f"{classes} classes; leave head_tiles out, or build a GPT"
            )
        check_whole("classes", classes, 1)
        super().__init__()
        self.config = config
        self.classes = classes
        self.transformer = Transformer(config)
        self.score = Linear(config.shape.hidden, classes, bias=False, init=Initialiser(config.init_std))

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> GPTOutput:
        """Return logits of shape (batch, classes); with the right classes as labels also the loss."""
        x_blh, balance = self.transformer(input_ids, attention_mask)
        length = input_ids.shape[1]
        if attention_mask is None:
            last_bh = x_blh[:, -1]
        else:
            last_b = (attention_mask.bool() * torch.arange(length, device=x_blh.device)).argmax(1)
            last_bh = x_blh[torch.arange(len(x_blh), device=x_blh.device), last_b]
        logits = self.score(last_bh)
        if labels is None:
            return GPTOutput(logits=logits)
        return GPTOutput(add_balance(functional.cross_entropy(logits.float(), labels), balance, self.config), logits)

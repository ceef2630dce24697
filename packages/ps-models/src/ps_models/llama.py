"""Define Llama in one file: pre-norm blocks, RMS norms, rotary positions, a gated MLP, shared keys.

Tensors have the names, order and layout of Hugging Face's ``LlamaForCausalLM``. By its shape's family the same file
also makes Mistral's, Qwen2's and Qwen3's. Letters at the end of a tensor's name are its shape, as in `ps_models.gpt`; g
are the heads of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ps_core._errors import InvalidInput
from ps_core._units import check_number
from ps_core._workloads.shapes import Family
from ps_models._config import DecoderConfig
from ps_models._files import LLAMA_FILES
from ps_models._generate import generate
from ps_models._layers import Initialiser, Linear, linear, own_head, positions, run_blocks, token_table, visible, words
from ps_models._loss import all_logits, language_loss
from ps_models._moe import feed_forward, with_balance
from ps_models._pretrained import Pretrained
from ps_models.gpt import GPTOutput

__all__ = ["Llama", "LlamaConfig"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """A shape of the llama, mistral, qwen2 or qwen3 family, and the options that it does not decide."""

    norm_epsilon: float = 1e-5
    rope_theta: float = 500_000.0
    """The base of the rotary wavelengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_family("Llama", Family.LLAMA, Family.MISTRAL, Family.QWEN2, Family.QWEN3)
        check_number("norm_epsilon", self.norm_epsilon)
        check_number("rope_theta", self.rope_theta, 1.0)
        if self.shape.head_dim % 2:
            raise InvalidInput(
                f"{self.shape.name}: head_dim must be even, because positions rotate halves of a head; found "
                f"{self.shape.head_dim}"
            )

    def projection(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a linear map of a block."""
        return linear(Linear, inputs, outputs, bias=bias, init=Initialiser(self.init_std), tiles=self.tiles)

    def norm(self, width: int | None = None) -> nn.RMSNorm:
        """Return a norm over hidden states, or over ``width``."""
        return nn.RMSNorm(width or self.shape.hidden, eps=self.norm_epsilon)


def rotation(length: int, config: LlamaConfig, like: Tensor) -> Tensor:
    """Return cosines and sines, shape (2, l, d), that rotate queries and keys by their positions."""
    width = config.shape.head_dim
    positions_l = positions(length, config.shape.positions, like).float()
    exponents = torch.arange(0, width, 2, device=like.device).float() / width
    angles_ld = torch.outer(positions_l, config.rope_theta**-exponents).repeat(1, 2)
    return torch.stack([angles_ld.cos(), angles_ld.sin()]).to(like.dtype)


def rotated(x_bald: Tensor, rotation_2ld: Tensor) -> Tensor:
    """Rotate each pair of a head's halves by its position's angle."""
    cosine_ld, sine_ld = rotation_2ld.unbind()
    first, second = x_bald.chunk(2, dim=-1)
    return x_bald * cosine_ld + torch.cat([-second, first], dim=-1) * sine_ld


class Attention(nn.Module):
    """Causal self-attention; ``heads / kv_heads`` queries share a key."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.shape = shape = config.shape
        self.dropout = config.attention_dropout
        self.q_proj = config.projection(shape.hidden, shape.query_width, bias=shape.qkv_bias)
        self.k_proj = config.projection(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.v_proj = config.projection(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.o_proj = config.projection(shape.query_width, shape.hidden, bias=shape.out_bias)
        self.q_norm = config.norm(shape.head_dim) if shape.qk_norm else nn.Identity()
        self.k_norm = config.norm(shape.head_dim) if shape.qk_norm else nn.Identity()

    def forward(self, x_blh: Tensor, rotation_2ld: Tensor, visible_b1ll: Tensor | None) -> Tensor:
        """Map shape blh to blh."""
        batch, length, _ = x_blh.shape
        width = (batch, length, -1, self.shape.head_dim)
        q_bald = self.q_norm(self.q_proj(x_blh).view(width)).transpose(1, 2)
        k_bgld = self.k_norm(self.k_proj(x_blh).view(width)).transpose(1, 2)
        v_bgld = self.v_proj(x_blh).view(width).transpose(1, 2)
        y_bald = functional.scaled_dot_product_attention(
            rotated(q_bald, rotation_2ld),
            rotated(k_bgld, rotation_2ld),
            v_bgld,
            attn_mask=visible_b1ll,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=visible_b1ll is None,
            enable_gqa=self.shape.kv_heads != self.shape.heads,
        )
        out: Tensor = self.o_proj(y_bald.transpose(1, 2).reshape(batch, length, self.shape.query_width))
        return out


class MLP(nn.Module):
    """Two projections side by side, one through SiLU, multiplied; and one back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        shape = config.shape
        self.gate_proj = config.projection(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.up_proj = config.projection(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.down_proj = config.projection(shape.ffn, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x_h: Tensor) -> Tensor:
        """Map shape (..., h) to (..., h)."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_h)) * self.up_proj(x_h))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each after a norm and added to its input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = feed_forward(config, lambda: MLP(config))
        self.input_layernorm = config.norm()
        self.post_attention_layernorm = config.norm()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_blh: Tensor, rotation_2ld: Tensor, visible_b1ll: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map shape blh to blh, and the balance of experts."""
        x_blh = x_blh + self.drop(self.self_attn(self.input_layernorm(x_blh), rotation_2ld, visible_b1ll))
        added, balance = with_balance(self.mlp(self.post_attention_layernorm(x_blh)))
        return x_blh + self.drop(added), balance


class Bare(nn.Module):
    """Everything but the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, shape = config, config.shape
        self.embed_tokens = token_table(config, Initialiser(config.init_std))
        self.layers = nn.ModuleList(Block(config) for _ in range(shape.layers))
        self.norm = config.norm()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, input_ids_bl: Tensor, attention_mask_bl: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Map token numbers bl to blh, and return the balance of experts."""
        x_blh = self.drop(self.embed_tokens(input_ids_bl))
        rotation_2ld = rotation(input_ids_bl.shape[1], self.config, x_blh)
        seen = visible(attention_mask_bl, causal=True)
        x_blh, balance = run_blocks(self.layers, self.config, x_blh, rotation_2ld, seen)
        return self.norm(x_blh), balance


class Llama(Pretrained):
    """The language model. ``model.embed_tokens`` is also its head if the shape ties them."""

    files, config_type = LLAMA_FILES, LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        config.check_head("a Llama")
        super().__init__()
        self.config = config
        self.model = Bare(config)
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
        """Return logits or the loss, as `GPT.forward` does."""
        x_blh, balance = self.model(input_ids, attention_mask)
        tables = words(self.lm_head, self.model.embed_tokens)
        if labels is None:
            return GPTOutput(logits=all_logits(x_blh, tables, logits_to_keep))
        return GPTOutput(
            *language_loss(x_blh, tables, labels, self.config, balance=balance, return_logits=return_logits)
        )

    generate = generate

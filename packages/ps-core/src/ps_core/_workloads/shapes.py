"""Define transformer shapes, and the tensors of each.

Tensors have Hugging Face's names, in the order of ``named_parameters()``. A tied head is not listed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ps_core._errors import InvalidInput
from ps_core._trace import Tensor
from ps_core._units import check_flag, check_whole, shown

MOST_LAYERS = 10_000
"""The most layers that are accepted."""
_MOST_WIDTH = 2**31
"""The largest width that is accepted, far beyond any model: a mistyped file should be refused."""


class Family(StrEnum):
    """Name the family of a model: its tensors' names and its block (place of norms, kind of positions)."""

    GPT2 = "gpt2"
    """Pre-norm decoder, learned positions, fused query-key-value."""
    BERT = "bert"
    """Post-norm encoder, learned positions and token types, masked-word head with a transform before it."""
    LLAMA = "llama"
    """Pre-norm decoder, rotary positions, as the next three, which differ in their bias and norm flags."""
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"


class Norm(StrEnum):
    """Name what a normalisation learns: scale and shift, or scale alone."""

    LAYER = "layer"
    RMS = "rms"


class Part(StrEnum):
    """Name the part of a model that uses a tensor."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    HEAD = "head"
    """Final norm and head; a tied head's matrix is the first tensor of EMBEDDING."""


class Placed(NamedTuple):
    """A tensor and the part that uses it; ``layer`` is -1 outside the blocks."""

    part: Part
    layer: int
    name: str
    numel: int


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Hold everything that decides which tensors a model has and what computing with them costs."""

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than ``heads`` where queries share them."""
    head_dim: int
    ffn: int
    """Width of the MLP."""
    vocabulary: int
    positions: int
    """Longest sequence. A table of this length is learned in the families with learned positions."""
    tied_head: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    """Bias of attention's output projection."""
    mlp_bias: bool = True
    token_types: int = 0
    """Rows of the token-type table (BERT)."""
    next_sentence: bool = False
    """True if there are a pooler and a next-sentence head too (BERT)."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "positions"):
            value = getattr(self, field)
            most = MOST_LAYERS if field == "layers" else _MOST_WIDTH
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidInput(
                    f"{self.name}: {field} must be a whole number from 1 to {most}, found {shown(value)}"
                )
        for field in ("tied_head", "qkv_bias", "out_bias", "mlp_bias", "next_sentence"):
            check_flag(f"{self.name}: {field}", getattr(self, field))
        check_whole(f"{self.name}: token_types", self.token_types, 0, _MOST_WIDTH)
        if self.heads % self.kv_heads:
            raise InvalidInput(f"{self.name}: {self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        plain = self.family in (Family.GPT2, Family.BERT)
        if plain and not self.heads * self.head_dim == self.kv_heads * self.head_dim == self.hidden:
            raise InvalidInput(
                f"{self.name}: in the {self.family.value} family heads x head_dim must be the hidden size "
                f"{self.hidden}, found {self.heads} (key-value {self.kv_heads}) x {self.head_dim}"
            )

    @property
    def query_width(self) -> int:
        """Return the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads together, which is also that of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def causal(self) -> bool:
        """Return True if a token attends only to earlier ones."""
        return self.family is not Family.BERT

    @property
    def post_norm(self) -> bool:
        """Return True if a norm follows each residual sum; False if it precedes each branch."""
        return self.family is Family.BERT

    @property
    def learned_positions(self) -> bool:
        """Return True if positions are a table of parameters."""
        return self.family in (Family.GPT2, Family.BERT)

    @property
    def norm(self) -> Norm:
        """Return what the norms learn."""
        return Norm.LAYER if self.learned_positions else Norm.RMS

    @property
    def qk_norm(self) -> bool:
        """Return True if queries and keys are normalised too, one head at a time."""
        return self.family is Family.QWEN3

    @property
    def gated_mlp(self) -> bool:
        """Return True if the MLP multiplies its activation with a second projection."""
        return not self.learned_positions

    @property
    def parameters(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(tensor.numel for tensor in placed_tensors(self))


def tensors(shape: TransformerShape) -> tuple[Tensor, ...]:
    """Return every parameter tensor, in the order of ``named_parameters()``."""
    return tuple(Tensor(name=tensor.name, numel=tensor.numel) for tensor in placed_tensors(shape))


def placed_tensors(shape: TransformerShape) -> tuple[Placed, ...]:
    """Return every parameter tensor with the part of the model that uses it."""
    if shape.family is Family.GPT2:
        return tuple(_gpt2(shape))
    if shape.family is Family.BERT:
        return tuple(_bert(shape))
    return tuple(_llama(shape))


def _linear(part: Part, layer: int, name: str, inputs: int, outputs: int, *, bias: bool) -> Iterator[Placed]:
    yield Placed(part, layer, f"{name}.weight", inputs * outputs)
    if bias:
        yield Placed(part, layer, f"{name}.bias", outputs)


def _norm(shape: TransformerShape, part: Part, layer: int, name: str) -> Iterator[Placed]:
    yield Placed(part, layer, f"{name}.weight", shape.hidden)
    if shape.norm is Norm.LAYER:
        yield Placed(part, layer, f"{name}.bias", shape.hidden)


def _gpt2(shape: TransformerShape) -> Iterator[Placed]:
    hidden = shape.hidden
    yield Placed(Part.EMBEDDING, -1, "transformer.wte.weight", shape.vocabulary * hidden)
    yield Placed(Part.EMBEDDING, -1, "transformer.wpe.weight", shape.positions * hidden)
    for layer in range(shape.layers):
        at, mlp, path = Part.ATTENTION, Part.MLP, f"transformer.h.{layer}"
        yield from _norm(shape, at, layer, f"{path}.ln_1")
        yield from _linear(at, layer, f"{path}.attn.c_attn", hidden, 3 * hidden, bias=shape.qkv_bias)
        yield from _linear(at, layer, f"{path}.attn.c_proj", hidden, hidden, bias=shape.out_bias)
        yield from _norm(shape, mlp, layer, f"{path}.ln_2")
        yield from _linear(mlp, layer, f"{path}.mlp.c_fc", hidden, shape.ffn, bias=shape.mlp_bias)
        yield from _linear(mlp, layer, f"{path}.mlp.c_proj", shape.ffn, hidden, bias=shape.mlp_bias)
    yield from _norm(shape, Part.HEAD, -1, "transformer.ln_f")
    if not shape.tied_head:
        yield from _linear(Part.HEAD, -1, "lm_head", hidden, shape.vocabulary, bias=False)


def _bert(shape: TransformerShape) -> Iterator[Placed]:
    hidden, path = shape.hidden, "bert.embeddings"
    yield Placed(Part.EMBEDDING, -1, f"{path}.word_embeddings.weight", shape.vocabulary * hidden)
    yield Placed(Part.EMBEDDING, -1, f"{path}.position_embeddings.weight", shape.positions * hidden)
    if shape.token_types:
        yield Placed(Part.EMBEDDING, -1, f"{path}.token_type_embeddings.weight", shape.token_types * hidden)
    yield from _norm(shape, Part.EMBEDDING, -1, f"{path}.LayerNorm")
    for layer in range(shape.layers):
        at, mlp, path = Part.ATTENTION, Part.MLP, f"bert.encoder.layer.{layer}"
        for projection in ("query", "key", "value"):
            yield from _linear(at, layer, f"{path}.attention.self.{projection}", hidden, hidden, bias=shape.qkv_bias)
        yield from _linear(at, layer, f"{path}.attention.output.dense", hidden, hidden, bias=shape.out_bias)
        yield from _norm(shape, at, layer, f"{path}.attention.output.LayerNorm")
        yield from _linear(mlp, layer, f"{path}.intermediate.dense", hidden, shape.ffn, bias=shape.mlp_bias)
        yield from _linear(mlp, layer, f"{path}.output.dense", shape.ffn, hidden, bias=shape.mlp_bias)
        yield from _norm(shape, mlp, layer, f"{path}.output.LayerNorm")
    if shape.next_sentence:
        yield from _linear(Part.HEAD, -1, "bert.pooler.dense", hidden, hidden, bias=True)
    yield Placed(Part.HEAD, -1, "cls.predictions.bias", shape.vocabulary)
    yield from _linear(Part.HEAD, -1, "cls.predictions.transform.dense", hidden, hidden, bias=True)
    yield from _norm(shape, Part.HEAD, -1, "cls.predictions.transform.LayerNorm")
    if not shape.tied_head:
        yield from _linear(Part.HEAD, -1, "cls.predictions.decoder", hidden, shape.vocabulary, bias=False)
    if shape.next_sentence:
        yield from _linear(Part.HEAD, -1, "cls.seq_relationship", hidden, 2, bias=True)


def _llama(shape: TransformerShape) -> Iterator[Placed]:
    hidden, query, keys = shape.hidden, shape.query_width, shape.kv_width
    yield Placed(Part.EMBEDDING, -1, "model.embed_tokens.weight", shape.vocabulary * hidden)
    for layer in range(shape.layers):
        at, mlp, path = Part.ATTENTION, Part.MLP, f"model.layers.{layer}"
        for projection, width in (("q", query), ("k", keys), ("v", keys)):
            yield from _linear(at, layer, f"{path}.self_attn.{projection}_proj", hidden, width, bias=shape.qkv_bias)
        yield from _linear(at, layer, f"{path}.self_attn.o_proj", query, hidden, bias=shape.out_bias)
        if shape.qk_norm:
            yield Placed(at, layer, f"{path}.self_attn.q_norm.weight", shape.head_dim)
            yield Placed(at, layer, f"{path}.self_attn.k_norm.weight", shape.head_dim)
        for projection in ("gate_proj", "up_proj"):
            yield from _linear(mlp, layer, f"{path}.mlp.{projection}", hidden, shape.ffn, bias=shape.mlp_bias)
        yield from _linear(mlp, layer, f"{path}.mlp.down_proj", shape.ffn, hidden, bias=shape.mlp_bias)
        yield from _norm(shape, at, layer, f"{path}.input_layernorm")
        yield from _norm(shape, mlp, layer, f"{path}.post_attention_layernorm")
    yield from _norm(shape, Part.HEAD, -1, "model.norm")
    if not shape.tied_head:
        yield from _linear(Part.HEAD, -1, "lm_head", hidden, shape.vocabulary, bias=False)

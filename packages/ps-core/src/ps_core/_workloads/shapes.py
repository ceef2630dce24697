"""Transformer shapes, the tensors each one has, and the named sizes.

Tensors carry the names Hugging Face gives them, in the order ``named_parameters()`` lists them; a tied head is not
listed twice.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ps_core._errors import InvalidInput
from ps_core._trace import Tensor

_MOST_LAYERS = 10_000
_MOST_WIDTH = 2**31
"""Far beyond any model; a mistyped file should be refused, not computed with."""


class Family(StrEnum):
    """Whose names and whose block: where norms sit, how positions enter."""

    GPT2 = "gpt2"
    """Pre-norm decoder, learned positions, fused query-key-value."""
    BERT = "bert"
    """Post-norm encoder, learned positions and token types, masked-word head with a transform before it."""
    LLAMA = "llama"
    """Pre-norm decoder, rotary positions. So are the next three, which differ in their bias and norm flags."""
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"


class Norm(StrEnum):
    """What a normalisation learns: scale and shift, or scale alone."""

    LAYER = "layer"
    RMS = "rms"


class Part(StrEnum):
    """Where in the model a tensor works."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    HEAD = "head"
    """Final norm and head; a tied head's matrix is the first tensor of EMBEDDING."""


class Placed(NamedTuple):
    """A tensor and where it works; ``layer`` is -1 outside the blocks."""

    part: Part
    layer: int
    name: str
    numel: int


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Everything that decides which tensors a model has and what computing with them costs."""

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
    """Whether a pooler and a next-sentence head are there too (BERT)."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocabulary", "positions"):
            value = getattr(self, field)
            most = _MOST_LAYERS if field == "layers" else _MOST_WIDTH
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidInput(f"{self.name}: {field} must be a whole number from 1 to {most}, found {value!r}")
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
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return self.family is not Family.BERT

    @property
    def post_norm(self) -> bool:
        """Whether a norm follows each residual sum instead of preceding each branch."""
        return self.family is Family.BERT

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a table of parameters."""
        return self.family in (Family.GPT2, Family.BERT)

    @property
    def norm(self) -> Norm:
        """What its norms learn."""
        return Norm.LAYER if self.learned_positions else Norm.RMS

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised too, a head at a time."""
        return self.family is Family.QWEN3

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP multiplies its activation with a second projection."""
        return not self.learned_positions

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for tensor in placed_tensors(self))


def tensors(shape: TransformerShape) -> tuple[Tensor, ...]:
    """Every parameter tensor, in the order of ``named_parameters()``."""
    return tuple(Tensor(name=tensor.name, numel=tensor.numel) for tensor in placed_tensors(shape))


def placed_tensors(shape: TransformerShape) -> tuple[Placed, ...]:
    """The same tensors with the part of the model each belongs to."""
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


# The published sizes: layers and hidden size. All have 16 heads, 175B has 96; vocabulary and positions are GPT-2's
# (50257 and 1024: every published run but 0.7B's, at 128, has sequences of 1024). The table gives neither, so these
# are our choice; only the smallest sizes feel it.
_PUBLISHED = {
    "0.7b": (24, 1536),
    "1b": (20, 2048),
    "2b": (40, 2048),
    "4b": (64, 2304),
    "6b": (53, 3072),
    "8b": (72, 3072),
    "10b": (50, 4096),
    "11b": (55, 4096),
    "12b": (60, 4096),
    "13b": (65, 4096),
    "15b": (78, 4096),
    "18b": (90, 4096),
    "20b": (25, 8192),
    "30b": (37, 8192),
    "40b": (50, 8192),
    "50b": (62, 8192),
    "60b": (75, 8192),
    "68b": (66, 9216),
    "175b": (96, 12288),
}
_GPT2_VOCABULARY = 50257
_PUBLISHED_HEADS = {**{hidden: 16 for _, hidden in _PUBLISHED.values()}, 12288: 96}


def gpt(
    layers: int,
    hidden: int,
    *,
    heads: int | None = None,
    vocabulary: int = _GPT2_VOCABULARY,
    positions: int = 1024,
    name: str | None = None,
) -> TransformerShape:
    """A GPT-2-like shape.

    Heads not given: as published where the hidden size is (16, or 96 at 12288), else 128 wide where that divides the
    hidden size, else as near above 64 wide as divides it.
    """
    name = name or f"gpt-{layers}x{hidden}"
    if heads is None:
        heads = _PUBLISHED_HEADS.get(hidden) or _heads(hidden)
    if heads < 1 or hidden % heads:
        raise InvalidInput(f"{name}: the hidden size {hidden} cannot be cut into {heads} equal heads")
    return TransformerShape(
        name=name,
        family=Family.GPT2,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=vocabulary,
        positions=positions,
    )


def _heads(hidden: int) -> int:
    if hidden % 128 == 0:
        return max(1, hidden // 128)
    return next((count for count in range(hidden // 64, 0, -1) if hidden % count == 0), 1)


def bert(layers: int, hidden: int, heads: int, *, name: str) -> TransformerShape:
    """A BERT shape with both pre-training heads (masked words, next sentence) and the uncased vocabulary."""
    return TransformerShape(
        name=name,
        family=Family.BERT,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocabulary=30522,
        positions=512,
        token_types=2,
        next_sentence=True,
    )


def llama(  # noqa: PLR0913 - the numbers of a shape
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    *,
    ffn: int,
    vocabulary: int,
    positions: int,
    tied_head: bool,
    name: str,
) -> TransformerShape:
    """A Llama shape, without biases."""
    return TransformerShape(
        name=name,
        family=Family.LLAMA,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocabulary=vocabulary,
        positions=positions,
        tied_head=tied_head,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


_LLAMA3 = {"vocabulary": 128256, "positions": 8192}
_NAMED = {
    shape.name: shape
    for shape in (
        gpt(10, 256, heads=4, vocabulary=8192, positions=512, name="gpt-10m"),
        gpt(8, 640, heads=10, vocabulary=16384, name="gpt-50m"),
        gpt(12, 768, heads=12, name="gpt2"),
        gpt(24, 1024, heads=16, name="gpt2-medium"),
        gpt(36, 1280, heads=20, name="gpt2-large"),
        gpt(48, 1600, heads=25, name="gpt2-xl"),
        bert(12, 768, 12, name="bert-base"),
        bert(24, 1024, 16, name="bert-large"),
        llama(10, 256, 4, 2, ffn=704, vocabulary=8192, positions=512, tied_head=True, name="llama-10m"),
        llama(8, 640, 10, 5, ffn=1728, vocabulary=16384, positions=1024, tied_head=True, name="llama-50m"),
        llama(16, 2048, 32, 8, ffn=8192, **_LLAMA3, tied_head=True, name="llama-1b"),
        llama(32, 4096, 32, 8, ffn=14336, **_LLAMA3, tied_head=False, name="llama-8b"),
        *(gpt(*size, name=f"gpt-{label}") for label, size in _PUBLISHED.items()),
        gpt(128, 25600, heads=160, name="gpt-1t"),
    )
}
_FREE_NAME = re.compile(r"(gpt|bert)-(\d{1,6})x(\d{1,7})")


def names() -> tuple[str, ...]:
    """Every name `shape` knows, small to large within each kind."""
    return tuple(_NAMED)


def published_names() -> tuple[str, ...]:
    """The names of the published size table."""
    return tuple(f"gpt-{label}" for label in _PUBLISHED)


def shape(name: str, *, vocabulary: int | None = None, positions: int | None = None) -> TransformerShape:
    """The shape of that name (case does not matter), or of ``gpt-LAYERSxHIDDEN`` or ``bert-LAYERSxHIDDEN``.

    Numbers given replace its own.
    """
    key = name.strip().lower()
    found = _NAMED.get(key)
    if found is None:
        free = _FREE_NAME.fullmatch(key)
        if free is None:
            raise InvalidInput(f"no model is called {name!r}; {_nearest(key)}")
        layers, hidden = int(free[2]), int(free[3])
        found = gpt(layers, hidden) if free[1] == "gpt" else bert(layers, hidden, _heads(hidden), name=key)
    if vocabulary is not None:
        found = replace(found, vocabulary=vocabulary)
    return found if positions is None else replace(found, positions=positions)


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, _NAMED, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(_NAMED)}, gpt-LAYERSxHIDDEN or bert-LAYERSxHIDDEN"


def size_table() -> str:
    """Every named size as a Markdown table."""
    lines = [
        "| name | layers | hidden | heads | head width | vocabulary | positions | parameters |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in _NAMED.values():
        numbers = (row.layers, row.hidden, row.heads, row.head_dim, row.vocabulary, row.positions, row.parameters)
        lines.append(f"| `{row.name}` | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"

"""Define BERT in one file: post-norm blocks, learned positions and token types, both pre-training heads.

Tensors have the names, order and layout of Hugging Face's ``BertForPreTraining`` (``BertForMaskedLM`` for a shape
without next-sentence head). Letters at the end of a tensor's name are its shape, as in `ps_models.gpt`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ps_core._errors import InvalidInput
from ps_core._units import check_number, check_whole
from ps_core._workloads.shapes import Family, TransformerShape
from ps_models._config import ModelConfig
from ps_models._files import BERT_FILES
from ps_models._layers import Embedding, Initialiser, Linear, linear, positions, run_blocks, token_table, visible
from ps_models._loss import head_loss
from ps_models._pretrained import Pretrained

__all__ = ["BERT", "BERTClassifier", "BERTConfig", "BERTOutput"]


@dataclass(frozen=True, kw_only=True)
class BERTConfig(ModelConfig):
    """A shape of the bert family, and the options that it does not decide."""

    norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        self.need_family("BERT", Family.BERT)
        check_number("norm_epsilon", self.norm_epsilon)
        if not self.shape.tied_head:
            raise InvalidInput(f"{self.shape.name}: BERT's masked-word head is tied to its token table")

    def projection(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a linear map of a block."""
        return linear(
            Linear, inputs, outputs, bias=bias, init=Initialiser(self.init_std, truncated=True), tiles=self.tiles
        )

    def head(self, inputs: int, outputs: int) -> Linear:
        """Return a linear map of a head."""
        return Linear(inputs, outputs, bias=True, init=Initialiser(self.init_std, truncated=True))

    def norm(self) -> nn.LayerNorm:
        """Return a norm over hidden states."""
        return nn.LayerNorm(self.shape.hidden, eps=self.norm_epsilon)


@dataclass(frozen=True)
class BERTOutput:
    """The output of a forward pass."""

    loss: Tensor | None = None
    """The loss in fp32: of the masked words, of the next sentence, or their sum; None without labels."""
    prediction_logits: Tensor | None = None
    """Logits of shape blv; None if the loss was computed in chunks."""
    seq_relationship_logits: Tensor | None = None
    """Logits of shape (batch, 2); None if the shape has no next-sentence head."""

    @property
    def logits(self) -> Tensor | None:
        """Return the logits of the words."""
        return self.prediction_logits


@dataclass(frozen=True)
class ClassifierOutput:
    """The output of a classifier."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    """Logits of shape (batch, classes)."""


class Embeddings(nn.Module):
    """Sum words, positions and token types, and normalise the sum."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.shape = shape = config.shape
        init = Initialiser(config.init_std, truncated=True)
        self.word_embeddings = token_table(config, init)
        self.position_embeddings = Embedding(shape.positions, shape.hidden, init=init)
        if shape.token_types:
            self.token_type_embeddings = Embedding(shape.token_types, shape.hidden, init=init)
        self.LayerNorm = config.norm()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids_bl: Tensor, token_types_bl: Tensor | None) -> Tensor:
        """Map token numbers bl to blh."""
        positions_l = positions(input_ids_bl.shape[1], self.shape.positions, input_ids_bl)
        x_blh = self.word_embeddings(input_ids_bl) + self.position_embeddings(positions_l)
        if self.shape.token_types:
            types = torch.zeros_like(input_ids_bl) if token_types_bl is None else token_types_bl
            x_blh = x_blh + self.token_type_embeddings(types)
        out: Tensor = self.dropout(self.LayerNorm(x_blh))
        return out


class SelfAttention(nn.Module):
    """Attention in both directions, without its output projection."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        hidden, bias = config.shape.hidden, config.shape.qkv_bias
        self.heads, self.dropout = config.shape.heads, config.attention_dropout
        self.query = config.projection(hidden, hidden, bias=bias)
        self.key = config.projection(hidden, hidden, bias=bias)
        self.value = config.projection(hidden, hidden, bias=bias)

    def forward(self, x_blh: Tensor, visible_b11l: Tensor | None) -> Tensor:
        """Map shape blh to blh."""
        batch, length, hidden = x_blh.shape
        q_bald, k_bald, v_bald = (
            projection(x_blh).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y_bald = functional.scaled_dot_product_attention(
            q_bald, k_bald, v_bald, attn_mask=visible_b11l, dropout_p=self.dropout if self.training else 0.0
        )
        return y_bald.transpose(1, 2).reshape(batch, length, hidden)


class Added(nn.Module):
    """Project, add to the residual stream, and normalise."""

    def __init__(self, config: BERTConfig, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self.dense = config.projection(inputs, config.shape.hidden, bias=bias)
        self.LayerNorm = config.norm()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, y: Tensor, x_blh: Tensor) -> Tensor:
        """Add the projection of ``y`` to ``x_blh``, and normalise."""
        out: Tensor = self.LayerNorm(self.dropout(self.dense(y)) + x_blh)
        return out


class Attention(nn.Module):
    """Attention, its output projection and the residual sum."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Added(config, config.shape.hidden, bias=config.shape.out_bias)

    def forward(self, x_blh: Tensor, visible_b11l: Tensor | None) -> Tensor:
        """Map shape blh to blh."""
        out: Tensor = self.output(self.self(x_blh, visible_b11l), x_blh)
        return out


class Intermediate(nn.Module):
    """The MLP's first projection and its GELU."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = config.projection(config.shape.hidden, config.shape.ffn, bias=config.shape.mlp_bias)

    def forward(self, x_blh: Tensor) -> Tensor:
        """Map shape blh to (b, l, MLP width)."""
        return functional.gelu(self.dense(x_blh))


class Block(nn.Module):
    """Attention, then the MLP, each added to its input and normalised after."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Intermediate(config)
        self.output = Added(config, config.shape.ffn, bias=config.shape.mlp_bias)

    def forward(self, x_blh: Tensor, visible_b11l: Tensor | None) -> tuple[Tensor, None]:
        """Map shape blh to blh."""
        x_blh = self.attention(x_blh, visible_b11l)
        return self.output(self.intermediate(x_blh), x_blh), None


class Encoder(nn.Module):
    """All blocks."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(config) for _ in range(config.shape.layers))


class Pooler(nn.Module):
    """Represent the whole sequence by its first token, projected."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = config.head(config.shape.hidden, config.shape.hidden)

    def forward(self, x_blh: Tensor) -> Tensor:
        """Map shape blh to bh."""
        return torch.tanh(self.dense(x_blh[:, 0]))


class Bare(nn.Module):
    """Everything but the heads."""

    def __init__(self, config: BERTConfig, *, pooled: bool) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config) if pooled else None

    def forward(
        self, input_ids_bl: Tensor, attention_mask_bl: Tensor | None, token_types_bl: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Map token numbers bl to blh, and to the pooled bh if there is a pooler."""
        x_blh = self.embeddings(input_ids_bl, token_types_bl)
        x_blh, _ = run_blocks(self.encoder.layer, self.config, x_blh, visible(attention_mask_bl, causal=False))
        return x_blh, None if self.pooler is None else self.pooler(x_blh)


class Transform(nn.Module):
    """Transform hidden states before the masked-word head's matrix."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = config.head(config.shape.hidden, config.shape.hidden)
        self.LayerNorm = config.norm()

    def forward(self, x_blh: Tensor) -> Tensor:
        """Map shape blh to blh."""
        out: Tensor = self.LayerNorm(functional.gelu(self.dense(x_blh)))
        return out


class Predictions(nn.Module):
    """The masked-word head; its matrix is the token table."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.shape.vocabulary))
        self.transform = Transform(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zeros: all words are equally likely."""
        nn.init.zeros_(self.bias)


class Heads(nn.Module):
    """Both heads of pre-training, or the masked-word head alone."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.predictions = Predictions(config)
        self.seq_relationship = config.head(config.shape.hidden, 2) if config.shape.next_sentence else None


class BERT(Pretrained):
    """The model for pre-training."""

    files, config_type = BERT_FILES, BERTConfig

    def __init__(self, config: BERTConfig) -> None:
        config.check_head("a BERTClassifier, or another model")
        super().__init__()
        self.config = config
        self.bert = Bare(config, pooled=config.shape.next_sentence)
        self.cls = Heads(config)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        return_logits: bool = False,
    ) -> BERTOutput:
        """Return logits of words and of the next sentence; with both labels, the sum of the losses.

        Labels are the right words where one was masked, and -100 elsewhere. With labels the words' logits are made a
        chunk at a time and not returned. ``return_logits`` or the config's ``loss_chunk_tokens`` may change that.
        """
        x_blh, pooled_bh = self.bert(input_ids, attention_mask, token_type_ids)
        head, table_vh = self.cls.predictions, self.bert.embeddings.word_embeddings.weight
        x_blh = head.transform(x_blh)
        relation = None if self.cls.seq_relationship is None else self.cls.seq_relationship(pooled_bh)
        loss = _next_sentence(self.config.shape, relation, next_sentence_label)
        if labels is None:
            return BERTOutput(loss, functional.linear(x_blh, table_vh, head.bias), relation)
        rows = None if return_logits else self.config.loss_chunk_tokens
        words, logits_nv = head_loss(x_blh.flatten(0, 1), table_vh, labels.flatten(), bias_v=head.bias, rows=rows)
        logits_blv = None if logits_nv is None else logits_nv.view(*input_ids.shape, -1)
        return BERTOutput(words if loss is None else words + loss, logits_blv, relation)


def _next_sentence(shape: TransformerShape, relation: Tensor | None, labels: Tensor | None) -> Tensor | None:
    if labels is None:
        return None
    if relation is None:
        raise InvalidInput(f"{shape.name} has no next-sentence head: build it with next_sentence=True")
    return functional.cross_entropy(relation.float(), labels.flatten())


class BERTClassifier(Pretrained):
    """BERT with scores of classes for the whole sequence."""

    files, config_type = BERT_FILES, BERTConfig
    classifies = True

    def __init__(self, config: BERTConfig, classes: int = 2) -> None:
        check_whole("classes", classes, 1)
        super().__init__()
        self.config = config
        self.classes = classes
        self.bert = Bare(config, pooled=True)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = config.head(config.shape.hidden, classes)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ClassifierOutput:
        """Return logits of shape (batch, classes); with the right classes as labels also the loss."""
        _, pooled_bh = self.bert(input_ids, attention_mask, token_type_ids)
        logits = self.classifier(self.dropout(pooled_bh))
        if labels is None:
            return ClassifierOutput(logits=logits)
        return ClassifierOutput(functional.cross_entropy(logits.float(), labels), logits)

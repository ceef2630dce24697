"""Define what every model's configuration has besides its shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from ps_core._errors import InvalidInput
from ps_core._units import check_flag, check_number, check_whole, is_finite
from ps_core._workloads.shapes import Family, TransformerShape


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A shape, and the options that it does not decide."""

    shape: TransformerShape
    checkpoint_blocks: bool | Collection[int] = False
    """Blocks that keep only their input for backward and recompute the rest: all, none, or these numbers."""
    offload_checkpoints: bool = False
    """Keep these inputs in host memory until backward needs them."""
    dropout: float = 0.0
    """The dropout rate of embeddings and of what each block adds."""
    attention_dropout: float = 0.0
    loss_chunk_tokens: int | None = 1024
    """Tokens whose logits exist at a time with labels; None: all at once, and `logits` are returned too."""
    tiles: int = 1
    """Number of parameters that each block's matrices are cut into (`TiledLinear`)."""
    cpu_embedding: bool = False
    """Look tokens up in host memory, where their table stays; not if the head is that table."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for field in ("dropout", "attention_dropout"):
            rate = getattr(self, field)
            if not is_finite(rate) or not 0.0 <= rate < 1.0:
                raise InvalidInput(f"{field} must be at least 0 and below 1, found {rate!r}")
        if self.loss_chunk_tokens is not None and not is_count(self.loss_chunk_tokens):
            raise InvalidInput(f"loss_chunk_tokens must be at least 1, or None, found {self.loss_chunk_tokens!r}")
        if not is_count(self.tiles):
            raise InvalidInput(f"tiles must be at least 1, found {self.tiles!r}")
        check_number("init_std", self.init_std)
        for field in ("offload_checkpoints", "cpu_embedding"):
            check_flag(field, getattr(self, field))
        self._check_blocks()

    def _check_blocks(self) -> None:
        blocks: object = self.checkpoint_blocks
        if not isinstance(blocks, Collection | bool) or isinstance(blocks, str):
            raise InvalidInput(f"checkpoint_blocks must be True, False or numbers of blocks, found {blocks!r}")
        if self.offload_checkpoints and not blocks:
            raise InvalidInput("offload_checkpoints needs checkpoint_blocks, of which none are chosen")
        if not isinstance(blocks, bool):
            beyond = [block for block in blocks if block not in range(self.shape.layers)]
            if beyond:
                raise InvalidInput(
                    f"checkpoint_blocks names block {beyond[0]!r}, but {self.shape.name} has blocks 0 to "
                    f"{self.shape.layers - 1}"
                )

    def checkpointed(self, block: int) -> bool:
        """Return True if a block is recomputed in backward."""
        chosen = self.checkpoint_blocks
        return chosen if isinstance(chosen, bool) else block in chosen

    def check_head(self, model: str) -> None:
        """Raise `InvalidInput` if a head needs all of a table that is to stay in host memory."""
        if self.cpu_embedding and self.shape.tied_head:
            untied = "" if self.shape.family is Family.BERT else ", or tied_head=False"
            raise InvalidInput(
                f"cpu_embedding=True, but the head of {self.shape.name} is its token table, which comes to the "
                f"accelerator for that anyway: expected {model} with a head of its own; leave cpu_embedding out{untied}"
            )

    def need_family(self, model: str, *families: Family) -> None:
        """Raise `InvalidInput` unless the shape is of one of these families."""
        if self.shape.family not in families:
            needed = " or ".join(family.value for family in families)
            raise InvalidInput(
                f"{self.shape.name} is of the {self.shape.family.value} family, {model} needs a {needed} shape"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A `ModelConfig` for models that predict the next token."""

    head_tiles: int = 1
    """Number of parameters that the head's matrix is cut into, by words, if it is not the token table."""
    experts: int = 0
    """Number of MLPs from which a block chooses for each token; 0: one MLP for all."""
    experts_chosen: int = 2
    """Number of experts chosen for each token."""
    balance_weight: float = 0.01
    """The weight of the experts' balance in the loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.head_tiles):
            raise InvalidInput(f"head_tiles must be at least 1, found {self.head_tiles!r}")
        if self.head_tiles > 1 and self.shape.tied_head:
            raise InvalidInput(
                f"head_tiles={self.head_tiles}, but the head of {self.shape.name} is its token table, which is looked "
                "up whole: expected a head of its own; leave head_tiles out, or tied_head=False"
            )
        check_whole("experts", self.experts)
        check_number("balance_weight", self.balance_weight)
        if self.experts and not (is_count(self.experts_chosen) and self.experts_chosen <= self.experts):
            raise InvalidInput(f"experts_chosen must be from 1 to {self.experts}, found {self.experts_chosen!r}")
        if not self.experts and self.experts_chosen != type(self).experts_chosen:
            raise InvalidInput(
                f"experts_chosen={self.experts_chosen!r} of no experts: each token gets so many of `experts`; "
                "set experts, or leave experts_chosen out"
            )


def is_count(value: object) -> bool:
    """Return True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def option_names(config: type[ModelConfig]) -> frozenset[str]:
    """Return the fields that may be overridden, except those of the shape."""
    return frozenset(field.name for field in fields(config)) - {"shape"}


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """Raise `InvalidInput` for a name that cannot be overridden."""
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise InvalidInput(f"cannot override {unknown[0]!r}; known: {', '.join(sorted(known))}")

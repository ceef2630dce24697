"""Define what every model's configuration has besides its shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from ps_core._errors import InvalidInput
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
            if not 0.0 <= getattr(self, field) < 1.0:
                raise InvalidInput(f"{field} must be at least 0 and below 1, found {getattr(self, field)!r}")
        if self.loss_chunk_tokens is not None and self.loss_chunk_tokens < 1:
            raise InvalidInput(f"loss_chunk_tokens must be at least 1, or None, found {self.loss_chunk_tokens!r}")
        if self.tiles < 1:
            raise InvalidInput(f"tiles must be at least 1, found {self.tiles!r}")
        if self.offload_checkpoints and not self.checkpoint_blocks:
            raise InvalidInput("offload_checkpoints needs checkpoint_blocks, of which none are chosen")
        if not isinstance(self.checkpoint_blocks, bool):
            beyond = sorted(set(self.checkpoint_blocks) - set(range(self.shape.layers)))
            if beyond:
                raise InvalidInput(
                    f"checkpoint_blocks names block {beyond[0]}, but {self.shape.name} has blocks 0 to "
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
        if self.head_tiles < 1:
            raise InvalidInput(f"head_tiles must be at least 1, found {self.head_tiles!r}")
        if self.head_tiles > 1 and self.shape.tied_head:
            raise InvalidInput(
                f"head_tiles={self.head_tiles}, but the head of {self.shape.name} is its token table, which is looked "
                "up whole: expected a head of its own; leave head_tiles out, or tied_head=False"
            )
        if self.experts and not 1 <= self.experts_chosen <= self.experts:
            raise InvalidInput(f"experts_chosen must be from 1 to {self.experts}, found {self.experts_chosen!r}")


def option_names(config: type[ModelConfig]) -> frozenset[str]:
    """Return the fields that `build` may override, except those of the shape."""
    return frozenset(field.name for field in fields(config)) - {"shape"}

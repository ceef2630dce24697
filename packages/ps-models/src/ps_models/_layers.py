"""Layers that several models have. Each does all of its initialisation in its own ``reset_parameters``.

That is what lets a model built without memory get the numbers a plain build draws: no constructor changes a child
after it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ps_core._errors import InvalidInput
from ps_core.engine import HostEmbedding, offloaded
from ps_models._config import DecoderConfig, ModelConfig


@dataclass(frozen=True)
class Initialiser:
    """Draws a weight from a normal distribution, in place."""

    std: float
    truncated: bool = False
    """Without what is beyond two standard deviations."""

    def __call__(self, weight: Tensor) -> None:
        """On meta nothing is there to be filled, and drawing would load torch's compiler; the engine draws later."""
        if weight.is_meta:
            return
        if self.truncated:
            nn.init.trunc_normal_(weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        else:
            nn.init.normal_(weight, std=self.std)


class Linear(nn.Linear):
    """A linear map with zero bias and a weight as told."""

    cut = 0
    """The weight's dimension of outputs."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Initialiser) -> None:
        self.init = init
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw fresh weights."""
        self.init(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Projection(nn.Module):
    """A linear map whose weight is stored (inputs, outputs), as GPT-2's are."""

    cut = 1
    """The weight's dimension of outputs."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Initialiser) -> None:
        super().__init__()
        self.init = init
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights."""
        self.init(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return functional.linear(x, self.weight.t(), self.bias)


class Embedding(nn.Embedding):
    """A table of rows, drawn as told."""

    def __init__(self, rows: int, width: int, *, init: Initialiser) -> None:
        self.init = init
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        """Draw fresh rows."""
        self.init(self.weight)


class TableOnHost(Embedding, HostEmbedding):
    """The same, which stays in the computer's memory."""


def token_table(config: ModelConfig, init: Initialiser) -> Embedding:
    """Of a model's tokens, wherever it is to be."""
    kind = TableOnHost if config.cpu_embedding else Embedding
    return kind(config.shape.vocabulary, config.shape.hidden, init=init)


class TiledLinear(nn.Module):
    """A linear map cut into several that make a part of the outputs each, for a weight larger than the budget.

    ``make`` makes one of a number of outputs, as ``lambda width: nn.Linear(inputs, width)``. Their weights and biases
    are parameters of their own.
    """

    def __init__(self, outputs: int, tiles: int, make: Callable[[int], nn.Linear | Projection]) -> None:
        super().__init__()
        if not 1 <= tiles <= outputs:
            raise InvalidInput(f"{outputs} outputs can be cut into 1 to {outputs} tiles, found {tiles}")
        width, wider = divmod(outputs, tiles)
        self.widths = [width + (index < wider) for index in range(tiles)]
        made = [make(each) for each in self.widths]
        self.cut = made[0].cut if isinstance(made[0], Linear | Projection) else 0
        self.tiles = nn.ModuleList(made)

    @classmethod
    def from_linear(cls, linear: nn.Linear, tiles: int) -> TiledLinear:
        """The same map, cut: tiles hold copies of its rows. Where it is on ``meta``, so are they."""
        make = partial(nn.Linear, linear.in_features, bias=linear.bias is not None, device="meta")
        cut = cls(linear.out_features, tiles, make)
        for name, whole in linear.named_parameters():
            for tile, rows in zip(cut.tiles, torch.split(whole.detach(), cut.widths), strict=True):
                setattr(tile, name, nn.Parameter(rows.clone(), requires_grad=whole.requires_grad))
        return cut

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def linear(
    kind: type[Linear | Projection], inputs: int, outputs: int, *, bias: bool, init: Initialiser, tiles: int
) -> nn.Module:
    """A linear map, whole or in tiles."""
    if tiles == 1:
        return kind(inputs, outputs, bias=bias, init=init)
    return TiledLinear(outputs, tiles, lambda width: kind(inputs, width, bias=bias, init=init))


def own_head(config: DecoderConfig) -> nn.Module | None:
    """A language model's head, whole or in tiles; None where it is the token table."""
    shape, init = config.shape, Initialiser(config.init_std)
    if shape.tied_head:
        return None
    return linear(Linear, shape.hidden, shape.vocabulary, bias=False, init=init, tiles=config.head_tiles)


def words(head: nn.Module | None, table: Embedding) -> list[Tensor]:
    """The head's matrix, or its tiles: words by hidden numbers."""
    parts: Any = head.tiles if isinstance(head, TiledLinear) else [table if head is None else head]
    return [part.weight for part in parts]


def run_blocks(
    blocks: nn.ModuleList, config: ModelConfig, x_blh: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One block after the other; those that are to be checkpointed recompute themselves in backward.

    A block gives hidden states, and a mixture of experts its balance loss; the second result is their mean.
    """
    balances: list[Tensor] = []
    for index, block in enumerate(blocks):
        if torch.is_grad_enabled() and config.checkpointed(index):
            with offloaded(block, x_blh) if config.offload_checkpoints else nullcontext():
                x_blh, balance = checkpoint(block, x_blh, *rest, use_reentrant=False)
        else:
            x_blh, balance = block(x_blh, *rest)
        if balance is not None:
            balances.append(balance)
    return x_blh, torch.stack(balances).mean() if balances else None


def positions(length: int, longest: int, like: Tensor) -> Tensor:
    """The numbers of that many positions."""
    if length > longest:
        raise InvalidInput(f"a sequence of {length} is longer than the {longest} positions of the model")
    return torch.arange(length, device=like.device)


def visible(attention_mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """Which token may see which, as b1ll or b11l; None where that follows from ``causal`` alone.

    A padded token sees itself, so that no row of attention is empty.
    """
    if attention_mask is None:
        return None
    seen_b11l = attention_mask[:, None, None, :].bool()
    if not causal:
        return seen_b11l
    length = attention_mask.shape[1]
    square_ll = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    return (seen_b11l & square_ll.tril()) | torch.eye(length, dtype=torch.bool, device=attention_mask.device)

"""Define layers that several models use. Each initialises itself in its own ``reset_parameters`` only.

So no constructor changes a child after it was made. That lets a model built without memory get the numbers that a plain
build draws.
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
from ps_models._config import DecoderConfig, ModelConfig, is_count


@dataclass(frozen=True)
class Initialiser:
    """Draw a weight from a normal distribution, in place."""

    std: float
    truncated: bool = False
    """True: draw nothing beyond two standard deviations."""

    def __call__(self, weight: Tensor) -> None:
        """Draw the weight. Do nothing on meta: drawing would load torch's compiler, and the engine draws later."""
        if weight.is_meta:
            return
        if self.truncated:
            nn.init.trunc_normal_(weight, std=self.std, a=-2 * self.std, b=2 * self.std)
        else:
            nn.init.normal_(weight, std=self.std)


class Linear(nn.Linear):
    """A linear map with zero bias; its weight is drawn by ``init``."""

    cut = 0
    """The weight's dimension of outputs."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, init: Initialiser) -> None:
        self.init = init
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draw new weights."""
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
        """Draw new weights."""
        self.init(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (..., inputs) to (..., outputs)."""
        if self.bias is None:
            return x @ self.weight
        if x.is_nested or not x.is_contiguous() or not x.shape[-1]:  # these have no view as rows
            return functional.linear(x, self.weight.t(), self.bias)
        # The same with one use of the weight, not two: under the engine each use takes the host some time.
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class Embedding(nn.Embedding):
    """A table of rows, drawn by ``init``."""

    def __init__(self, rows: int, width: int, *, init: Initialiser) -> None:
        self.init = init
        super().__init__(rows, width)

    def reset_parameters(self) -> None:
        """Draw new rows."""
        self.init(self.weight)


class TableOnHost(Embedding, HostEmbedding):
    """An `Embedding` that stays in host memory."""


def token_table(config: ModelConfig, init: Initialiser) -> Embedding:
    """Return the table of a model's tokens, on the accelerator or on the host."""
    kind = TableOnHost if config.cpu_embedding else Embedding
    return kind(config.shape.vocabulary, config.shape.hidden, init=init)


class TiledLinear(nn.Module):
    """Cut a linear map into several, each with a part of the outputs, for a weight larger than the budget.

    ``make`` makes one with a number of outputs, as ``lambda width: nn.Linear(inputs, width)``. Their weights and biases
    are separate parameters.
    """

    def __init__(self, outputs: int, tiles: int, make: Callable[[int], nn.Linear | Projection]) -> None:
        super().__init__()
        if not is_count(tiles) or tiles > outputs:
            raise InvalidInput(f"{outputs} outputs can be cut into 1 to {outputs} tiles, found {tiles!r}")
        width, wider = divmod(outputs, tiles)
        self.widths = [width + (index < wider) for index in range(tiles)]
        made = [make(each) for each in self.widths]
        self.cut = made[0].cut if isinstance(made[0], Linear | Projection) else 0
        self.tiles = nn.ModuleList(made)

    @classmethod
    def from_linear(cls, linear: nn.Linear, tiles: int) -> TiledLinear:
        """Return the same map, cut: tiles hold copies of its rows. If the map is on ``meta``, so are they."""
        make = partial(nn.Linear, linear.in_features, bias=linear.bias is not None, device="meta")
        cut = cls(linear.out_features, tiles, make)
        for name, whole in linear.named_parameters():
            for tile, rows in zip(cut.tiles, torch.split(whole.detach(), cut.widths), strict=True):
                setattr(tile, name, nn.Parameter(rows.clone(), requires_grad=whole.requires_grad))
        return cut

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (..., inputs) to (..., outputs)."""
        return torch.cat([tile(x) for tile in self.tiles], dim=-1)


def linear(
    kind: type[Linear | Projection], inputs: int, outputs: int, *, bias: bool, init: Initialiser, tiles: int
) -> nn.Module:
    """Return a linear map, whole or in tiles."""
    if tiles == 1:
        return kind(inputs, outputs, bias=bias, init=init)
    return TiledLinear(outputs, tiles, lambda width: kind(inputs, width, bias=bias, init=init))


def own_head(config: DecoderConfig) -> nn.Module | None:
    """Return a language model's head, whole or in tiles; None if the token table is the head."""
    shape, init = config.shape, Initialiser(config.init_std)
    if shape.tied_head:
        return None
    return linear(Linear, shape.hidden, shape.vocabulary, bias=False, init=init, tiles=config.head_tiles)


def words(head: nn.Module | None, table: Embedding) -> list[Tensor]:
    """Return the head's matrix, or its tiles: words by hidden numbers."""
    parts: Any = head.tiles if isinstance(head, TiledLinear) else [table if head is None else head]
    return [part.weight for part in parts]


def run_blocks(
    blocks: nn.ModuleList, config: ModelConfig, x_blh: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run one block after the other; checkpointed ones recompute themselves in backward.

    A block returns hidden states, and a mixture of experts its balance loss. The second result is the mean of these.
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
    """Return the numbers of the positions; raise if there are more than ``longest``."""
    if length > longest:
        raise InvalidInput(f"a sequence of {length} is longer than the {longest} positions of the model")
    return torch.arange(length, device=like.device)


def visible(attention_mask: Tensor | None, *, causal: bool) -> Tensor | None:
    """Return which token may attend to which, as b1ll or b11l; None if ``causal`` alone decides.

    A padded token attends to itself, so that no row of attention is empty.
    """
    if attention_mask is None:
        return None
    seen_b11l = attention_mask[:, None, None, :].bool()
    if not causal:
        return seen_b11l
    length = attention_mask.shape[1]
    square_ll = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    return (seen_b11l & square_ll.tril()) | torch.eye(length, dtype=torch.bool, device=attention_mask.device)

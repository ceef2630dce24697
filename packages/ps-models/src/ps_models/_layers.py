"""Layers that several models have. Each does all of its initialisation in its own ``reset_parameters``.

That is what lets a model built without memory get the numbers a plain build draws: no constructor changes a child
after it was made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ps_core._errors import InvalidInput
from ps_models._config import ModelConfig

Initialiser = Callable[[Tensor], object]
"""Fills a weight in place."""


def normal(std: float) -> Initialiser:
    """Draws from a normal distribution."""
    return lambda weight: nn.init.normal_(weight, std=std)


def truncated_normal(std: float) -> Initialiser:
    """Draws from a normal distribution without what is beyond two standard deviations."""
    return lambda weight: nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """A linear map with zero bias and a weight as told."""

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


def run_blocks(blocks: nn.ModuleList, config: ModelConfig, x_blh: Tensor, *rest: Tensor | None) -> Tensor:
    """One block after the other; those that are to be checkpointed recompute themselves in backward."""
    for index, block in enumerate(blocks):
        if torch.is_grad_enabled() and config.checkpointed(index):
            x_blh = checkpoint(block, x_blh, *rest, use_reentrant=False)
        else:
            x_blh = block(x_blh, *rest)
    return x_blh


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

"""Sample from a language model."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_core._units import check_whole, is_finite
from ps_models._config import ModelConfig, is_count

_COLD = 1e-4
"""Below this temperature the likeliest token is taken: it has all of the probability, or the division fails."""


class LanguageModel(Protocol):
    """Protocol of a model that predicts the next token."""

    @property
    def config(self) -> ModelConfig:
        """Return its configuration, which has the longest sequence."""

    @property
    def training(self) -> bool:
        """Return True if dropout is on."""

    def train(self, mode: bool = True) -> Any:
        """Switch dropout on or off."""

    def __call__(self, input_ids: Tensor, *, logits_to_keep: int) -> Any:
        """Return an output with ``logits`` of the last ``logits_to_keep`` tokens, of shape blv."""


@torch.no_grad()
def generate(
    self: LanguageModel,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end_token: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row of ``input_ids`` by sampled tokens; ``temperature=0`` takes the likeliest instead.

    Dropout is off meanwhile. Rows that drew ``end_token`` are filled up with it; when all have, this ends early. If the
    model has no further positions, only the last ones are its input. Each token costs a forward pass over the input.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise InvalidInput(f"generate needs rows of at least one token, found shape {tuple(input_ids.shape)}")
    check_whole("max_new_tokens", max_new_tokens)
    if not is_finite(temperature) or temperature < 0 or (top_k is not None and not is_count(top_k)):
        raise InvalidInput(f"temperature must be at least 0 and top_k at least 1, found {temperature!r} and {top_k!r}")
    was_training = self.training
    self.train(False)
    try:
        ended = torch.zeros(len(input_ids), 1, dtype=torch.bool, device=input_ids.device)
        for _ in range(max_new_tokens):
            logits_bv = self(input_ids[:, -self.config.shape.positions :], logits_to_keep=1).logits[:, -1].float()
            new = _draw(logits_bv, temperature, top_k, generator)
            if end_token is not None:
                new = new.masked_fill(ended, end_token)
                ended |= new == end_token
            input_ids = torch.cat([input_ids, new], dim=1)
            if end_token is not None and bool(ended.all()):
                break
    finally:
        self.train(was_training)
    return input_ids


def _draw(logits_bv: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature < _COLD:
        return logits_bv.argmax(-1, keepdim=True)
    if top_k is not None:
        least_b1 = logits_bv.topk(min(top_k, logits_bv.shape[-1])).values[:, -1:]
        logits_bv = logits_bv.masked_fill(logits_bv < least_b1, -torch.inf)
    return torch.multinomial((logits_bv / temperature).softmax(-1), 1, generator=generator)

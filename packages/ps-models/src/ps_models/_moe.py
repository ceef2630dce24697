"""Define a mixture of experts: a router sends each token to a few of several MLPs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ps_models._config import DecoderConfig
from ps_models._layers import Initialiser, Linear


class MixtureOfExperts(nn.Module):
    """A replacement for an MLP. An expert that no token chose is not computed, and its parameters are not read."""

    def __init__(
        self, hidden: int, make_expert: Callable[[], nn.Module], *, experts: int, chosen: int, std: float
    ) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = Linear(hidden, experts, bias=False, init=Initialiser(std))
        self.experts = nn.ModuleList(make_expert() for _ in range(experts))

    def forward(self, x_blh: Tensor) -> tuple[Tensor, Tensor]:
        """Map shape blh to blh, and the balance loss of these tokens (1 where the experts are used evenly)."""
        x_nh = x_blh.flatten(0, -2)
        chances_ne = self.router(x_nh).float().softmax(-1)
        weights_nc, experts_nc = chances_ne.topk(self.chosen)
        weights_nc = (weights_nc / weights_nc.sum(-1, keepdim=True)).to(x_nh.dtype)
        out_nh = torch.zeros_like(x_nh)
        for number, expert in enumerate(self.experts):
            tokens, places = (experts_nc == number).nonzero(as_tuple=True)
            if len(tokens):
                found = expert(x_nh[tokens]) * weights_nc[tokens, places, None]
                out_nh = out_nh.index_add(0, tokens, found)
        return out_nh.view(x_blh.shape), self._balance(chances_ne, experts_nc)

    def _balance(self, chances_ne: Tensor, experts_nc: Tensor) -> Tensor:
        """Return the Switch Transformer's balance: each expert's share times its mean chance, summed, times their
        number.
        """
        experts = chances_ne.shape[1]
        share_e = torch.bincount(experts_nc.flatten(), minlength=experts) / experts_nc.numel()
        return experts * (share_e * chances_ne.mean(0)).sum()


def feed_forward(config: DecoderConfig, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a block's MLP, or experts of that kind."""
    if not config.experts:
        return make()
    return MixtureOfExperts(
        config.shape.hidden, make, experts=config.experts, chosen=config.experts_chosen, std=config.init_std
    )


def with_balance(found: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return a block's result with its balance; None for the balance of one MLP."""
    return (found, None) if isinstance(found, Tensor) else found

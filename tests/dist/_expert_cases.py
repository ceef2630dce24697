"""Ranks that use other experts in each step, over real processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ps_dist
from ps_core import SGD, Options
from ps_core.engine import chunked, release, statistics

WIDTH = 20


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.stem(x)
        for index in chosen:
            x = x + self.experts[index](x).tanh()
        return x.square().sum()


def chosen(step: int, rank: int) -> list[int]:
    """The first three steps are alike, so that the last two leave the schedule."""
    random = torch.Generator().manual_seed(10 * max(0, step - 2) + rank)
    return torch.randperm(4, generator=random)[: 1 + rank % 3].tolist()


def one_step(model: nn.Module, step: int, rank: int) -> float:
    random = torch.Generator().manual_seed(100 * step + rank)
    loss = model(torch.randn(3, WIDTH, generator=random), chosen(step, rank)) / 8
    loss.backward()
    return float(loss.detach())


def experts(each: ps_dist.TorchCollectives, exact: bool) -> None:
    """The same as one process that adds every rank's part; with copies of the model to rounding."""
    fronts = []
    for together in (each, None):
        torch.manual_seed(0)
        fronts.append(
            chunked(
                Experts(), SGD(lr=0.01), precision="fp32", collectives=together, options=Options(group_bytes=4 * WIDTH)
            )
        )
    (model, optimizer), (single, reference) = fronts
    assert optimizer is not None
    assert reference is not None
    for step in range(5):
        mine = one_step(model, step, each.mesh.rank)
        theirs = [one_step(single, step, rank) for rank in range(each.mesh.size)]
        assert mine == theirs[each.mesh.rank] or (not exact and abs(mine / theirs[each.mesh.rank] - 1) < 1e-4)
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
    wanted = single.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]) if exact else torch.allclose(value, wanted[name], rtol=1e-4), name
    assert statistics(model).prefetch_hits > 0
    release(model)

"""Ranks whose model maps over parameters by ``torch.vmap``: the bits of one process that adds the same parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from _threads import Together, run
from ps_core import SGD, Budget, Options
from ps_core.engine import chunked, release


class Experts(nn.Module):
    """The mapped function reads parameters of other groups, which are gathered meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.bias = nn.Parameter(torch.zeros(2, 16, 16)), nn.Parameter(torch.zeros(16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda weight: self.norm(x + (x @ weight).tanh()) + self.bias)(self.weights).mean(0)


def model_for(together: Together | None, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, seeded = nn.Sequential(*(Experts() for _ in range(6))), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=seeded)
    budget = Budget(device="48KiB" if device == "emulated" else None, host="4MiB")
    options = Options(group_bytes=2048, poison=device == "emulated")
    parts = 1 if together else 2
    return chunked(
        model,
        SGD(lr=0.01),
        device=device,
        budget=budget,
        precision="fp32",
        accumulation_steps=parts,
        options=options,
        collectives=together,
    )


def trained(model: nn.Module, step: int, part: int) -> float:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + part))
    loss = model(x).square().mean() / 2
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_same_bits(device: str) -> None:
    def trains(each: Together) -> None:
        (model, optimizer), (single, reference) = model_for(each, device), model_for(None, "cpu")
        for step in range(4):
            loss = trained(model, step, each.rank)
            assert [trained(single, step, part) for part in range(2)][each.rank] == loss, step
            for rule in (optimizer, reference):
                rule.step()
                rule.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, single.state_dict()[name]), name
        release(model)
        release(single)

    run(2, trains)

"""Forward-mode AD: tangents of inputs and of parameters are those of a plain model, wherever parameters are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ps_core import SGD, Budget, Options
from ps_core.engine import chunked, materialized, release, statistics

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")  # PyTorch's own use; of another class in another release
X = torch.linspace(-1, 1, 32).view(2, 16)
DEVICES = {"cpu": Budget(host="1MiB"), "emulated": Budget(device="20KiB", host="1MiB")}


class Blocks(nn.Module):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(nn.Linear(16, 16) for _ in range(8)), recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            x = x.tanh()
        return x


def tangent(value: Tensor) -> Tensor:
    found = forward_ad.unpack_dual(value).tangent
    assert found is not None
    return found.clone()


def of_input(model: nn.Module) -> Tensor:
    return tangent(model(forward_ad.make_dual(X, torch.ones_like(X))))


def of_a_parameter(model: nn.Module) -> Tensor:
    name = "blocks.3.weight"
    weight = model.get_parameter(name)
    return tangent(functional_call(model, {name: forward_ad.make_dual(weight, torch.ones(16, 16))}, (X,)))


def of_gradients(model: nn.Module) -> Tensor:
    """Rows of a product with the Hessian."""
    loss = model(forward_ad.make_dual(X, torch.ones_like(X))).square().sum()
    return torch.cat([tangent(each).flatten() for each in torch.autograd.grad(loss, list(model.parameters())[:4])])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("what", "recompute"),
    [(of_input, False), (of_input, True), (of_a_parameter, False), (of_a_parameter, True), (of_gradients, False)],
)
def test_tangents_are_those_of_a_plain_model(what: Callable[[nn.Module], Tensor], recompute: bool, device: str) -> None:
    torch.manual_seed(0)
    options = Options(group_bytes=1200, poison=True)
    model: Any
    model, optimizer = chunked(
        Blocks(recompute=recompute),
        SGD(lr=0.1),
        device=device,
        budget=DEVICES[device],
        precision="fp32",
        options=options,
    )
    for _ in range(3):
        with materialized(model):
            plain = copy.deepcopy(model)
        with forward_ad.dual_level():
            try:
                meant = what(plain)
            except NotImplementedError as why:
                assert recompute
                release(model)
                pytest.skip(f"this release of PyTorch has no tangents through its own checkpoint: {why}")
            assert torch.equal(what(model), meant)
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert device == "cpu" or statistics(model).fetches > 0, "parameters moved"
    release(model)

"""TorchScript of a part of a managed model, and TorchScript modules that are added to one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import SGD, Budget, InvalidInput, UnsupportedParameter
from ps_core.engine import chunked, materialized, release

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")  # of another class in another release
X = torch.arange(32.0).view(2, 16) / 32
DEVICES = ("cpu", "emulated")
REFUSED = "would make a program of parameters"


class Blocks(nn.Sequential):
    """Six blocks, of which the accelerator's budget holds a few."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))


def managed(device: str) -> Any:
    torch.manual_seed(0)
    budget = Budget(host="1MiB") if device == "cpu" else Budget(device="16KiB", host="1MiB")
    return chunked(Blocks(), SGD(lr=0.1), device=device, budget=budget, precision="fp32")


def train(model: nn.Module, optimizer: Any) -> Tensor:
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert isinstance(loss, Tensor)
    return loss.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_refused_wherever_their_parameters_are(device: str) -> None:
    model, optimizer = managed(device)
    for _ in range(3):
        for part in (model[0], model[3][0], nn.Sequential(model[5], nn.Tanh()), nn.ModuleList([model])):
            with pytest.raises(UnsupportedParameter, match=REFUSED):
                torch.jit.script(part)
        train(model, optimizer)
    release(model)
    assert torch.equal(torch.jit.script(model[0])(X), model[0](X))


@pytest.mark.parametrize("device", DEVICES)
def test_parts_without_managed_parameters_are_not(device: str) -> None:
    model, optimizer = managed(device)
    assert torch.equal(torch.jit.script(model[0][1])(X), X.tanh())
    with materialized(model):
        inside = torch.jit.script(model[0])
        plain = copy.deepcopy(model)
        assert torch.equal(inside(X), plain[0](X))
    assert torch.equal(torch.jit.script(plain[0])(X), plain[0](X))
    names = [f"0.{name}" for name, _ in model[0].named_parameters()]
    with materialized(model, names=names):
        assert torch.equal(torch.jit.script(model[0])(X), plain[0](X))
        with pytest.raises((UnsupportedParameter, InvalidInput), match=REFUSED):
            torch.jit.script(model[1])
    train(model, optimizer)
    release(model)


@pytest.mark.parametrize("device", DEVICES)
def test_added_modules(device: str) -> None:
    """Without parameters they are as any others; with parameters they are refused before anything changes."""
    model, optimizer = managed(device)
    expected = managed(device)
    assert torch.equal(train(model, optimizer), train(*expected))
    model[2].append(torch.jit.script(nn.Identity()))
    with materialized(model):
        pass
    assert torch.equal(train(model, optimizer), train(*expected))
    model[2].append(torch.jit.script(nn.Linear(16, 16)))
    for _ in range(2):
        with pytest.raises(UnsupportedParameter, match=r"'2\.3' is TorchScript"):
            model(X)
    del model[2][3]
    assert torch.equal(train(model, optimizer), train(*expected))
    release(model), release(expected[0])

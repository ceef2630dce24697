"""State dicts of parts: `submodule.load_state_dict`, a model within another one, keys that are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, AdamW, Budget, InvalidInput, Options, UnsupportedParameter
from ps_core.engine import chunked, release, statistics


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), Block())


def managed(precision: str, **more: Any) -> Any:
    sizes = {"budget": Budget(device="64KiB", host="4MiB"), "options": Options(group_bytes=2**13, poison=True)}
    given = {"device": "emulated", "precision": precision} | sizes | more
    return chunked(net(0), given.pop("spec", SGD(lr=0.1)), **given)


def train(model: nn.Module, optimizer: Any) -> float:
    loss = model(torch.ones(4, 32)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


PARTS = {
    "a block": lambda model, state: model[1].load_state_dict(part(state, "1.")),
    "a block of a loop": lambda model, state: [
        model[index].load_state_dict(part(state, f"{index}.")) for index in (0, 2)
    ],
    "a layer": lambda model, state: model[2].down.load_state_dict(part(state, "2.down.")),
    "missing keys": lambda model, state: model.load_state_dict(
        {name: value for name, value in state.items() if "up" in name}, strict=False
    ),
    "missing keys of a block": lambda model, state: model[0].load_state_dict(
        {"up.bias": state["0.up.bias"], "nobody": state["0.up.bias"]}, strict=False
    ),
    "a model around it": lambda model, state: nn.ModuleDict({"inner": model}).load_state_dict(
        {f"inner.{name}": value for name, value in state.items()}
    ),
    "a list of its blocks": lambda model, state: nn.ModuleList([model[0], model[2]]).load_state_dict(
        {f"{to}.{name}": value for to, at in (("0", "0."), ("1", "2.")) for name, value in part(state, at).items()}
    ),
}


def part(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", PARTS)
def test_as_in_plain_pytorch(name: str) -> None:
    """Before a step, and between steps; training goes on with the same bits."""
    load, state, plain = PARTS[name], net(1).state_dict(), net(0)
    model, optimizer = managed("fp32")
    twin = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
    load(plain, state)
    load(model, state)
    assert train(model, optimizer) == train(plain, twin)
    load(plain, state)
    load(model, state)
    assert train(model, optimizer) == train(plain, twin)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())
    assert statistics(model).evictions > 0
    release(model)


@pytest.mark.parametrize("name", PARTS)
def test_in_16_bits_masters_of_what_is_loaded_are_what_was_given(name: str) -> None:
    """And those of what is not stay, unrounded."""
    load, state = PARTS[name], net(1).state_dict()
    model, optimizer = managed("bf16", spec=AdamW(lr=1e-5))
    before, names = optimizer.state_dict(masters=True)["state"], optimizer.param_groups[0]["param_names"]
    plain = net(0)
    loaded = {key for key, value in plain.state_dict().items()}
    load(plain, state)
    loaded = {key for key in loaded if torch.equal(plain.state_dict()[key], state[key])}
    load(model, state)
    for index, entry in optimizer.state_dict(masters=True)["state"].items():
        expected = state[names[index]] if names[index] in loaded else before[index]["master"]
        assert torch.equal(entry["master"], expected), names[index]
    release(model)


def test_a_part_that_does_not_match_is_refused_as_by_pytorch() -> None:
    model, optimizer = managed("fp32")
    with pytest.raises(RuntimeError, match=r"size mismatch for weight"):
        model[1].up.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(64)})
    with pytest.raises(InvalidInput, match="leave assign out"):
        model[1].load_state_dict(net(1)[1].state_dict(), assign=True)
    with pytest.raises(UnsupportedParameter, match=r"would change '1\.up\.bias' in place"), torch.no_grad():
        model[1].up.bias.copy_(torch.ones(64))
    train(model, optimizer)
    release(model)
    assert model[1].up.bias.detach().sub(1).abs().max() < 1, "PyTorch loads what fits, too"


def test_a_hook_that_fails_half_way_leaves_no_load_open() -> None:
    model, optimizer = managed("fp32")

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    hook = model[2].register_load_state_dict_pre_hook(fail)
    for load in (model.load_state_dict, lambda state: model[2].load_state_dict(part(state, "2."))):
        with pytest.raises(OSError, match="gone"):
            load(net(1).state_dict())
    hook.remove()
    model[0].load_state_dict(part(net(1).state_dict(), "0."))
    with pytest.raises(UnsupportedParameter, match="in place"), torch.no_grad():
        model[1].up.bias.copy_(torch.ones(64))
    train(model, optimizer)
    release(model)

"""Modules that are moved, wrapped or removed after `chunked`: names are those that the model has now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import finish, rows, square
from ps_core import AdamW, Budget, CheckpointMismatch, Options
from ps_core.engine import (
    WeightAverage,
    chunked,
    load_checkpoint,
    load_weights,
    materialized,
    release,
    save_checkpoint,
    save_weights,
)


def managed(layers: int = 3, *, seed: int = 0, change: Callable[[nn.Sequential], Any] | None = None) -> Any:
    torch.manual_seed(seed)
    model = models.stack(layers)
    if change is not None:
        change(model)
    where = {"budget": Budget(device="128KiB", host="8MiB"), "options": Options(poison=True, group_bytes=8192)}
    return chunked(model, AdamW(lr=0.01), device="emulated", precision="fp32", **where)


def train(model: nn.Module, optimizer: Any, index: int) -> Tensor:
    loss = square(model, *rows(index))
    loss.backward()
    finish(optimizer)
    return loss.detach()


class Scaled(nn.Module):
    """A layer with a weight of its own, under the name that the layer's had."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias, self.inner = nn.Parameter(torch.ones(2 * models.WIDTH)), inner.bias, inner
        self.inner.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.weight + self.bias


def swap(model: nn.Sequential) -> None:
    model[0], model[2] = model[2], model[0]


def remove(model: nn.Sequential) -> None:
    del model[1]


def insert(model: nn.Sequential) -> None:
    torch.manual_seed(5)
    model.insert(0, models.Residual())


def wrap(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(model[1])


def scale(model: nn.Sequential) -> None:
    model[1].wide = Scaled(model[1].wide)


CHANGES = [swap, remove, insert, wrap, scale]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("passes", [0, 1])
def test_weights_are_saved_by_the_names_that_the_model_has(
    change: Callable[[nn.Sequential], Any], passes: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    model, optimizer = managed()
    train(model, optimizer, 0)
    change(model)
    for index in range(passes):
        train(model, optimizer, index + 1)
    save_weights(tmp_path / "model.safetensors", model)
    expected = values(model)
    assert equal(load_file(tmp_path / "model.safetensors"), expected)
    train(model, optimizer, 7)
    load_weights(model, tmp_path / "model.safetensors")
    assert equal(values(model), expected)
    release(model)


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_goes_on_in_a_model_that_was_changed_alike(
    change: Callable[[nn.Sequential], Any], tmp_path: Path
) -> None:
    model, optimizer = managed()
    train(model, optimizer, 0)
    change(model)
    train(model, optimizer, 1)
    save_checkpoint(tmp_path / "run", model, optimizer)
    expected = [train(model, optimizer, index) for index in (2, 3)]
    wanted = values(model)
    release(model)
    model, optimizer = managed(seed=1)
    change(model)
    load_checkpoint(tmp_path / "run", model, optimizer)
    assert all(map(torch.equal, [train(model, optimizer, index) for index in (2, 3)], expected))
    assert equal(values(model), wanted)
    release(model)


def saved_after(change: Callable[[nn.Sequential], Any], path: Path) -> tuple[Any, Any]:
    """Train, change the model, train on, and save."""
    model, optimizer = managed()
    train(model, optimizer, 0)
    change(model)
    train(model, optimizer, 1)
    save_checkpoint(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("change", [swap, insert])
def test_a_model_built_in_another_order_goes_on(change: Callable[[nn.Sequential], Any], tmp_path: Path) -> None:
    """States belong to names, as weights do, not to the places of parameters in the optimizer's groups."""
    model, optimizer = saved_after(change, tmp_path / "run")
    weights, states = model.state_dict(), optimizer.state_dict()
    expected = [train(model, optimizer, index) for index in (2, 3)]
    fresh, its_optimizer = managed(seed=1, change=change)
    names = [each.param_groups[0]["param_names"] for each in (optimizer, its_optimizer)]
    assert names[0] != names[1]
    load_checkpoint(tmp_path / "run", fresh, its_optimizer)
    assert all(map(torch.equal, [train(fresh, its_optimizer, index) for index in (2, 3)], expected))
    fresh.load_state_dict(weights)
    its_optimizer.load_state_dict(states)
    assert all(map(torch.equal, [train(fresh, its_optimizer, index) for index in (2, 3)], expected))
    assert equal(values(fresh), values(model))
    release(fresh), release(model)


def test_a_model_without_a_module_is_told_apart(tmp_path: Path) -> None:
    model, _ = saved_after(remove, tmp_path / "run")
    fresh, its_optimizer = managed(seed=1, change=remove)
    before = values(fresh)
    with pytest.raises(CheckpointMismatch):
        load_checkpoint(tmp_path / "run", fresh, its_optimizer)
    assert equal(values(fresh), before)
    load_weights(fresh, tmp_path / "run", strict=False)
    assert equal(values(fresh), values(model))
    release(fresh), release(model)


def test_names_that_are_given_are_the_present_ones() -> None:
    model, optimizer = managed()
    average = WeightAverage(model, decay=0.5)
    train(model, optimizer, 0)
    average.update()
    before = values(model)
    swap(model)
    with materialized(model, names=["0.wide.weight"], write=True), torch.no_grad():
        model[0].wide.weight.zero_()
    assert not model[0].wide.weight.any()
    assert torch.equal(model[2].wide.weight, before["0.wide.weight"])
    found = average.state_dict()["averages"]["0.wide.weight"]
    assert torch.equal(found.view(2 * models.WIDTH, models.WIDTH), before["2.wide.weight"])
    release(model)


def test_a_removed_layer_can_come_back() -> None:
    model, optimizer = managed()
    train(model, optimizer, 0)
    kept, before = model[1], values(model)
    del model[1]
    train(model, optimizer, 1)
    names = [name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]]
    assert "1.wide.weight" in names
    assert "1.wide.weight (removed)" in names
    model.insert(1, kept)
    assert equal(
        {name: value for name, value in values(model).items() if name.startswith("1.")},
        {name: value for name, value in before.items() if name.startswith("1.")},
    )
    train(model, optimizer, 2)
    names = [name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]]
    assert sorted(names) == sorted(before)
    release(model)

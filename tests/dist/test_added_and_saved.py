"""Checkpoints of models that modules were added to, or removed from, since their last call: by one process and two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from _threads import Together, run
from ps_core import AdamW, Budget, CheckpointMismatch
from ps_core.engine import chunked, load_checkpoint, load_weights, save_checkpoint, save_weights

RANKS = [1, 2]
WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))
Change = Callable[[nn.Sequential], object]


def linear(seed: int) -> nn.Linear:
    """Make a layer that is the same on all ranks, which are threads and share PyTorch's generator."""
    layer, generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
    return layer


def made(each: Together | None, *changes: Change, precision: str = "bf16") -> tuple[Any, Any]:
    model = nn.Sequential(*map(linear, range(3)))
    for change in changes:
        change(model)
    return chunked(model, AdamW(lr=0.01), precision=precision, budget=Budget(host="4MiB"), collectives=each)


def trained(model: nn.Module, optimizer: Any) -> None:
    model(X).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def states(optimizer: Any) -> list[torch.Tensor]:
    return [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def on(ranks: int, case: Callable[..., Any], *args: Any) -> Any:
    """Return what the first rank returned."""
    return case(None, *args) if ranks == 1 else run(ranks, case, *args)[0][0]


def layer(model: nn.Sequential) -> None:
    model.append(linear(9))


def frozen_layer(model: nn.Sequential) -> None:
    model.append(linear(9).requires_grad_(False))


def half_frozen_layer(model: nn.Sequential) -> None:
    added = linear(9)
    added.weight.requires_grad_(False)
    model.append(added)


def tied_layer(model: nn.Sequential) -> None:
    added = linear(9)
    added.weight = model[0].weight
    model.append(added)


def two_tied_layers(model: nn.Sequential) -> None:
    one, other = linear(9), linear(10)
    other.weight = one.weight
    model.extend((one, other))


def layer_with_a_buffer(model: nn.Sequential) -> None:
    added = linear(9)
    added.register_buffer("counts", torch.arange(3))
    model.append(added)


ADDED = [layer, frozen_layer, half_frozen_layer, tied_layer, two_tied_layers, layer_with_a_buffer]


def resumed(each: Together | None, change: Change, precision: str, folder: Path) -> None:
    model, optimizer = made(each, precision=precision)
    trained(model, optimizer)
    change(model)
    save_checkpoint(folder / "saved", model, optimizer)
    anew, fresh = made(each, change, precision=precision)
    late, last = made(each, precision=precision)
    change(late)
    for one, its in ((anew, fresh), (late, last)):
        load_checkpoint(folder / "saved", one, its)
    for one, its in ((model, optimizer), (anew, fresh), (late, last)):
        for _ in range(2):
            trained(one, its)
    wanted = values(model)
    for one, its in ((anew, fresh), (late, last)):
        found = values(one)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert equal(states(its), states(optimizer))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", ADDED)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_made_before_the_next_call(ranks: int, change: Change, precision: str, tmp_path: Path) -> None:
    """Load the checkpoint into a model made with the module, and into one that the module is added to."""
    on(ranks, resumed, change, precision, tmp_path)


def weights(each: Together | None, change: Change, folder: Path) -> None:
    model, optimizer = made(each)
    trained(model, optimizer)
    change(model)
    save_weights(folder / "weights", model)
    save_checkpoint(folder / "saved", model, optimizer)
    wanted = values(model)
    for file in ("weights", "saved"):
        for late in (False, True):
            other, _ = made(each, *(() if late else (change,)))
            if late:
                change(other)
            for added in other[3:] if late else ():
                added.bias.data.zero_()
            load_weights(other, folder / file)
            found = values(other)
            assert all(torch.equal(found[name].to(value.dtype), value) for name, value in wanted.items())


@pytest.mark.parametrize("change", ADDED)
@pytest.mark.parametrize("ranks", RANKS)
def test_weights_saved_and_loaded_before_the_next_call(ranks: int, change: Change, tmp_path: Path) -> None:
    on(ranks, weights, change, tmp_path)


def removed(each: Together | None, folder: Path) -> str:
    model, optimizer = made(each, layer)
    trained(model, optimizer)
    del model[3]
    save_checkpoint(folder / "saved", model, optimizer)
    alike, its = made(each, layer)
    del alike[3]
    load_checkpoint(folder / "saved", alike, its)
    for one, other in ((model, optimizer), (alike, its)):
        trained(one, other)
    assert equal(list(values(model).values()), list(values(alike).values()))
    anew, fresh = made(each)
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(folder / "saved", anew, fresh)
    return str(error.value)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_module_that_was_removed_is_still_managed_and_saved(ranks: int, tmp_path: Path) -> None:
    told = on(ranks, removed, tmp_path)
    assert "parameter '3.weight': in the checkpoint, not in the model" in told

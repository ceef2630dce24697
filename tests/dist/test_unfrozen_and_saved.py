"""Checkpoints of models whose parameters were unfrozen, or frozen, since their last call: by one process and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from _threads import Together
from ps_core import CheckpointMismatch
from ps_core.engine import export_checkpoint, load_checkpoint, load_weights, save_checkpoint, save_weights
from test_added_and_saved import RANKS, equal, made, on, states, trained, values


def layer(model: nn.Sequential, on: bool) -> None:
    model[1].requires_grad_(on)


def weight(model: nn.Sequential, on: bool) -> None:
    model[1].weight.requires_grad_(on)


def two_layers(model: nn.Sequential, on: bool) -> None:
    model[:2].requires_grad_(on)


PARTS = [layer, weight, two_layers]


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    found, wanted = values(one[0]), values(other[0])
    return all(torch.equal(found[name], value) for name, value in wanted.items()) and equal(
        states(one[1]), states(other[1])
    )


def train_both(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """Train two models side by side; they are the same before each step."""
    for _ in range(2):
        assert same(one, other)
        trained(*one)
        trained(*other)


def unfrozen(each: Together | None, part: Any, precision: str, late: bool, folder: Path) -> None:
    """Save after ``part`` was unfrozen, before the next pass; ``late``: load where it is unfrozen after `chunked`."""

    def freeze(model: nn.Sequential) -> None:
        part(model, False)

    model, optimizer = made(each, freeze, precision=precision)
    trained(model, optimizer)
    part(model, True)
    save_checkpoint(folder / "saved", model, optimizer)
    anew, fresh = made(each, *([freeze] if late else []), precision=precision)
    trained(anew, fresh)
    part(anew, True)
    load_checkpoint(folder / "saved", anew, fresh)
    train_both((anew, fresh), (model, optimizer))
    assert same((anew, fresh), (model, optimizer))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_made_after_unfreezing(ranks: int, part: Any, precision: str, late: bool, tmp_path: Path) -> None:
    on(ranks, unfrozen, part, precision, late, tmp_path)


def loaded_before_the_next_pass(each: Together | None, part: Any, folder: Path) -> None:
    """Load a checkpoint of a model that trains ``part`` into one that will, from its next pass on."""
    model, optimizer = made(each)
    trained(model, optimizer)
    save_checkpoint(folder / "saved", model, optimizer)
    save_weights(folder / "weights", model, masters=True)
    anew, fresh = made(each, lambda one: part(one, False))
    part(anew, True)
    load_checkpoint(folder / "saved", anew, fresh)
    assert same((anew, fresh), (model, optimizer))
    later, its = made(each, lambda one: part(one, False))
    part(later, True)
    load_weights(later, folder / "weights")
    fine = [its.state_dict(masters=True), optimizer.state_dict(masters=True)]
    masters = [[entry["master"] for entry in each["state"].values()] for each in fine]
    assert equal(*masters)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_loading_after_unfreezing(ranks: int, part: Any, tmp_path: Path) -> None:
    on(ranks, loaded_before_the_next_pass, part, tmp_path)


def frozen(each: Together | None, part: Any, precision: str, folder: Path) -> str:
    model, optimizer = made(each, precision=precision)
    trained(model, optimizer)
    part(model, False)
    save_checkpoint(folder / "saved", model, optimizer)
    anew, fresh = made(each, precision=precision)
    part(anew, False)
    load_checkpoint(folder / "saved", anew, fresh)
    train_both((anew, fresh), (model, optimizer))
    with pytest.raises(CheckpointMismatch) as error:
        load_checkpoint(folder / "saved", *made(each, lambda one: part(one, False), precision=precision))
    return str(error.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_made_after_freezing(ranks: int, part: Any, precision: str, tmp_path: Path) -> None:
    """Freezing keeps states. A model that was made with the part frozen has none to load them into."""
    told = on(ranks, frozen, part, precision, tmp_path)
    assert "'1.weight': trained in the checkpoint, frozen in the model" in told
    assert "requires_grad_(True)" in told


def exported(each: Together | None, part: Any, folder: Path) -> None:
    """Every way to write weights between unfreezing and the next pass gives what it gives after that."""

    def written(name: str) -> dict[str, torch.Tensor]:
        save_weights(folder / f"{name} weights", model)
        save_checkpoint(folder / name, model, optimizer)
        place = folder / f"{name} exported {0 if each is None else each.rank}"
        export_checkpoint(folder / name, place)
        found = {
            f"weights {key}": value for key, value in safetensors.torch.load_file(folder / f"{name} weights").items()
        }
        found |= {f"exported {key}": value for key, value in safetensors.torch.load_file(place).items()}
        return found | {f"dict {key}": value for key, value in values(model).items()}

    model, optimizer = made(each, lambda one: part(one, False))
    part(model, True)
    before = written("before")
    model(torch.ones(2, 32)).sum().backward()
    optimizer.zero_grad()
    after = written("after")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("ranks", RANKS)
def test_written_weights_are_those_after_the_next_pass(ranks: int, tmp_path: Path) -> None:
    on(ranks, exported, layer, tmp_path)

"""Copies of a managed model, made while its parameters are ordinary ones: plain models that share nothing with it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, AlreadyManaged, Budget, InvalidInput, UnsupportedParameter
from ps_core.engine import WeightAverage, chunked, is_managed, materialized, release, statistics


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(x)))).square().sum()


def managed(**more: Any) -> Any:
    torch.manual_seed(0)
    given = {"device": "emulated", "precision": "fp32", "budget": Budget(device="8KiB", host="1MiB")} | more
    model, optimizer = chunked(Net(), SGD(lr=0.1), **given)
    return model, optimizer


def train(model: nn.Module, optimizer: Any, seed: int = 1) -> float:
    loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("write", [False, True])
def test_a_copy_is_a_plain_model_that_trains_alike(write: bool) -> None:
    model, optimizer = managed()
    train(model, optimizer)
    with materialized(model, write=write):
        copied = copy.deepcopy(model)
    assert not is_managed(copied)
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    assert copied.head.weight is copied.up.weight
    for module in copied.modules():
        assert not any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    assert pickle.loads(pickle.dumps(copied)).state_dict().keys() == model.state_dict().keys()
    plain = torch.optim.SGD(copied.parameters(), lr=0.1, fused=True)
    for seed in range(3):
        assert train(copied, plain, seed) == train(model, optimizer, seed)
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in model.state_dict().items())
    release(model)


def test_the_model_is_as_it_was() -> None:
    model, optimizer = managed()
    with materialized(model):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.up.weight.zero_()
    assert is_managed(model)
    assert model.state_dict()["up.weight"].abs().sum() > 0
    with pytest.raises(InvalidInput, match=r"keep_vars=True.*materialized\(model\)"):
        model.state_dict(keep_vars=True)
    with materialized(model):
        assert all(isinstance(value, nn.Parameter) for value in model.down.state_dict(keep_vars=True).values())
        model(torch.ones(4, 8))
        with pytest.raises(InvalidInput, match="train after the block"):
            model(torch.ones(4, 8)).backward()
    with pytest.raises(InvalidInput, match="leave assign out"):
        model.load_state_dict(model.state_dict(), assign=True)
    train(model, optimizer)
    release(model)


def test_copies_elsewhere_are_refused_with_the_way() -> None:
    model, _ = managed()
    with pytest.raises(UnsupportedParameter, match=r"inside `with materialized\(model\):`"):
        copy.deepcopy(model)
    with (
        materialized(model, names=["down.weight"]),
        pytest.raises(UnsupportedParameter, match=r"inside `with materialized\(model\):`"),
    ):
        copy.deepcopy(model)
    with materialized(model), pytest.raises(UnsupportedParameter, match=r"pickle copy\.deepcopy\(model\)"):
        pickle.dumps(model)
    release(model)


def test_a_block_within_a_block_is_refused_in_its_own_words() -> None:
    model, optimizer = managed()
    with materialized(model):
        for call in (materialized(model).__enter__, lambda: statistics(model), lambda: release(model)):
            with pytest.raises(InvalidInput, match=r"inside a block of materialized\(...\).*after the block"):
                call()
        with pytest.raises(AlreadyManaged, match=r"copy\.deepcopy\(model\) here gives a model"):
            chunked(model, SGD(lr=0.1))
        copied, other = chunked(copy.deepcopy(model), SGD(lr=0.1), precision="fp32")
    with materialized(model, names=["down.weight"]):
        for call in (materialized(model).__enter__, lambda: release(model)):
            with pytest.raises(InvalidInput, match=r"inside a block of materialized\(...\): call it after the block"):
                call()
    assert train(model, optimizer) == train(copied, other)
    release(model), release(copied)


def test_a_module_that_holds_two_managed_models_is_told_apart() -> None:
    """What takes one model took the first, and left the other without a word."""
    (first, optimizer), (second, _) = managed(), managed()
    both = nn.ModuleDict({"one": first, "two": second})
    words = r"this ModuleDict holds 2 models .* with 'one\.up\.weight' and one with 'two\.up\.weight': .*materialized"
    for call in (WeightAverage, statistics, release, lambda model: materialized(model).__enter__()):
        with pytest.raises(InvalidInput, match=words):
            call(both)
    with materialized(first), materialized(second):
        copied = copy.deepcopy(both)
    assert not is_managed(copied)
    train(first, optimizer)
    release(first)
    assert statistics(both).steps == 0, "the one that is left"
    release(both)


def test_the_refusal_of_a_copy_names_the_average() -> None:
    model, _ = managed()
    with pytest.raises(UnsupportedParameter, match=r"WeightAverage\(model\)"):
        torch.optim.swa_utils.AveragedModel(nn.ModuleList([model]))
    average = WeightAverage(model)
    average.update()
    with materialized(model):
        torch.optim.swa_utils.AveragedModel(nn.ModuleList([model])).update_parameters(nn.ModuleList([model]))
    release(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_exchanged_in_the_block_are_taken_over(precision: str) -> None:
    """As `load_state_dict(assign=True)` does it; without ``write`` they are forgotten."""
    model, optimizer = managed(precision=precision)
    before, kept = model.state_dict(), list(model.parameters())
    given = {name: value.float() + 0.125 for name, value in before.items()}
    with materialized(model):
        model.load_state_dict(given, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "norm" not in name)
    with materialized(model, write=True):
        model.load_state_dict(given, assign=True)
    assert all(one is other for one, other in zip(model.parameters(), kept, strict=True))
    for name in ("up.weight", "head.weight", "down.weight", "norm.bias"):
        assert torch.equal(model.state_dict()[name], given[name].to(before[name].dtype))
    assert torch.equal(optimizer.state_dict(masters=True)["state"][0]["master"], given["up.weight"])
    release(model)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
def test_conversions_in_the_block_end_with_it(convert: Any, write: bool) -> None:
    model, optimizer = managed()
    train(model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with materialized(model, write=write):
        convert(model)
        assert model.norm.running_mean.dtype == model.up.weight.dtype != torch.float32
        model.norm.running_var.add_(1)
    rounded = torch.bfloat16 if write and convert is nn.Module.bfloat16 else torch.float32
    after = model.state_dict()
    variance = before["norm.running_var"]
    before["norm.running_var"] = variance.to(rounded).add(1).to(variance.dtype) if write else variance
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert after[name].equal(value.to(rounded).to(value.dtype)), name
    train(model, optimizer)
    release(model)

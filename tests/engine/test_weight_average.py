"""A moving average of masters: the bits of `AveragedModel` on a plain model, in a budget that has no second model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ps_core import SGD, Budget, InvalidInput, Options
from ps_core.engine import WeightAverage, chunked, materialized, release, statistics

DECAY = 0.75
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.layers(x)).float().square().mean()


def managed(net: nn.Module, precision: str = "fp32", **more: Any) -> Any:
    """A device that has room for two layers of six."""
    sizes = {"budget": Budget(device="72KiB", host="4MiB"), "options": Options(group_bytes=2**14, poison=True)}
    return chunked(net, SGD(lr=0.5, momentum=0.5), device="emulated", precision=precision, **sizes | more)


def step(model: nn.Module, optimizer: Any) -> float:
    loss = model(X)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("decay", [DECAY, "equal"])
def test_the_bits_of_torchs_averaged_model(decay: Any) -> None:
    plain = Net()
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    how = None if decay == "equal" else get_ema_multi_avg_fn(DECAY)
    expected = AveragedModel(plain, multi_avg_fn=how)
    model, optimizer = managed(Net())
    average = WeightAverage(model, (lambda n: n / (n + 1)) if decay == "equal" else decay)
    for _ in range(4):
        assert step(model, optimizer) == step(plain, twin)
        expected.update_parameters(plain)
        average.update()
    before = model.state_dict()
    with average.applied():
        got = model.state_dict()
        with torch.no_grad():
            loss = model(X).item()
    for name, value in expected.module.state_dict().items():
        if decay == "equal":  # torch divides where we multiply by the reciprocal
            torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(got[name], value), name
    if decay != "equal":
        with torch.no_grad():
            assert loss == expected.module(X).item()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step(model, optimizer) == step(plain, twin), "training goes on as if nothing had been"
    counted = statistics(model)
    assert counted.evictions > 0
    assert counted.tiers["device"].peak_bytes <= 72 * 1024
    assert counted.divergences == 0
    release(model)


def test_in_16_bits_it_averages_masters_and_gives_them_back_unrounded() -> None:
    model, optimizer = managed(Net(), "bf16")
    average, by_hand = WeightAverage(model, DECAY), {}
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for _ in range(3):
        step(model, optimizer)
        average.update()
        for name in names:
            master = optimizer.state[model.get_parameter(name)]["master"]
            by_hand.setdefault(name, master.clone()).lerp_(master, 1 - DECAY)
    assert all(torch.equal(average.state_dict()["averages"][name], value) for name, value in by_hand.items())
    masters = optimizer.state_dict(masters=True)["state"]
    with average.applied():
        for name, value in by_hand.items():
            assert torch.equal(model.state_dict()[name], value.bfloat16())
    again = optimizer.state_dict(masters=True)["state"]
    assert all(torch.equal(again[key]["master"], entry["master"]) for key, entry in masters.items())
    release(model)


def test_updates_and_evaluations_in_inference_mode() -> None:
    averages = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, optimizer = managed(Net(), "bf16")
        average = WeightAverage(model, DECAY)
        for index in range(4):
            step(model, optimizer)
            with torch.no_grad() if index % 2 else mode():
                average.update()
            with mode(), average.applied():
                model(X)
        with mode():
            state = average.state_dict()
            average.load_state_dict(state)
        step(model, optimizer)
        average.update()
        averages.append(average.state_dict()["averages"])
        release(model)
    one, other = averages
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_average_goes_on_from_its_state() -> None:
    model, optimizer = managed(Net())
    whole, first = WeightAverage(model, DECAY), WeightAverage(model, DECAY)
    for _ in range(2):
        step(model, optimizer)
        whole.update()
        first.update()
    resumed = WeightAverage(model, DECAY)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    step(model, optimizer)
    whole.update()
    resumed.update()
    got, expected = resumed.state_dict(), whole.state_dict()
    assert got["updates"] == expected["updates"] == 3
    assert all(torch.equal(value, expected["averages"][name]) for name, value in got["averages"].items())
    with pytest.raises(InvalidInput, match="of other parameters"):
        resumed.load_state_dict({"updates": 1, "averages": {"nobody": torch.ones(1)}})
    release(model)


def test_parameters_that_share_memory_change_places_once() -> None:
    net = Net()
    net.layers[1].weight.data = net.layers[0].weight.data
    model, optimizer = managed(net, budget=Budget(device="256KiB", host="4MiB"))
    average = WeightAverage(model, DECAY)
    step(model, optimizer)
    average.update()
    step(model, optimizer)
    before = model.state_dict()
    with average.applied():
        assert not torch.equal(model.state_dict()["layers.0.weight"], before["layers.0.weight"])
        assert torch.equal(model.state_dict()["layers.1.weight"], model.state_dict()["layers.0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    release(model)


def test_what_it_refuses() -> None:
    model, optimizer = managed(Net())
    average = WeightAverage(model, DECAY)
    with pytest.raises(InvalidInput, match=r"no average yet: call update\(\)"), average.applied():
        pass
    average.update()
    weights = model.state_dict()
    states = optimizer.state_dict(masters=True)
    with average.applied():
        model(X).backward()
        for refused in (optimizer.step, average.update, average.state_dict, average.applied().__enter__):
            with pytest.raises(InvalidInput, match=r"inside applied\(\) .* after the block"):
                refused()
        for load in (partial(model.load_state_dict, weights), partial(optimizer.load_state_dict, states)):
            with pytest.raises((InvalidInput, RuntimeError), match=r"inside applied\(\) .* load after the block"):
                load()
    step(model, optimizer)
    with pytest.raises(InvalidInput, match=r"decay must be between 0 and 1, found 1\.5"):
        WeightAverage(model, 1.5).update()
    release(model)
    with pytest.raises(InvalidInput, match="not under management"):
        WeightAverage(model)
    nothing, _ = chunked(nn.Linear(2, 2), None)
    with pytest.raises(InvalidInput, match="no trained parameters to average"):
        WeightAverage(nothing)
    release(nothing)


def test_an_average_of_a_copy_made_by_pytorch() -> None:
    """What `AveragedModel` and other libraries do: they copy the model, and read its parameters after each step."""
    model, optimizer = managed(Net(), budget=Budget(device="256KiB", host="4MiB"))
    plain = Net()
    twin = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5, fused=True)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    with materialized(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(3):
        step(model, optimizer)
        step(plain, twin)
        expected.update_parameters(plain)
        with materialized(model):
            average.update_parameters(model)
    for name, value in expected.state_dict().items():
        assert torch.equal(average.state_dict()[name], value), name
    release(model)

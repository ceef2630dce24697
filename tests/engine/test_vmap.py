"""Within forward ``torch.vmap`` maps over parameters: results are those of a plain model, wherever parameters are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ps_core import SGD, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics

X = torch.linspace(-1, 1, 48).view(3, 16)
DEVICES = {"cpu": Budget(host="1MiB"), "emulated": Budget(device="33KiB", host="1MiB")}


def over_experts(experts: Experts, x: Tensor) -> Tensor:
    """The mapped function reads parameters of another group, whose moment begins meanwhile."""
    return torch.vmap(lambda weight: experts.norm(functional.gelu(x @ weight)) + experts.bias)(experts.weights).mean(0)


def over_the_last(experts: Experts, x: Tensor) -> Tensor:
    return torch.vmap(lambda column: x[:, :1] * column.sum() + experts.bias, in_dims=-1)(experts.weights).mean(0)


def over_two(experts: Experts, x: Tensor) -> Tensor:
    """Of other groups each."""
    return torch.vmap(lambda weight, other: (x @ weight) * (x @ other))(experts.weights, experts.others).sum(0)


def of_rows(experts: Experts, x: Tensor) -> Tensor:
    """One inside of another."""

    def expert(weight: Tensor) -> Tensor:
        return torch.vmap(lambda row: experts.norm(row @ weight))(x)

    return torch.vmap(expert)(experts.weights).mean(0)


def in_chunks(experts: Experts, x: Tensor) -> Tensor:
    return torch.vmap(lambda weight: x @ weight + experts.bias, chunk_size=1)(experts.weights).mean(0)


def closed_over(experts: Experts, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row @ experts.weights[0] + experts.bias)(x)


Way = Callable[["Experts", Tensor], Tensor]
WAYS: tuple[Way, ...] = (over_experts, over_the_last, over_two, of_rows, in_chunks, closed_over)


class Experts(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 16, 16) / 4)
        self.others = nn.Parameter(torch.randn(2, 16, 16) / 4)
        self.norm, self.bias, self.way = nn.LayerNorm(16), nn.Parameter(torch.randn(16)), way

    def forward(self, x: Tensor) -> Tensor:
        return x + self.way(self, x).tanh()


def made(way: Way) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Experts(way) for _ in range(6)))


def managed(way: Way, device: str, rule: Any, budget: Budget | None = None) -> Any:
    options = Options(group_bytes=2048, poison=True)
    budget = budget or DEVICES[device]
    return chunked(made(way), rule, device=device, budget=budget, precision="fp32", options=options)


def trained(model: nn.Module, optimizer: Any) -> float:
    loss = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_training_has_the_same_numbers(way: Way, device: str) -> None:
    plain = made(way)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01)
    model, optimizer = managed(way, device, SGD(lr=0.01))
    for step in range(4):
        loss = trained(plain, reference)
        assert loss == trained(model, optimizer), step
        with torch.no_grad():
            assert torch.equal(plain(X), model(X)), step
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    assert loss < 10, "numbers that do not blow up"
    assert statistics(model).skipped_steps == 0


def test_what_is_mapped_over_together_is_there_together() -> None:
    """Under any budget numbers are right, or it does not fit."""
    fitted = 0
    for kib in range(26, 37):
        plain = made(over_two)
        model, optimizer = managed(over_two, "emulated", SGD(lr=0.01), Budget(device=f"{kib}KiB", host="1MiB"))
        reference = torch.optim.SGD(plain.parameters(), lr=0.01)
        try:
            for _ in range(3):
                assert trained(model, optimizer) == trained(plain, reference), kib
            fitted += 1
        except DoesNotFit:
            pass
        finally:
            release(model)
    assert 0 < fitted < 11


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_of_a_model_that_is_not_trained(way: Way, device: str) -> None:
    model, _ = managed(way, device, None)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(X), made(way)(X))


def test_later_passes_follow_the_plan_and_nothing_is_held() -> None:
    model, optimizer = managed(over_experts, "emulated", SGD(lr=0.01))
    for _ in range(6):
        trained(model, optimizer)
    found = statistics(model)
    assert found.planned_passes >= 4
    assert found.tiers["device"].current_bytes < 33 * 1024
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release(model)
    assert torch.equal(copy.deepcopy(model)(X), model(X))

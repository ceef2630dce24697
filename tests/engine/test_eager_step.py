"""Stepping during backward gives what stepping after it gives, in less memory, and refuses what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import _models as models
from _cases import rows, square
from _runs import HOST, chunked_model, stand_in
from _states import masters_of
from ps_core import SGD, AdamW, Budget, InvalidInput, Options
from ps_core.engine import chunked, statistics

DEVICES = ["cpu", "emulated"]


def where(device: str, size: str = "128KiB") -> dict[str, Any]:
    if device == "cpu":
        return {"device": "cpu", "budget": Budget(host=HOST)}
    return {"device": stand_in(), "budget": Budget(device=size, host=HOST)}


def eager(*, on: bool = True) -> Options:
    return Options(group_bytes=4096, poison=True, eager_step=on)


class Tied(nn.Module):
    """One weight on both ends, one that is used twice, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.middle = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.middle(torch.tanh(self.middle(self.table(ids))))
        return (nn.functional.linear(x, self.table.weight) ** 2).mean()


def train(make: Any, told: dict[str, Any], precision: str, *, on: bool, spec: Any = None) -> Any:
    torch.manual_seed(0)
    norms = []
    with chunked_model(make(), spec=spec or AdamW(lr=0.01), precision=precision, options=eager(on=on), **told) as (
        model,
        optimizer,
    ):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for index in range(3):
            loss = model(torch.arange(40)) if isinstance(model, Tied) else square(model, *rows(index))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            norms.append(optimizer.last_norm)
        found = statistics(model)
        state = optimizer.state_dict(masters=True)
        return {name: value.clone() for name, value in model.state_dict().items()}, norms, found, state


@pytest.mark.parametrize("spec", [AdamW(lr=0.01), SGD(lr=0.1, momentum=0.9)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("make", [models.stack, Tied], ids=["stack", "tied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_as_stepping_afterwards(device: str, precision: str, make: Any, spec: Any) -> None:
    late, late_norms, _, late_state = train(make, where(device), precision, on=False, spec=spec)
    early, norms, found, state = train(make, where(device), precision, on=True, spec=spec)
    assert (norms, found.steps, found.divergences) == (late_norms, 3, 0)
    for name, value in late.items():
        assert torch.equal(value, early[name]), name
    for index, value in masters_of(late_state).items():
        assert torch.equal(value, masters_of(state)[index]), index
    assert found.evictions > 0 or device == "cpu" or make is Tied


def test_gradients_take_no_memory_of_their_own() -> None:
    _, _, late, _ = train(models.stack, where("emulated"), "fp32", on=False)
    _, _, early, _ = train(models.stack, where("emulated"), "fp32", on=True)
    assert late.bytes_per_parameter - early.bytes_per_parameter == pytest.approx(4, rel=0.05)
    sums = late.tiers["host"].peak_bytes - early.tiers["host"].peak_bytes
    assert sums > 3 * sum(parameter.numel() for parameter in models.stack().parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_what_may_be_read_again_waits(device: str) -> None:
    """With a retained graph nothing is stepped before ``step()``; a second backward then is refused or right."""
    with chunked_model(models.stack(), options=eager(), precision="fp32", **where(device)) as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loss = square(model, *rows(0))
        loss.backward(retain_graph=True)
        weights = [name for name in before if name.endswith("weight")]
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items() if name in weights)
        del loss
        optimizer.step()
        assert not any(
            torch.equal(before[name], value) for name, value in model.state_dict().items() if name in weights
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_backward_is_refused(device: str) -> None:
    with chunked_model(models.stack(), options=eager(), **where(device)) as (model, optimizer):
        square(model, *rows(0)).backward()
        with pytest.raises(InvalidInput, match=r"before optimizer.step\(\)"):
            square(model, *rows(1)).backward()
        optimizer.zero_grad()
        square(model, *rows(1)).backward()
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_not_finite_raises(device: str) -> None:
    with chunked_model(models.stack(), options=eager(), **where(device)) as (model, _):
        loss = square(model, *rows(0)) * float("inf")
        with pytest.raises(InvalidInput, match=r"the gradient of '.*' is not finite"):
            loss.backward()


def test_gradients_cannot_be_looked_at() -> None:
    with chunked_model(models.stack(), options=eager(), **where("cpu")) as (model, _):
        parameter = next(iter(model.parameters()))
        assert parameter.grad is None
        square(model, *rows(0)).backward()
        with pytest.raises(InvalidInput, match="max_grad_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


class ReadsAnother(nn.Module):
    """A recomputed block that reads another layer's weight outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def block(h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layers[0](h)) * self.layers[3].weight.detach().sum() * h.cos()

        h = checkpoint(block, x.requires_grad_(), use_reentrant=False)
        for layer in list(self.layers)[1:]:
            h = h + layer(h)
        return h.square().mean()


@pytest.mark.parametrize("device", DEVICES)
def test_what_has_been_stepped_is_not_read_in_the_same_backward(device: str) -> None:
    with chunked_model(ReadsAnother(), options=eager(), precision="fp32", **where(device)) as (model, _):
        loss = model(torch.ones(4, 32))
        with pytest.raises(InvalidInput, match=r"backward reads 'layers.3.weight' after its step"):
            loss.backward()


def test_what_has_been_stepped_cannot_be_forgotten() -> None:
    with chunked_model(models.stack(), options=eager(), **where("cpu")) as (model, optimizer):
        square(model, *rows(0)).backward()
        with pytest.raises(InvalidInput, match="cannot be replaced or forgotten"):
            next(iter(model.parameters())).grad = None
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"precision": "fp16"}, "fp16"),
        ({"accumulation_steps": 2}, "accumulation_steps"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"budget": Budget(host="1GiB", disk="1GiB", disk_dir="/tmp")}, "Budget.disk"),
    ],
)
def test_what_it_cannot_do_is_refused(told: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"eager_step.*{said}"):
        chunked(models.stack(), AdamW(), options=eager(), **told)

"""Weights that a `torch.autograd.Function` saves itself, as fused operators do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _models import SavedProduct
from _runs import HOST, chunked_model, stand_in
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release

WIDTH, LAYERS, STEPS = 32, 6, 5


class Fused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Any = SavedProduct.apply
        return product(x, self.weight) + self.bias


def train(kind: type[nn.Linear], size: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    layers, losses = nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(LAYERS))), []
    model, optimizer = chunked(
        layers, AdamW(lr=1e-2), device=stand_in(), budget=Budget(device=size, host=HOST), precision="fp32",
        options=Options(group_bytes=4 * WIDTH * (WIDTH + 2), poison=True),
    )  # fmt: skip
    for index in range(STEPS):
        torch.manual_seed(index)
        loss = (model(torch.randn(4, WIDTH)) - torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {name: each.clone() for name, each in model.state_dict().items()}
    release(model)
    return losses, values


@pytest.mark.parametrize("size", ["1MiB", "28KiB"])
def test_they_are_as_other_weights_and_no_aliases(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def exposed(_: Any, record: Any) -> None:
        raise AssertionError(f"{record.name} would be compared with its master in each step from now on")

    expected, values = train(nn.Linear, size)
    monkeypatch.setattr("ps_core.engine._parameters.unseen_writes.ExposedParameters.add", exposed)
    losses, others = train(Fused, size)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(values[name], each, atol=1e-5) for name, each in others.items())


def through_a_part(model: Any, x: Tensor) -> Tensor:
    return model[0](x)  # type: ignore[no-any-return]


def through_the_function(model: Any, x: Tensor) -> Tensor:
    product: Any = SavedProduct.apply
    return product(x, model[0].weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use", [through_a_part, through_the_function])
@pytest.mark.parametrize("device", [None, "cpu", "emulated"])
@pytest.mark.parametrize("change", ["step", "load"])
def test_a_weight_saved_before_it_changes_raises_in_backward(
    use: Callable[[Any, Tensor], Tensor], device: str | None, change: str
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Fused(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if device is not None:
        budget = Budget(device="1MiB" if device == "emulated" else None, host=HOST)
        model, optimizer = chunked(model, AdamW(), device=device, budget=budget, precision="fp32")
    x = torch.randn(4, WIDTH, requires_grad=True)
    saved = use(model, x).sum()
    if change == "step":
        model(x.detach()).sum().backward()
        optimizer.step()
    else:
        model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    if device is not None:
        release(model)


class Labelled(Tensor):
    """A user's class of tensors, with an attribute of a name that managed parameters have."""

    _record = "of the user's"


def test_what_else_is_saved_may_have_any_attributes() -> None:
    found = []
    for kind in (Tensor, Labelled):
        torch.manual_seed(0)
        with chunked_model(nn.Linear(WIDTH, WIDTH), precision="fp32") as (model, optimizer):
            loss = model(torch.randn(4, WIDTH).as_subclass(kind)).square().mean()
            loss.backward()
            optimizer.step()
            found += [loss.detach().as_subclass(Tensor), model.weight.detach().clone()]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])

"""What else people do to parameters: hooks, classes of their own, parametrizations, initialisation in constructors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import _models as models
from _cases import ADAMW, finish, rows, square
from _runs import HOST, chunked_model
from ps_core import Budget, UnsupportedParameter
from ps_core.engine import chunked, materialized, release


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_hook_for_gradients_that_was_there_before_finds_them(device: str) -> None:
    model, norms = models.stack(), []
    plain = models.stack()
    plain.load_state_dict(model.state_dict())
    square(plain, *rows(0)).backward()
    expected = [parameter.grad.norm().item() for parameter in plain.parameters()]

    def note(parameter: Any) -> None:
        norms.append((id(parameter), torch.linalg.vector_norm(parameter.grad).item()))

    handles = [each.register_post_accumulate_grad_hook(note) for each in model.parameters()]
    places = {id(each): index for index, each in enumerate(model.parameters())}
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="256KiB", host=HOST)
    with chunked_model(model, device=device, budget=budget, precision="fp32") as (model, _):
        square(model, *rows(0)).backward()
    assert len(norms) == len(expected)
    for key, norm in norms:
        assert norm == pytest.approx(expected[places[key]], rel=1e-5)
    norms.clear()
    square(model, *rows(0)).backward()
    assert len(norms) == len(expected), "they stay when the engine's are taken off"
    for each in handles:
        each.remove()


class Special(nn.Parameter):
    """A parameter of somebody's own, with something that only it can do."""

    def doubled(self) -> torch.Tensor:
        return 2 * self.detach()


def test_parameters_get_their_own_class_back() -> None:
    model = models.stack()
    model[0].wide.weight = special = Special(model[0].wide.weight.data)
    special.note = "kept"
    before = special.detach().clone()
    chunked(model, ADAMW, device="cpu", precision="fp32", budget=Budget(host=HOST))
    with materialized(model):
        assert type(special) is Special
        assert torch.equal(special.doubled(), 2 * before)
    assert type(special) is not Special
    square(model, *rows(0)).backward()
    release(model)
    assert type(special) is Special
    assert special.note == "kept"
    assert {type(each) for each in model.parameters()} == {nn.Parameter, Special}
    assert torch.equal(special.doubled(), 2 * before)


def test_a_parametrization_that_makes_other_parameters_is_refused_with_the_remedy() -> None:
    with chunked_model(models.stack()) as (model, optimizer):
        with pytest.raises(UnsupportedParameter, match=r"'0\.wide\.weight'.*parametrizations[\s\S]*release\(model\)"):
            weight_norm(model[0].wide)
        square(model, *rows(0)).backward()
        finish(optimizer)


# Constructors that initialise their children again, as nanoGPT's does


class Initialised(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.table.weight
        if again:
            nn.init.normal_(self.layers[1].weight, std=0.01)
            nn.init.zeros_(self.layers[1].bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def manage(model: nn.Module) -> None:
    release(chunked(model, ADAMW, device="cpu", budget=Budget(host=HOST))[0])


def test_what_a_constructor_did_later_is_missed_aloud() -> None:
    with torch.device("meta"):
        model = Initialised(again=True)
    with pytest.warns(UserWarning, match=r"'layers\.1\.weight' and 1 others on meta were changed by a constructor"):
        manage(model)


@pytest.mark.parametrize(("device", "again"), [("cpu", False), ("cpu", True), ("meta", False)])
def test_nothing_is_said_where_nothing_was_missed(device: str, again: bool) -> None:
    with torch.device(device):
        model = Initialised(again=again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manage(model)

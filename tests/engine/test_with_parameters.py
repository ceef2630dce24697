"""What else people do to parameters: hooks, classes of their own, parametrizations, initialisation in constructors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import _models as models
from _cases import ADAMW, finish, rows, square
from _reference import GROUP_BYTES
from _runs import HOST, chunked_model
from ps_core import Budget, Options, UnsupportedParameter
from ps_core.engine import chunked, materialized, release, statistics


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


# Hooks that are called once a gradient is there; a plan may have put the gradient into a staging slot by then


def disk_of(folder: Path) -> dict[str, Any]:
    return {"device": "cpu", "budget": Budget(host="256KiB", disk="64MiB", disk_dir=str(folder))}


PLACES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "cpu": lambda folder: {"device": "cpu", "budget": Budget(host=HOST)},
    "emulated": lambda folder: {"device": "emulated", "budget": Budget(device="128KiB", host=HOST)},
    "disk": disk_of,
}


def train_with(hook: Callable[[Any], Any], model: nn.Module, optimizer: Any, micro: int) -> list[torch.Tensor]:
    """Train three steps of ``micro`` backward passes with a hook at every parameter; return the weights."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for index in range(3 * micro):
        square(model, *rows(index)).backward()
        if index % micro == micro - 1:
            finish(optimizer)
    return [value.clone() for value in model.state_dict().values()]


def trained(
    hook: Callable[[Any], Any], where: dict[str, Any], precision: str, micro: int
) -> tuple[list[torch.Tensor], Any]:
    options = Options(group_bytes=GROUP_BYTES, poison=True)
    settings = {"precision": precision, "accumulation_steps": micro, "options": options, "spec": ADAMW}
    torch.manual_seed(5)
    with chunked_model(models.stack(2), **settings, **where) as (model, optimizer):
        return train_with(hook, model, optimizer, micro), statistics(model)


def expected_after(hook: Callable[[Any], Any], precision: str, micro: int, folder: Path) -> list[torch.Tensor]:
    """The weights of plain PyTorch; in 16 bits, which PyTorch's optimizers step without masters, those of one tier."""
    if precision != "fp32":
        return trained(hook, PLACES["cpu"](folder), precision, micro)[0]
    torch.manual_seed(5)
    model = models.stack(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW.lr, weight_decay=ADAMW.weight_decay, fused=True)
    return train_with(hook, model, optimizer, micro)


def scale(parameter: Any) -> None:
    parameter.grad.mul_(0.3)


def drop_large(parameter: Any) -> None:
    assert parameter.grad is not None
    if parameter.shape == (2 * models.WIDTH, models.WIDTH):
        parameter.grad = None
        assert parameter.grad is None


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_scales_gradients_and_the_plan_is_kept(place: str, precision: str, micro: int, tmp_path: Path) -> None:
    found, counted = trained(scale, PLACES[place](tmp_path), precision, micro)
    for one, other in zip(found, expected_after(scale, precision, micro, tmp_path), strict=True):
        assert torch.equal(one, other)
    assert counted.planned_passes >= 2 * micro, counted
    assert counted.divergences == 0


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_drops_gradients(place: str, precision: str, micro: int, tmp_path: Path) -> None:
    found, _ = trained(drop_large, PLACES[place](tmp_path), precision, micro)
    for one, other in zip(found, expected_after(drop_large, precision, micro, tmp_path), strict=True):
        assert torch.equal(one, other)


def test_a_scaled_sum_keeps_its_factor_where_the_plan_is_left(tmp_path: Path) -> None:
    """Scaled in the first backward pass; in the second one a norm is read, which ends the plan's pass early."""
    norms: list[float] = []
    calls = 0

    def scale_then_read(parameter: Any) -> None:
        nonlocal calls
        calls += 1
        scale(parameter)
        if calls % 24 == 18:
            norms.append(parameter.grad.norm().item())

    found, counted = trained(scale_then_read, PLACES["emulated"](tmp_path), "fp32", 2)
    assert counted.divergences > 0
    got = list(norms)
    for one, other in zip(found, expected_after(scale_then_read, "fp32", 2, tmp_path), strict=True):
        assert torch.equal(one, other)
    assert got == pytest.approx(norms[len(got) :], rel=1e-6)


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


# Buffers and state dicts


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_dict_in_inference_mode(place: str, precision: str, tmp_path: Path) -> None:
    with chunked_model(models.stack(2), precision=precision, **PLACES[place](tmp_path)) as (model, optimizer):
        square(model, *rows(0)).backward()
        finish(optimizer)
        expected = model.state_dict()
        with torch.inference_mode():
            found = model.state_dict()
        for name, value in expected.items():
            assert torch.equal(found[name], value)
            assert not found[name].is_inference(), "as in plain PyTorch"
            assert not found[name].requires_grad
        found[name].mul_(2)
        with pytest.raises(UnsupportedParameter, match="changed in place in what state_dict"):
            square(model, *rows(1))


SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse().coalesce(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("place", PLACES)
def test_a_sparse_buffer(place: str, kind: str, tmp_path: Path) -> None:
    model = models.stack(2)
    model.register_buffer("mask", SPARSE[kind](torch.eye(models.WIDTH)))
    with chunked_model(model, **PLACES[place](tmp_path)) as (model, optimizer):
        square(model, *rows(0)).backward()
        finish(optimizer)
        assert torch.equal(model.mask.to_dense(), torch.eye(models.WIDTH))

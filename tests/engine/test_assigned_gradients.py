"""A tensor that was assigned to ``parameter.grad``, and changed in place afterwards: as in PyTorch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, Budget, InvalidInput
from ps_core.engine import chunked, release
from ps_core.engine._execution.find_hooks import hooks_of

PLACES = {"cpu": Budget(host="4MiB"), "emulated": Budget(device="256KiB", host="4MiB")}


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"device": request.param, "budget": PLACES[request.param]}


def assigned(model: nn.Module) -> list[torch.Tensor]:
    """One tensor for each parameter."""
    found = [torch.full_like(each, 0.5 + index, device="cpu") for index, each in enumerate(model.parameters())]
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    return found


def clip_the_list(model: nn.Module) -> None:
    found = assigned(model)
    norm = nn.utils.get_total_norm(found)
    for gradient in found:
        gradient.mul_(0.5 / norm)


def fill_a_flat_buffer(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    flat, start = torch.zeros(sum(each.numel() for each in model.parameters()), dtype=dtype), 0
    for index, parameter in enumerate(model.parameters()):
        part = flat[start : start + parameter.numel()]
        part.fill_(index + 1)  # which raises the version of the parts before
        parameter.grad = part.view_as(parameter)
        start += parameter.numel()
    flat.div_(2)


def views_of_a_flat_buffer(model: nn.Module) -> None:
    sizes = [each.numel() for each in model.parameters()]
    flat = torch.zeros(sum(sizes), dtype=next(model.parameters()).dtype)
    for parameter, part in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    flat.add_(0.25)


def clip_the_parameters_afterwards(model: nn.Module) -> None:
    for gradient in assigned(model):
        gradient.mul_(3)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def read_first_then_change(model: nn.Module) -> None:
    found = assigned(model)
    held = [parameter.grad for parameter in model.parameters()]
    for gradient in found:
        gradient.mul_(0.25)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, nn.utils.get_total_norm(held))


def change_both_in_turns(model: nn.Module) -> None:
    """The tensor first: then it is stored, and the gradient changed."""
    for gradient, parameter in zip(assigned(model), model.parameters(), strict=True):
        for _ in range(2):
            parameter.grad = gradient.mul_(0.25)
            gradient.add_(0.125)
            parameter.grad.mul_(3)
            gradient = parameter.grad.clone()


WAYS = [
    change_both_in_turns,
    clip_the_list,
    fill_a_flat_buffer,
    views_of_a_flat_buffer,
    clip_the_parameters_afterwards,
    read_first_then_change,
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
def test_later_changes_count_as_in_plain_pytorch(
    way: Callable[[nn.Module], None], precision: str, place: dict[str, Any]
) -> None:
    plain = made().bfloat16().float() if precision == "bf16" else made()
    model, optimizer = chunked(made(), SGD(lr=0.5), precision=precision, **place)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        way(model)
        way(plain)
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
    release(model, in_first_types=True)
    room = 1e-6 if precision == "fp32" else 2.0**-7
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=room, atol=room)


def changed_by_backward(model: nn.Module) -> None:
    model(torch.ones(2, 64)).float().sum().backward()


def changed_by_the_user(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(2)


@pytest.mark.parametrize("change", [changed_by_backward, changed_by_the_user])
def test_changes_of_both_are_refused(change: Callable[[nn.Module], None], place: dict[str, Any]) -> None:
    model, optimizer = chunked(made(), SGD(lr=0.5), precision="fp32", **place)
    found = assigned(model)
    change(model)
    found[0].mul_(2)
    with pytest.raises(InvalidInput, match=r"the tensor given to '0\.weight' by parameter\.grad = \.\.\. was changed"):
        optimizer.step()
    next(model.parameters()).grad = found[0]
    optimizer.step()
    release(model)


def test_tensors_that_nobody_else_has_are_not_kept(place: dict[str, Any]) -> None:
    model, optimizer = chunked(made(), SGD(lr=0.5), precision="fp32", **place)
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    records = hooks_of(model).engine.records
    assert [record.name for record in records if record.source is not None] == [records[-1].name]
    optimizer.step()
    assert all(record.source is None for record in records)
    release(model)

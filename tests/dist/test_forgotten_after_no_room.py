"""Memory is short for a sum over ranks: the gradients can be forgotten, training goes on, and models are released."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from _states import masters_of
from _threads import Together, run
from ps_core import Adam, Budget, DoesNotFit
from ps_core.engine import chunked, release
from ps_core.engine._execution.hooks import hooks_of

ROOMY, SHORT = Budget(host="16MiB"), Budget(host=90000)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.part = nn.Linear(32, 32), nn.Linear(4, 32, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.tanh(self.whole(values)) + self.part(values[..., :4])


torch.manual_seed(0)
MADE = nn.Sequential(*(Block() for _ in range(4)))
VALUES = torch.randn(2, 32)


def begin(each: Together, budget: Budget, **settings: Any) -> tuple[Any, Any]:
    model, optimizer = chunked(deepcopy(MADE), Adam(lr=1e-2), budget=replace(budget), collectives=each, **settings)
    return model, optimizer


def backward(model: Any) -> None:
    model(VALUES).float().square().mean().backward()


def steps(model: Any, optimizer: Any, number: int) -> None:
    for _ in range(number):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer: Any) -> list[Tensor]:
    return list(masters_of(optimizer.state_dict(masters=True)).values())


def an_abandoned_forward(model: Any, optimizer: Any) -> None:
    """Its sums come with those of the next pass, which are then added to them, in memory of their own."""
    loss = model(VALUES)
    optimizer.zero_grad()
    del loss


def test_training_goes_on_once_gradients_are_forgotten() -> None:
    def case(each: Together) -> list[Tensor]:
        model, optimizer = begin(each, SHORT, precision="bf16", device="cpu")
        steps(model, optimizer, 2)
        an_abandoned_forward(model, optimizer)
        with pytest.raises(DoesNotFit):
            backward(model)
        optimizer.zero_grad()
        steps(model, optimizer, 2)
        found = masters(optimizer)
        release(model)
        return found

    for found, expected in zip(run(2, case)[0], run(2, undisturbed)[0], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def undisturbed(each: Together) -> list[Tensor]:
    """Masters after four steps, with room for everything."""
    model, optimizer = begin(each, ROOMY, precision="bf16", device="cpu")
    steps(model, optimizer, 4)
    found = masters(optimizer)
    release(model)
    return found


def test_a_rank_without_room_takes_part_once() -> None:
    """What it needs for the sum it reserves before; else it would exchange a second time, and the other would not."""

    def case(each: Together) -> list[Tensor]:
        model, optimizer = begin(each, ROOMY, precision="bf16", device="cpu")
        steps(model, optimizer, 2)
        an_abandoned_forward(model, optimizer)
        if each.mesh.rank:
            backward(model)
        else:
            full = DoesNotFit(tier="host", moment="a sum", needed_bytes=2, available_bytes=1, proven=True)
            sums = hooks_of(model).engine.gradients.sums
            with mock.patch.object(sums, "accumulator", side_effect=full), pytest.raises(DoesNotFit):
                backward(model)
        optimizer.zero_grad()
        steps(model, optimizer, 2)
        found = masters(optimizer)
        release(model)
        return found

    for found, expected in zip(run(2, case)[0], run(2, undisturbed)[0], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_model_that_does_not_fit_is_released(attempts: int) -> None:
    """The last sums that other ranks may wait for then take more than the budget."""

    def case(each: Together) -> None:
        model, optimizer = begin(each, SHORT, precision="fp32", device="cpu")
        for _ in range(attempts):
            with suppress(DoesNotFit):
                steps(model, optimizer, 1)
                raise AssertionError("there is too little memory")
        release(model)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    run(2, case)

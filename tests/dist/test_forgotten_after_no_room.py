"""Memory is short for a sum over ranks: the gradients can be forgotten, training goes on, and models are released."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _states import masters_of
from _threads import Together, run
from ps_core import Adam, AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, offloaded, release
from ps_core.engine._execution.find_hooks import hooks_of

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


def trained(each: Together, budget: Budget, break_off: Callable[[Any, Any], None] | None = None) -> list[Tensor]:
    """Return the masters after four steps; ``break_off`` makes a pass that fails behind the second."""
    model, optimizer = begin(each, budget, precision="bf16", device="cpu")
    steps(model, optimizer, 2)
    if break_off is not None:
        break_off(model, optimizer)
        optimizer.zero_grad()
    steps(model, optimizer, 2)
    found = list(masters_of(optimizer.state_dict(masters=True)).values())
    release(model)
    return found


def check(case: Callable[[Together], list[Tensor]]) -> None:
    """Compare each rank's masters with those of four steps with room for everything."""
    for found, expected in zip(run(2, case)[0], run(2, partial(trained, budget=ROOMY))[0], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def abandon_forward(model: Any, optimizer: Any) -> None:
    """Make a forward pass that has no backward: the next pass adds its sums to this one's, which takes memory."""
    loss = model(VALUES)
    optimizer.zero_grad()
    del loss


def test_training_goes_on_once_gradients_are_forgotten() -> None:
    def break_off(model: Any, optimizer: Any) -> None:
        abandon_forward(model, optimizer)
        with pytest.raises(DoesNotFit):
            backward(model)

    check(partial(trained, budget=SHORT, break_off=break_off))


def test_a_rank_without_room_takes_part_once() -> None:
    """A rank reserves memory for a sum before it exchanges gradients: to exchange them twice would part the ranks."""
    full = DoesNotFit(tier="host", moment="a sum", needed_bytes=2, available_bytes=1, proven=True)

    def case(each: Together) -> list[Tensor]:
        def break_off(model: Any, optimizer: Any) -> None:
            abandon_forward(model, optimizer)
            if each.mesh.rank:
                backward(model)
                return
            sums = hooks_of(model).engine.gradients.sums
            with mock.patch.object(sums, "accumulator", side_effect=full), pytest.raises(DoesNotFit):
                backward(model)

        return trained(each, ROOMY, break_off)

    check(case)


class Blocks(nn.Sequential):
    def forward(self, values: Tensor, *, offloads: bool) -> Tensor:
        for block in self:
            if offloads:
                with offloaded(block, values):
                    values = checkpoint(block, values, use_reentrant=False)
            else:
                values = block(values)
        return values.float().square().sum()


BLOCKS = Blocks(*(nn.Linear(24, 24) for _ in range(4)))


@pytest.mark.parametrize("host_bytes", [12000, 18000, 22000])
def test_a_host_that_is_full_of_activations_sums_once(host_bytes: int) -> None:
    """Second gradients are added to sums on the host, where one rank's activations are: without memory between."""

    def case(each: Together, host: int) -> list[Tensor]:
        model, optimizer = chunked(
            deepcopy(BLOCKS),
            AdamW(lr=1e-2),
            device="emulated",
            precision="bf16",
            collectives=each,
            budget=Budget(device="26KiB", host=host),
            options=Options(group_bytes=1200),
        )
        for _ in range(2):
            with suppress(DoesNotFit):
                model(torch.ones(2, 24), offloads=False).backward()
                model(torch.ones(12, 24), offloads=each.mesh.rank == 0).backward()
            optimizer.zero_grad()
            model(torch.ones(2, 24), offloads=False).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(masters_of(optimizer.state_dict(masters=True)).values())

    roomy, tight = run(2, partial(case, host=2**20))[0], run(2, partial(case, host=host_bytes))[0]
    for expected, found in zip(roomy, tight, strict=True):
        assert all(one.equal(other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_model_that_does_not_fit_is_released(attempts: int) -> None:
    """Other ranks may wait for sums of the pass that broke off: these may take more than the budget."""

    def case(each: Together) -> None:
        model, optimizer = begin(each, SHORT, precision="fp32", device="cpu")
        for _ in range(attempts):
            with suppress(DoesNotFit):
                steps(model, optimizer, 1)
                raise AssertionError("there is too little memory")
        release(model)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())

    run(2, case)

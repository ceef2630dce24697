"""A forward pass with gradients that no backward pass follows keeps to the budget, and leaves the plan in force.

So does a validation without ``torch.no_grad()``, or a generator whose images only train the discriminator.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._support.interrupts import _STATE

WIDTH, ROWS = 64, 16
TIGHT, ROOMY = 2**17, 2**18


@contextmanager
def managed(device: int) -> Iterator[tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    budget, options = Budget(device=device, host="64MiB"), Options(group_bytes=2**14)
    model, optimizer = chunked(
        model, AdamW(), device="emulated", precision="fp32", budget=budget, options=options, max_grad_norm=None
    )
    try:
        yield model, optimizer
    finally:
        release(model)


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH)


def validate(model: nn.Module) -> float:
    """Compute a loss that takes 160 KiB, and drop its graph."""
    return (model(rows()).repeat(1, 20) + 1).square().mean().item()


def train(model: nn.Module, optimizer: Any) -> None:
    model(rows()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_within_budget(model: nn.Module) -> bool:
    memory = statistics(model).tiers["device"]
    return memory.peak_bytes <= memory.budget_bytes


def test_a_dropped_pass_beyond_the_budget_is_refused_when_the_next_one_begins() -> None:
    with managed(TIGHT) as (model, optimizer):
        validate(model)
        with pytest.raises(DoesNotFit, match=r"at 'forward of 3.weight, in the pass before'") as caught:
            train(model, optimizer)
        assert "torch.no_grad()" in caught.value.remedies[1]
        train(model, optimizer)  # it is said once
        train(model, optimizer)
        assert statistics(model).planned_passes > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_refusal_is_freed_at_once(late: bool) -> None:
    """The error's traceback holds the activations of the refused pass, so it must not wait for a collector."""
    with managed(TIGHT) as (model, _):
        gone: list[weakref.ref[BaseException]] = []
        gc.disable()
        try:
            if late:
                validate(model)
            model(rows(ROWS if late else 512))
        except DoesNotFit as error:
            gone.append(weakref.ref(error))
        finally:
            gc.enable()
        assert [each() for each in gone] == [None]


def test_the_budget_that_the_refusal_names_is_enough() -> None:
    with managed(TIGHT) as (model, optimizer):
        validate(model)
        with pytest.raises(DoesNotFit) as caught:
            model(rows())
    with managed(caught.value.needed_bytes) as (model, optimizer):
        for _ in range(3):
            validate(model)
            train(model, optimizer)
        assert peak_within_budget(model)


def test_a_state_dict_and_a_step_after_a_dropped_pass_succeed() -> None:
    with managed(TIGHT) as (model, optimizer):
        validate(model)
        assert len(model.state_dict()) == 4
        optimizer.step()  # of nothing
        with pytest.raises(DoesNotFit, match="in the pass before"):
            model(rows())
        validate(model)
    assert type(next(model.parameters())) is nn.Parameter, "it was released"


def test_a_plan_has_room_for_a_dropped_pass() -> None:
    with managed(ROOMY) as (model, optimizer):
        for _ in range(40):  # the 32nd planned pass is counted again
            validate(model)
            train(model, optimizer)
        found = statistics(model)
        assert found.planned_passes >= 38
        assert found.replans == 0
        assert peak_within_budget(model)


def test_a_plan_without_room_for_a_dropped_pass_is_made_again_and_kept() -> None:
    with managed(ROOMY) as (model, optimizer):
        for _ in range(4):
            train(model, optimizer)
        for _ in range(80):
            validate(model)
            train(model, optimizer)
        assert statistics(model).replans == 1
        assert statistics(model).planned_passes >= 80


def test_a_pass_that_an_exception_ended_is_not_refused_later() -> None:
    with managed(TIGHT) as (model, optimizer):
        with pytest.raises(ZeroDivisionError):
            fail_after(model)
        train(model, optimizer)


def fail_after(model: nn.Module) -> None:
    try:
        validate(model)
        raise ZeroDivisionError
    except ZeroDivisionError:
        model.state_dict()
        raise


# Hooks that end a pass within backward


def test_a_hook_that_reads_gradients_gives_no_plan_and_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    norms: list[Tensor] = []
    with caplog.at_level(logging.INFO, "ps_core"), managed(TIGHT) as (model, optimizer):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: norms.append(each.grad.norm()))
        for _ in range(4):
            train(model, optimizer)
        assert statistics(model).planned_passes == 0
    assert len(norms) == 16
    assert [each.message for each in caplog.records] == [
        "Sequential: no plan can be made, so passes run on demand: in backward a hook reads gradients or states, "
        "calls the model, or runs another backward: do that after backward()"
    ]


def test_a_moment_that_a_hook_ends_keeps_to_the_budget() -> None:
    def waste_and_read(parameter: nn.Parameter) -> None:
        torch.ones(40 * 2**10).sum()  # 160 KiB
        assert parameter.grad is not None
        parameter.grad.norm()

    with managed(TIGHT) as (model, _):
        model[0].weight.register_post_accumulate_grad_hook(waste_and_read)  # type: ignore[index]
        with pytest.raises(DoesNotFit):
            model(rows()).square().mean().backward()


def test_a_refusal_leaves_no_handler_of_interrupts_behind() -> None:
    with managed(TIGHT) as (model, optimizer):
        validate(model)
        with pytest.raises(DoesNotFit):
            train(model, optimizer)
        assert _STATE.users == 0

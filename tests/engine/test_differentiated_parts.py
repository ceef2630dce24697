"""Parts of a model that are differentiated within another backward pass: equilibrium models and adjoint methods."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from _differentiated import MODELS, WIDTH, Adjoint, Continuous, Equilibrium
from _fake_cuda import FakeRuntime
from _reference import Make, Settings
from _runs import HOST, check_same, check_under_the_tightest_budget, chunked_model, managed
from ps_core import SGD, AdamW, Budget
from ps_core.engine import statistics
from ps_core.engine._devices.cuda.device import CudaDevice

ROWS, STEPS = 8, 4
SPEC = AdamW(lr=1e-2)


SETTINGS = {
    "fp32": Settings(precision="fp32", max_grad_norm=None),
    "bf16": Settings(precision="bf16", max_grad_norm=1.0),
}


def batch(number: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loop(name: str, passes: int = 1) -> Callable[[Make], list[Tensor]]:
    """Train, with so many passes a step."""

    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(MODELS[name](), SPEC)
        dtype, losses = next(model.parameters()).dtype, []
        for number in range(STEPS * passes):
            loss = model(batch(number).to(dtype)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            if number % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    return run


@pytest.mark.parametrize("precision", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_plain_pytorch_under_the_tightest_budget(name: str, precision: str) -> None:
    found = check_under_the_tightest_budget(loop(name), SETTINGS[precision])
    for counted in found.statistics:
        memory = counted.tiers["device"]
        assert memory.peak_bytes <= memory.budget_bytes


@pytest.mark.parametrize("name", MODELS)
def test_two_passes_a_step_train_as_in_plain_pytorch(name: str) -> None:
    settings = Settings(precision="fp32", max_grad_norm=1.0, accumulation_steps=2)
    budget = Budget(device="96KiB", host=HOST)
    check_same(loop(name, 2), settings, managed(loop(name, 2), settings, "emulated", budget))


@pytest.mark.parametrize("name", MODELS)
def test_backward_on_the_thread_that_autograd_has_for_a_card(name: str) -> None:
    settings = Settings(precision="fp32", max_grad_norm=None)
    with (runtime := FakeRuntime(1)):
        budget = Budget(device="96KiB", host=HOST)
        check_same(loop(name), settings, managed(loop(name), settings, lambda: CudaDevice(runtime), budget))


def test_one_line_says_why_there_is_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ps_core"), chunked_model(Equilibrium(), precision="fp32") as (model, optimizer):
        for number in range(STEPS):
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 0
    assert [each.message for each in caplog.records] == [
        "Equilibrium: no plan can be made, so passes run on demand: in backward a hook reads gradients or states, "
        "calls the model, or runs another backward: do that after backward()"
    ]


def test_a_backward_over_an_earlier_graph_in_a_hook() -> None:
    """Of the same model, in a hook of another graph's backward."""

    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(Continuous(Adjoint), SGD(lr=0.1))
        for number in range(STEPS):
            first, second = model(batch(number)), model(batch(100 + number))
            loss = second.square().mean()
            assert first.grad_fn is not None
            first.grad_fn.register_hook(lambda *_, loss=loss: loss.backward())
            first.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    settings = Settings(precision="fp32", max_grad_norm=None)
    check_same(run, settings, managed(run, settings, "emulated", Budget(device="128KiB", host=HOST)))

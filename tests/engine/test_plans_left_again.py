"""Loops whose passes change although their batches do not: another plan is made if this goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _reference import GROUP_BYTES, Make, Settings
from _runs import HOST, check_same, chunked_model, managed
from ps_core import AdamW, Budget, Options
from ps_core.engine import statistics

WIDTH, STEPS = 32, 24
SPEC = AdamW(lr=1e-2)
BUDGET = Budget(device="48KiB", host=HOST)


class Heads(nn.Module):
    """A trunk and two heads of unlike depth, of which the caller names one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.heads = nn.ModuleDict(
            {"one": nn.Linear(WIDTH, 8), "two": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))}
        )

    def forward(self, x: Tensor, head: str, skipped: int = -1) -> Tensor:
        for index, layer in enumerate(self.trunk):
            x = x if index == skipped else layer(x)
        return self.heads[head](x)


Plan = Callable[[Any, int], tuple[str, int]]
"""Returns the head that step ``number`` trains, and the layer that it skips; may change the model before."""


def freezes_a_layer(model: Any, number: int) -> tuple[str, int]:
    if number == 6:
        model.trunk[1].requires_grad_(False)
    return "one", -1


def changes_heads(model: Any, number: int) -> tuple[str, int]:
    return "one" if number < 8 else "two", -1


def heads_in_turn(model: Any, number: int) -> tuple[str, int]:
    return ("one", "two")[number % 2], -1


def drops_layers(model: Any, number: int) -> tuple[str, int]:
    return "one", (number * 7 + 3) % 5 - 1


def loop(choose: Plan) -> Callable[[Make], list[Tensor]]:
    def run(make: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = make(Heads(), SPEC)
        losses = []
        for number in range(STEPS):
            head, skipped = choose(model, number)
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(x.to(next(model.parameters()).dtype), head, skipped).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("choose", "planned"),
    [
        pytest.param(
            freezes_a_layer, STEPS - 1 - 3, id="a layer is frozen: two passes leave the plan, one is recorded"
        ),
        pytest.param(changes_heads, STEPS - 1 - 3, id="another head: likewise"),
        pytest.param(heads_in_turn, STEPS // 2 - 1, id="in turn: every second pass follows the plan of the others"),
        pytest.param(drops_layers, 0, id="no two are alike"),
    ],
)
def test_passes_that_go_on_otherwise_are_planned_anew(choose: Plan, planned: int, precision: str) -> None:
    settings = Settings(precision=precision)
    got = managed(loop(choose), settings, "emulated", BUDGET)
    check_same(loop(choose), settings, got)
    (counted,) = got.statistics
    assert counted.planned_passes >= planned
    assert counted.replans <= 3, "a plan that helps nobody is made ever more seldom"
    memory = counted.tiers["device"]
    assert memory.peak_bytes <= memory.budget_bytes


def test_one_line_says_why_passes_leave_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    options = Options(group_bytes=GROUP_BYTES)
    with (
        caplog.at_level(logging.INFO, "ps_core"),
        chunked_model(Heads(), precision="fp32", budget=BUDGET, options=options) as (model, optimizer),
    ):
        for number in range(12):
            model(torch.randn(8, WIDTH), *heads_in_turn(model, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).divergences >= 4
    lines = [each.message for each in caplog.records if "leave their plan" in each.message]
    assert len(lines) == 1
    assert lines[0].startswith("Heads: passes leave their plan, and run on demand from there: forward of heads.two.0.")
    assert lines[0].endswith("; another plan is made if this goes on")


class WithLoss(Heads):
    """Returns its loss, so that the first pass is traced."""

    def forward(self, x: Tensor, head: str, skipped: int = -1) -> Tensor:
        return super().forward(x, head, skipped).square().mean()


def test_one_line_says_that_a_hook_reads_gradients_amid_a_planned_pass(caplog: pytest.LogCaptureFixture) -> None:
    options, norms = Options(group_bytes=GROUP_BYTES), []
    with (
        caplog.at_level(logging.INFO, "ps_core"),
        chunked_model(WithLoss(), precision="fp32", budget=BUDGET, options=options) as (model, optimizer),
    ):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: norms.append(float(each.grad.norm())))
        for _ in range(6):
            model(torch.randn(8, WIDTH), "one").backward()
            optimizer.step()
            optimizer.zero_grad()
        assert "a hook reads gradients" in statistics(model).last_divergence
    lines = [each.message for each in caplog.records if "planned" not in each.message]
    assert len(lines) == 1
    assert lines[0].startswith(
        "WithLoss: passes leave their plan, and run on demand from there: in backward a hook reads gradients or states"
    )


@pytest.mark.parametrize("told", [1, 3])
def test_a_line_says_that_a_step_has_more_backward_passes_than_was_told(
    told: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "ps_core"),
        chunked_model(Heads(), precision="bf16", accumulation_steps=told) as (model, optimizer),
    ):
        for number in range(12):
            model(torch.randn(8, WIDTH), "one").float().square().mean().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        counted = statistics(model)
    lines = [each.message for each in caplog.records if "accumulation_steps=1" in each.message]
    assert len(lines) == (told == 1)
    assert ("accumulation_steps=1" in counted.last_divergence) is (told == 1)


@pytest.mark.parametrize("loop", ["an evaluation before the step", "gradients forgotten without a step"])
def test_other_loops_are_not_told_of_accumulation(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "ps_core"),
        chunked_model(Heads(), precision="bf16") as (model, optimizer),
    ):
        for number in range(12):
            model(torch.randn(8, WIDTH), "one").float().square().mean().backward()
            if loop == "an evaluation before the step":
                with torch.no_grad():
                    model(torch.randn(8, WIDTH), "one")
            if loop == "an evaluation before the step" or number % 3 == 2:
                optimizer.step()
            optimizer.zero_grad()
        assert "accumulation_steps" not in statistics(model).last_divergence
    assert not [each.message for each in caplog.records if "accumulation_steps" in each.message]


def test_reading_weights_before_the_first_step_is_no_pass_without_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Loops read them that log the norms of gradients and weights."""
    with caplog.at_level(logging.INFO, "ps_core"), chunked_model(Heads(), precision="fp32") as (model, optimizer):
        for _ in range(4):
            model(torch.randn(8, WIDTH), "one").square().mean().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    assert parameter.grad.norm() > 0
                    assert parameter.detach().float().norm() > 0
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 3
    assert not [each.message for each in caplog.records if "no plan" in each.message]


def test_a_pass_for_gradients_of_inputs_between_steps_leaves_the_plan_of_training_alone() -> None:
    """`torch.autograd.grad` gives parameters no gradients, so its passes do not count as training passes."""
    with chunked_model(Heads(), precision="fp32") as (model, optimizer):
        for number in range(8):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
            model(x, "one").square().mean().backward()
            optimizer.step()
            x.requires_grad_()
            torch.autograd.grad(model(x, "one").sum(), x)
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 7
        assert statistics(model).replans == 0

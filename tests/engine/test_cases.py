"""Every way a model may use its parameters: trained with next to no memory, and bit for bit as in plain PyTorch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import _models as models
from _cases import ADAMW, CASES, STEPS, Case, case, once, rows, square
from _reference import Make, Settings, plain
from _runs import HOST, check_same, check_under_the_tightest_budget, chunked_model, managed, stand_in
from ps_core import AlreadyManaged, Budget, PatrickStarError
from ps_core.engine import chunked

ROWS = [pytest.param(each, kind, id=f"{each.name}-{kind}") for each in CASES for kind in each.precisions]


@pytest.mark.parametrize(("case", "precision"), ROWS)
def test_training_is_as_in_plain_pytorch(case: Case, precision: str) -> None:
    settings = Settings(precision=precision, max_grad_norm=case.max_grad_norm, options=case.options)
    check_under_the_tightest_budget(case.run, settings)


def test_no_two_cases_have_the_same_name() -> None:
    assert len({each.name for each in CASES}) == len(CASES)


# What is refused


def add_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].wide.weight.add_(1)


def initialise_again(model: nn.Module) -> None:
    nn.init.zeros_(model[1].wide.weight)


def copy_into(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].wide.weight.copy_(torch.zeros(2 * models.WIDTH, models.WIDTH))


def write_a_row(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].wide.weight[0] = 0


def other_data(model: nn.Module) -> None:
    model[1].wide.weight.data = torch.zeros(2 * models.WIDTH, models.WIDTH)


def other_memory(model: nn.Module) -> None:
    with torch.no_grad():
        model[1].wide.weight.set_(torch.zeros(2 * models.WIDTH, models.WIDTH))


def swapped(model: nn.Module) -> None:
    torch.utils.swap_tensors(model[1].wide.weight, nn.Parameter(torch.zeros(2 * models.WIDTH, models.WIDTH)))


def result_of_another(model: nn.Module) -> None:
    with torch.no_grad():
        torch.add(model[1].wide.weight, 1, out=model[1].wide.weight)


def to_half(model: nn.Module) -> None:
    model.half()


def deep_copy(model: nn.Module) -> None:
    copy.deepcopy(model)


def pickled(model: nn.Module) -> None:
    pickle.dumps(model)


def chunked_again(model: nn.Module) -> None:
    chunked(model, ADAMW, device="emulated", budget=Budget(device="1MiB", host=HOST))


def transformed(model: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, rows(0)).float().square().mean()

    torch.func.grad(loss)(dict(model.named_parameters()))


def mapped(model: nn.Module) -> None:
    torch.func.vmap(model)(*rows(0))


REFUSED: list[tuple[Callable[[nn.Module], Any], str]] = [
    (add_in_place, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (initialise_again, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (copy_into, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (other_data, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (other_memory, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (swapped, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (result_of_another, r"'1\.wide\.weight'[\s\S]*materialized\("),
    (to_half, r"'0\.norm\.weight'[\s\S]*release\("),
    (deep_copy, r"'0\.norm\.weight'[\s\S]*release\("),
    (pickled, r"'0\.norm\.weight'[\s\S]*release\("),
    (chunked_again, r"release"),
    (transformed, r"torch\.func"),
    (mapped, r"torch\.func"),
]


def interrupted(act: Callable[[nn.Module], Any] | None) -> Callable[[Make], list[Tensor]]:
    """The loop of a case; after two steps something is tried."""
    stack = case("stack", models.stack)

    def loop(make: Make) -> list[Tensor]:
        model, optimizer = make(stack.build(), stack.spec)
        logs: list[Tensor] = []
        for index in range(STEPS):
            if index == 2 and act is not None:
                act(model)
            logs += once(stack, model, optimizer, index)
        return logs

    return loop


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[act.__name__ for act, _ in REFUSED])
def test_refused_by_name_and_nothing_has_changed(act: Callable[[nn.Module], Any], message: str, precision: str) -> None:
    def expect(model: nn.Module) -> None:
        with pytest.raises(PatrickStarError, match=message):
            act(model)

    settings = Settings(precision=precision)
    got = managed(interrupted(expect), settings, stand_in, Budget(device="1MiB", host=HOST))
    check_same(interrupted(None), settings, got)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda weight: weight.data.add_(1),
    "detach": lambda weight: weight.detach().mul_(2),
    "view": lambda weight: weight.view(-1)[:3].zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_through_an_alias_is_noticed(change: str) -> None:
    def change_and_go_on(model: nn.Module) -> None:
        with torch.no_grad():
            CHANGES[change](model[1].wide.weight)
        for index in range(2):
            square(model, *rows(index))

    with chunked_model(models.stack()) as (model, optimizer):
        square(model, *rows(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(PatrickStarError, match=r"'1\.wide\.weight'[\s\S]*materialized\("):
            change_and_go_on(model)


def test_reentrant_checkpointing_is_refused_with_the_remedy() -> None:
    with chunked_model(models.EarlyStop(reentrant=True)) as (model, _):
        x = rows(0)[0].requires_grad_()
        with pytest.raises(PatrickStarError, match=r"use_reentrant=False"):
            square(model, x).backward()


def test_a_managed_model_cannot_be_managed_again() -> None:
    with chunked_model(models.stack()) as (model, _), pytest.raises(AlreadyManaged, match=r"release\(model\)"):
        chunked_again(model)


# Evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_without_an_optimizer(mode: Callable[[], Any], precision: str) -> None:
    def loop(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(layers=5), None)
        assert optimizer is None
        with mode():
            return [model(torch.arange(12).view(2, 6) + index).clone() for index in range(3)]

    check_under_the_tightest_budget(loop, Settings(precision=precision))


def test_what_is_compared_moves() -> None:
    """Five steps of the plain loop change every parameter that gets a gradient, and every loss."""
    for each in CASES:
        run = plain(each.run, Settings(precision=each.precisions[0], options=each.options))
        moments = [value for name, value in run.values.items() if name.endswith("/variance") and value.numel()]
        assert len(moments) >= 8, each.name
        assert all(value.any() for value in moments), each.name
        assert len({float(log) for log in run.logs}) == len(run.logs), each.name
        assert all(bool(value.isfinite().all()) for value in run.values.values()), each.name

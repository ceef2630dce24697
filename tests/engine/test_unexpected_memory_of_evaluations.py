"""Evaluations that take more memory than the plan leaves free, which no size of a batch tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from _runs import chunked_model
from ps_core import Budget, DoesNotFit, Options
from ps_core.engine import statistics

WIDTH, STEPS = 64, 4
FITS_BESIDE_THE_PLAN, FITS_ON_DEMAND, FITS_NEVER = 2, 40, 80
"""Numbers of samples, for a budget of 160 KiB."""
LEFT = "forward of layers.7.0.weight takes more than was planned"
UNSERVED = "an evaluation that takes more than the plan leaves free"


class Amount(Enum):
    """A number of samples, as a member of an enumeration."""

    FEW = "few"
    MANY = "many"


@dataclass
class Batch:
    """Rows, and what is to be done with them."""

    rows: Tensor
    samples: Any = 1


class Sampling(nn.Module):
    """Layers before a head that looks at each row many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8))
        self.head = nn.Linear(WIDTH, 8)
        self.samples_in_evaluation = 1

    def forward(self, x: Any, samples: Any = 1, labels: Tensor | None = None) -> Tensor:
        if isinstance(x, Batch | SimpleNamespace):
            x, samples = x.rows, x.samples
        elif isinstance(x, dict):
            x, samples = x["rows"], x["how"][0]
        if isinstance(samples, Amount):
            samples = FITS_NEVER if samples is Amount.MANY else 1
        if not self.training:
            samples = samples * self.samples_in_evaluation
        for layer in self.layers:
            x = layer(x)
        return self.head(x.repeat(int(samples), 1))


def rows(number: int = 8) -> Tensor:
    return torch.ones(number, WIDTH)


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, *given: Any, **named: Any) -> None:
    model.train()
    for _ in range(steps):
        model(*(given or (rows(),)), **named).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def trained(budget: str = "160KiB", device: str = "emulated") -> Iterator[tuple[Any, Any]]:
    """Train a few steps, which are planned."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"budget": Budget(device=budget, host="64MiB"), "options": Options(group_bytes="16KiB")}
    if device == "cpu":
        settings["budget"] = Budget(host=budget)
    with chunked_model(Sampling(), precision="fp32", device=device, **settings) as (model, optimizer):
        train(model, optimizer)
        yield model, optimizer


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_with_another_number_is_measured(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Such an evaluation leaves the plan, and the next one runs on demand. Training still follows the plan."""
    with trained() as (model, optimizer):
        planned = statistics(model).planned_passes
        told = []
        for samples in (FITS_BESIDE_THE_PLAN, FITS_ON_DEMAND, FITS_ON_DEMAND):
            with mode():
                model(rows(), samples)
            told.append(statistics(model))
        train(model, optimizer)
        after = statistics(model)
    assert [each.planned_passes - planned for each in told] == [1, 1, 1]
    assert [each.divergences for each in told] == [0, 1, 2]
    assert [each.last_divergence for each in told] == ["", LEFT, UNSERVED]
    assert after.planned_passes == planned + 1 + STEPS
    assert (after.replans, after.divergences) == (0, 2)


def test_an_evaluation_that_fits_in_no_way_raises_each_time() -> None:
    with trained() as (model, optimizer):
        for _ in range(3):
            with pytest.raises(DoesNotFit) as raised, torch.no_grad():
                model(rows(), FITS_NEVER)
            assert raised.value.tier == "device"
        train(model, optimizer)
        assert statistics(model).divergences == 3


@pytest.mark.parametrize("samples", [FITS_BESIDE_THE_PLAN, FITS_ON_DEMAND, FITS_NEVER])
def test_evaluations_raise_by_a_plan_if_they_raise_without_one(samples: int) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "budget": Budget(device="160KiB", host="64MiB"),
        "options": Options(group_bytes="16KiB"),
    }
    found = []
    for steps in (0, STEPS):
        with chunked_model(Sampling(), precision="fp32", **settings) as (model, optimizer):
            train(model, optimizer, steps)
            try:
                with torch.no_grad():
                    model(rows(), samples)
                found.append(True)
            except DoesNotFit:
                found.append(False)
    assert found == [samples < FITS_NEVER] * 2


@pytest.mark.parametrize("graded", [False, True], ids=["without gradients", "with gradients"])
def test_the_mode_of_the_model_is_part_of_a_call(graded: bool) -> None:
    """After ``eval()`` a model may need more memory for the same arguments."""
    with trained() as (model, optimizer):
        model.samples_in_evaluation = FITS_NEVER
        model.eval()
        with pytest.raises(DoesNotFit), torch.set_grad_enabled(graded):
            model(rows()).square().mean().backward()
        optimizer.zero_grad()
        train(model, optimizer)


def test_a_first_evaluation_like_the_training_is_measured_too() -> None:
    """Without gradients a model may take another way, also in training mode."""

    def asks(module: nn.Module, given: Any) -> Any:
        return given if torch.is_grad_enabled() else (given[0].repeat(FITS_NEVER, 1),)

    with trained() as (model, _):
        model.head.register_forward_pre_hook(asks)
        with pytest.raises(DoesNotFit), torch.no_grad():
            model(rows())


def test_a_larger_evaluation_with_another_number_keeps_no_weights_in_the_memory_that_it_needs() -> None:
    """The peak of an evaluation with another number does not bound how much the cache may keep."""
    with trained("480KiB") as (model, _):
        with torch.no_grad():
            for samples in (2, 2, 160):
                model(rows(10), samples)
        told = statistics(model)
    assert told.divergences == 3
    assert told.tiers["device"].peak_bytes <= told.tiers["device"].budget_bytes


def test_what_the_plan_serves_of_another_structure_is_measured_with_another_number() -> None:
    with trained() as (model, _), torch.no_grad():
        for _ in range(3):
            model(rows(), labels=rows(1))
        assert statistics(model).divergences == 1, "the plan serves it after the first time"
        with pytest.raises(DoesNotFit):
            model(rows(), 2 * FITS_NEVER, labels=rows(1))


def test_one_that_breaks_off_is_measured_again_on_one_tier() -> None:
    """The first attempt says that there is no room. So must the second."""
    with trained("560KiB", "cpu") as (model, _):
        for graded in (False, False, True, True):
            with pytest.raises(DoesNotFit), torch.set_grad_enabled(graded):
                model(rows(), 200).sum().backward()


def test_evaluations_do_not_use_up_what_training_passes_are_measured_by() -> None:
    with trained() as (model, _):
        with torch.no_grad():
            for number in range(100):
                model(rows(), samples=1 + number / 1000)
        with pytest.raises(DoesNotFit):
            model(rows(), FITS_NEVER).square().mean().backward()


NESTED = {
    "dictionary": lambda samples: {"rows": rows(), "how": [samples]},
    "data class": lambda samples: Batch(rows(), samples),
    "object": lambda samples: SimpleNamespace(rows=rows(), samples=samples),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("wrap", NESTED.values(), ids=NESTED)
def test_numbers_within_inputs_are_looked_at(wrap: Callable[[int], Any], training: bool) -> None:
    with trained() as (model, optimizer):
        train(model, optimizer, STEPS, wrap(1))
        with pytest.raises(DoesNotFit), torch.set_grad_enabled(training):
            model(wrap(FITS_NEVER)).square().mean().backward()


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("few", "many"),
    [
        (Amount.FEW, Amount.MANY),
        (numpy.int64(1), numpy.int64(FITS_NEVER)),
        (numpy.float32(1), numpy.float32(FITS_NEVER)),
    ],
    ids=["enumeration", "numpy integer", "numpy float"],
)
@pytest.mark.parametrize("wrap", [lambda samples: (rows(), samples), lambda samples: (Batch(rows(), samples),)])
def test_enumerations_and_numbers_of_numpy_are_looked_at(
    wrap: Callable[[Any], Any], few: Any, many: Any, training: bool
) -> None:
    with trained() as (model, optimizer):
        train(model, optimizer, STEPS, *wrap(few))
        with pytest.raises(DoesNotFit), torch.set_grad_enabled(training):
            model(*wrap(many)).square().mean().backward()


def test_numbers_that_always_differ_within_inputs_follow_the_plan() -> None:
    with trained() as (model, optimizer):
        before = statistics(model).planned_passes
        for number in range(6):
            train(model, optimizer, 1, {"rows": rows(), "how": [1], "texts": [str(number)], "index": number})
        assert statistics(model).planned_passes == before + 6


@pytest.mark.parametrize(("training", "samples"), [(True, 20), (False, 40)], ids=["training", "evaluation"])
def test_a_pass_that_no_plan_can_serve_keeps_no_weights_in_the_memory_that_another_number_needs(
    training: bool, samples: int
) -> None:
    with trained() as (model, _):
        kept = model.layers[7][0].weight.detach()
        with torch.set_grad_enabled(training):
            out = model(rows(), samples)
        if training:
            out.square().mean().backward()
        told = statistics(model)
        assert kept.shape == (WIDTH, WIDTH)
    assert told.last_divergence == "memory of layers.7.0.weight has live aliases"
    assert told.tiers["device"].peak_bytes <= told.tiers["device"].budget_bytes

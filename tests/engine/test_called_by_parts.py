"""Loops that call parts of a model and not the model: planned like others, with the bits of any budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from _reference import Make, Settings
from _runs import HOST, check_same, check_under_the_tightest_budget, chunked_model, managed
from ps_core import AdamW, Budget, DoesNotFit, Options
from ps_core.engine import statistics
from ps_core.engine._execution import pass_tracker
from ps_core.engine._execution.find_hooks import hooks_of

WIDTH, STEPS = 32, 6
SPEC = AdamW(lr=1e-2)


def tower(depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


class Pair(nn.Module):
    """An encoder and a decoder, which only the loop puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = tower(), tower()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def reconstruct(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.reconstruct(x)


class Blocks(nn.ModuleList):
    """More blocks than calls are told apart."""

    def __init__(self) -> None:
        super().__init__(tower(1) for _ in range(20))


def batch(number: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def autoencoder(model: Any, number: int, x: Tensor) -> Tensor:
    return functional.mse_loss(model.decoder(model.encoder(x)).float(), x.float())


def by_a_method(model: Any, number: int, x: Tensor) -> Tensor:
    return functional.mse_loss(model.reconstruct(x).float(), x.float())


def two_views(model: Any, number: int, x: Tensor) -> Tensor:
    found, other = model.encoder(x).float(), model.encoder(x.flip(0)).float()
    return functional.mse_loss(found, other.detach()) + model.decoder(x).float().square().mean()


def root_and_part(model: Any, number: int, x: Tensor) -> Tensor:
    return (model.encoder(x).float() - model(x).float() - 1).square().mean()


def in_turn(model: Any, number: int, x: Tensor) -> Tensor:
    return (model.decoder if number % 2 else model.encoder)(x).float().square().mean()


LOSSES: dict[str, Callable[[Any, int, Tensor], Tensor]] = {
    "autoencoder": autoencoder,
    "by a method": by_a_method,
    "two views": two_views,
    "root and part": root_and_part,
    "in turn": in_turn,
}


def loop(name: str, rows: Callable[[int], int] = lambda _: 8) -> Callable[[Make], list[Tensor]]:
    """Train with one of the losses, on so many rows in each step."""

    def run(make: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = make(Pair(), SPEC)
        dtype, losses = next(model.parameters()).dtype, []
        for number in range(STEPS):
            loss = LOSSES[name](model, number, batch(number, rows(number)).to(dtype))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_bits_of_plain_pytorch_under_the_tightest_budget(name: str, precision: str) -> None:
    found = check_under_the_tightest_budget(loop(name), Settings(precision=precision))
    (counted,) = found.statistics
    memory = counted.tiers["device"]
    assert memory.peak_bytes <= memory.budget_bytes
    if name != "in turn":
        assert counted.planned_passes >= STEPS - 2
        assert counted.divergences == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [lambda number: 8 + 4 * number, lambda number: 8 + 8 * (number % 3)])
def test_batches_that_grow_keep_the_bits_and_the_budget(name: str, rows: Callable[[int], int]) -> None:
    settings, run = Settings(), loop(name, rows)
    got = managed(run, settings, "emulated", Budget(device="96KiB", host=HOST))
    check_same(run, settings, got)
    memory = got.statistics[0].tiers["device"]
    assert memory.peak_bytes <= memory.budget_bytes


def test_a_later_part_with_a_larger_batch_leaves_the_plan_before_it_runs() -> None:
    """The plan has no room for it, and the part that the pass began with has the same batch as before."""
    with managed_pair() as (model, optimizer):
        for number in range(4):
            step(model, optimizer, number, rows=16)
        assert statistics(model).planned_passes == 2
        step(model, optimizer, 4, rows=32)
        found = statistics(model)
        assert found.divergences == 1
        assert found.last_divergence == "a batch larger than the plan's, in a later call"
        for number in range(5, 9):
            step(model, optimizer, number, rows=32)
        assert statistics(model).planned_passes > found.planned_passes
        assert within_budget(model)


def again_in_the_same_moment(model: Any, rows: int) -> Tensor:
    return torch.cat([model.encoder[0][0](batch(1)), model.encoder[0][0](batch(2, rows))])


def behind_the_model_itself(model: Any, rows: int) -> Tensor:
    return torch.cat([model(batch(1)), model.encoder(batch(2, rows))])


@pytest.mark.parametrize("call", [again_in_the_same_moment, behind_the_model_itself])
def test_a_larger_call_leaves_the_plan_wherever_it_comes(call: Callable[[Any, int], Tensor]) -> None:
    """The plan has no room for it, and only a few planned passes are measured."""
    with managed_pair() as (model, optimizer):
        for number in range(8):
            found = statistics(model)
            call(model, 16 if number < 4 else 32).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 4:
                assert statistics(model).last_divergence == "a batch larger than the plan's, in a later call"
        assert statistics(model).divergences <= found.divergences <= 2
        assert statistics(model).planned_passes > found.planned_passes
        assert within_budget(model)


def test_training_begins_a_pass_of_its_own_behind_an_evaluation_of_the_same_group() -> None:
    with managed_pair() as (model, optimizer):
        layer = model.encoder[0][0]
        for number in range(6):
            with torch.no_grad():
                layer(batch(number))
            layer(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 5, "all trainings but the first"


def test_a_part_that_does_not_fit_is_refused() -> None:
    with managed_pair() as (model, optimizer):
        for number in range(3):
            step(model, optimizer, number, rows=8)
        assert is_refused(model, optimizer, rows=512)
        optimizer.zero_grad()
        step(model, optimizer, 4, rows=8)


def is_refused(model: Any, optimizer: Any, rows: int) -> bool:
    """No exception is kept, whose frames would hold activations."""
    try:
        step(model, optimizer, 3, rows)
    except DoesNotFit:
        return True
    return False


def test_an_evaluation_by_parts_ends_where_training_begins() -> None:
    with managed_pair() as (model, optimizer):
        for number in range(5):
            step(model, optimizer, number, rows=8)
            with torch.no_grad():
                expected = model(batch(9))
                for _ in range(3):
                    found = model.decoder(model.encoder(batch(9)) * model.scale)
            assert torch.equal(found, expected)
        assert statistics(model).planned_passes >= 4, "all but the first"
        assert within_budget(model)


@pytest.mark.parametrize("grad", [False, True])
def test_long_inference_by_parts_records_no_more_than_a_pass(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_tracker, "_MOST_MOMENTS", 64)
    with managed_pair() as (model, _), torch.set_grad_enabled(grad):
        expected = model(batch(9)).detach()
        for _ in range(40):
            found = model.decoder(model.encoder(batch(9)) * model.scale).detach()
            recording = hooks_of(model).engine.passes.recording
            assert recording is not None
            assert len(recording.moments) < 70, "while a graph is alive, it may be a pass"
        assert torch.equal(found, expected)


def test_many_equal_parts_are_one_call() -> None:
    def blocks(make: Make) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = make(Blocks(), SPEC)
        for number in range(STEPS):
            x = batch(number)
            for block in model:  # type: ignore[attr-defined]
                x = block(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    got = managed(blocks, Settings(), "emulated", Budget(device="64KiB", host=HOST))
    check_same(blocks, Settings(), got)
    assert got.statistics[0].planned_passes == STEPS - 1


def test_parts_with_many_different_batches_are_not_planned_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "ps_core"), managed_pair() as (model, optimizer):
        for number in range(4):
            loss = torch.stack([model.encoder(batch(number, 1 + rows % 2)).square().mean() for rows in range(20)]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).planned_passes == 0
    assert [each.message for each in caplog.records] == [
        "Pair: no plan can be made, so passes run on demand: parts of the model are called many times, with different "
        "shapes"
    ]


def within_budget(model: nn.Module) -> bool:
    memory = statistics(model).tiers["device"]
    return memory.peak_bytes <= memory.budget_bytes


def managed_pair() -> Any:
    torch.manual_seed(0)
    return chunked_model(
        Pair(),
        device="emulated",
        precision="fp32",
        budget=Budget(device="96KiB", host=HOST),
        options=Options(group_bytes=2048, poison=True),
    )


def step(model: Any, optimizer: Any, number: int, rows: int) -> None:
    """Encode eight rows, and decode ``rows``."""
    code = model.encoder(batch(number))
    model.decoder(code.repeat(rows // 8, 1) * model.scale).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

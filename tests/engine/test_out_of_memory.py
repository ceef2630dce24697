"""Memory of a CUDA card that runs out: which error comes, what is lost, and what PyTorch can do without."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import finish, rows, square
from _fake_cuda import FakeRuntime
from _runs import HOST, chunked_model
from ps_core import Budget, DeviceOutOfMemory
from ps_core.engine import statistics
from ps_core.engine._devices.cuda.device import CudaDevice


class Hungry(nn.Module):
    """Asks for much memory, once, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.stack()
        self.appetite = {"forward": 0, "backward": 0}
        self.can_do_without = False

    def forward(self, x: Tensor) -> Tensor:
        if self.appetite["forward"]:
            take(self.appetite["forward"], self.can_do_without)
        return Eat.apply(self.body(x), self).square().mean()


class Eat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Hungry) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.module.appetite["backward"]:
            take(ctx.module.appetite["backward"], ctx.module.can_do_without)
        return gradient, None


def take(size: int, can_do_without: bool) -> None:
    """Take a workspace, or as cuDNN's code does a smaller one: that catches PyTorch's own error, and no other."""
    try:
        torch.zeros(size)
    except torch.OutOfMemoryError as error:
        if not can_do_without or type(error) is not torch.OutOfMemoryError:
            raise
    else:
        return
    torch.zeros(1)  # outside the handler, which keeps the failed tensor alive here


def train(model: Any, optimizer: Any, steps: range) -> list[Tensor]:
    losses = []
    for index in steps:
        loss = model(*rows(index))
        loss.backward()
        finish(optimizer)
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory(where: str, watched: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The step is lost and nothing else; from then on plans leave more room.

    In backward the engine is not on the way of PyTorch's error, so the advice is in the log alone.
    """
    caplog.set_level(logging.INFO, "ps_core")
    torch.manual_seed(1)
    with chunked_model(Hungry(), device="emulated", budget=Budget(device="1MiB", host=HOST)) as (model, optimizer):
        expected = train(model, optimizer, range(6))
    torch.manual_seed(1)
    runtime = FakeRuntime(5, watched=watched)
    with runtime:
        device = CudaDevice(runtime)
        size = 84 * 1024
        made = chunked_model(Hungry(), device=device, budget=Budget(device=size, host=HOST))
        with made as (model, optimizer):
            losses = train(model, optimizer, range(3))
            before, released = device._owned.bytes, runtime.released
            for where_now in (where,) * 2:
                model.appetite[where_now] = 1_000_000
                runtime.allocator.limit_bytes = 1_000_000
                with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate") as error:
                    train(model, optimizer, range(3, 4))
                named = watched and where == "forward"
                assert isinstance(error.value, DeviceOutOfMemory) is named
                assert ("call optimizer.zero_grad() and go on" in str(error.value)) is named
                said = [each for each in caplog.messages if "call optimizer.zero_grad() and go on" in each]
                caplog.clear()
                assert len(said) == watched
                error = None  # type: ignore[assignment]  # it holds on to what the pass had
                optimizer.zero_grad()
                model.appetite[where_now] = 0
                runtime.allocator.limit_bytes = 1 << 40
            losses += train(model, optimizer, range(3, 6))
            assert runtime.released >= released + 2, "memory kept in reserve is given back"
            assert device._owned.bytes < before, "the arena ends lower"
            assert statistics(model).planned_passes >= 6
    assert all(torch.equal(one, other) for one, other in zip(expected, losses, strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_pytorch_can_do_without_is_no_error(where: str) -> None:
    """cuDNN asks for a large workspace first; training goes on with a small one, and is planned with more room."""
    torch.manual_seed(1)
    with chunked_model(Hungry(), device="emulated", budget=Budget(device="1MiB", host=HOST)) as (model, optimizer):
        expected = train(model, optimizer, range(6))
    torch.manual_seed(1)
    runtime = FakeRuntime(5)
    with runtime:
        device = CudaDevice(runtime)
        with chunked_model(Hungry(), device=device, budget=Budget(device=96 * 1024, host=HOST)) as (model, optimizer):
            losses = train(model, optimizer, range(2))
            model.can_do_without, model.appetite[where] = True, 1_000_000
            runtime.allocator.limit_bytes = 1_000_000
            losses += train(model, optimizer, range(2, 4))
            before = statistics(model).planned_passes
            losses += train(model, optimizer, range(4, 6))
            assert runtime.allocator.failures == 4, "one in each step"
            assert statistics(model).planned_passes == before + 2
    assert all(torch.equal(one, other) for one, other in zip(expected, losses, strict=True))


def test_an_arena_that_cannot_be_had_loses_nothing() -> None:
    """The plan is carried out all the same, with memory of its own for each slot."""
    torch.manual_seed(2)
    with chunked_model(models.stack(), device="emulated", budget=Budget(device="1MiB", host=HOST)) as (
        model,
        optimizer,
    ):
        expected = [square_step(model, optimizer, index) for index in range(5)]

    class Poor(FakeRuntime):
        def empty(self, size_bytes: int) -> Tensor:
            if size_bytes > 40 * 1024:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().empty(size_bytes)

    torch.manual_seed(2)
    stack, runtime = models.stack(), Poor(7)
    with runtime:
        device = CudaDevice(runtime)
        with chunked_model(stack, device=device, budget=Budget(device="160KiB", host=HOST)) as (model, optimizer):
            losses = [square_step(model, optimizer, index) for index in range(5)]
            assert statistics(model).planned_passes >= 3
    assert all(torch.equal(one, other) for one, other in zip(expected, losses, strict=True))


def square_step(model: Any, optimizer: Any, index: int) -> Tensor:
    loss = square(model, *rows(index))
    loss.backward()
    finish(optimizer)
    return loss.detach()


def test_out_of_memory_of_others_is_theirs() -> None:
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    del device
    gc.collect()
    runtime.allocator.limit_bytes = 100
    with runtime, pytest.raises(torch.OutOfMemoryError) as error:
        torch.zeros(1000)
    assert not isinstance(error.value, DeviceOutOfMemory)


def test_a_loop_that_calls_parts_has_more_room_after_its_next_step() -> None:
    """Such a loop makes no call of the model, before which a plan is made again."""

    def by_parts(model: Any, optimizer: Any, step: int) -> None:
        model.tail(model.body(*rows(step)), model.appetite["forward"]).square().mean().backward()
        finish(optimizer)

    class Tail(nn.Linear):
        def forward(self, x: Tensor, appetite: int = 0) -> Tensor:  # type: ignore[override]
            if appetite:
                take(appetite, False)
            return super().forward(x)

    runtime, size = FakeRuntime(5), 192 * 1024
    with runtime:
        parts = Hungry()
        parts.tail = Tail(models.WIDTH, models.WIDTH)
        budget = Budget(device=size, host=HOST)
        with chunked_model(parts, device=CudaDevice(runtime), budget=budget, precision="fp32") as made:
            model, optimizer = made
            for step in range(3):
                by_parts(model, optimizer, step)
            model.appetite["forward"] = runtime.allocator.limit_bytes = 1_000_000
            with pytest.raises(torch.OutOfMemoryError):
                by_parts(model, optimizer, 3)
            model.appetite["forward"], runtime.allocator.limit_bytes = 0, 1 << 40
            optimizer.zero_grad()
            before = statistics(model)
            for step in range(4, 8):
                by_parts(model, optimizer, step)
            found = statistics(model)
            assert found.replans == before.replans + 1
            assert found.planned_passes >= before.planned_passes + 3

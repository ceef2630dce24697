"""Something raises, somewhere: what was trained so far stays as it is, and the next step is right to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import _models as models
from _cases import ADAMW, STEPS, finish, next_token, tokens
from _reference import Make, Settings
from _runs import HOST, check_same, chunked_model, managed, stand_in, tightest
from checked_device.device import CheckedDevice
from ps_core import Budget, Options
from ps_core._plan import Queue
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.find_hooks import hooks_of


class Boom(Exception):
    """What is raised on purpose."""


class Fuse:
    """Raises once, when it is lit."""

    def __init__(self) -> None:
        self.lit = False

    def burn(self, *_: Any) -> None:
        if self.lit:
            self.lit = False
            raise Boom


class Fragile(torch.autograd.Function):
    """The identity; its backward burns a fuse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.burn()
        return grad, None


class Mined(nn.Module):
    """A block that may raise in its middle, on its way forward or back."""

    def __init__(self, block: nn.Module, forward: Fuse, backward: Fuse) -> None:
        super().__init__()
        self.block, self.fuses = block, (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        self.fuses[0].burn()
        return Fragile.apply(self.block(x), self.fuses[1])


Place = Callable[[models.Language, Fuse], None]


def in_forward(model: models.Language, fuse: Fuse) -> None:
    model.blocks[1] = Mined(model.blocks[1], fuse, Fuse())


def in_backward(model: models.Language, fuse: Fuse) -> None:
    model.blocks[1] = Mined(model.blocks[1], Fuse(), fuse)


def before_a_module(model: models.Language, fuse: Fuse) -> None:
    model.blocks[2].wide.register_forward_pre_hook(fuse.burn)


def after_a_module(model: models.Language, fuse: Fuse) -> None:
    model.blocks[0].narrow.register_forward_hook(fuse.burn)


def after_the_model(model: models.Language, fuse: Fuse) -> None:
    model.register_forward_hook(fuse.burn)


def before_the_model(model: models.Language, fuse: Fuse) -> None:
    model.register_forward_pre_hook(fuse.burn)


def in_a_backward_hook(model: models.Language, fuse: Fuse) -> None:
    model.blocks[1].register_full_backward_hook(fuse.burn)


def in_a_gradient_hook(model: models.Language, fuse: Fuse) -> None:
    model.blocks[1].wide.weight.register_hook(fuse.burn)


def after_a_gradient(model: models.Language, fuse: Fuse) -> None:
    model.blocks[1].wide.weight.register_post_accumulate_grad_hook(fuse.burn)


PLACES: list[Place] = [
    *(in_forward, in_backward, before_a_module, after_a_module, before_the_model, after_the_model),
    *(in_a_backward_hook, in_a_gradient_hook, after_a_gradient),
]


def loop(place: Place, burns: tuple[int, ...], checkpointing: bool) -> Callable[[Make], list[Tensor]]:
    """Train; steps in ``burns`` are interrupted once, given up and begun again."""

    def train(make: Make) -> list[Tensor]:
        fuse, model = Fuse(), models.Language(checkpointing=checkpointing)
        place(model, fuse)
        model, optimizer = make(model, ADAMW)
        logs = []
        for index in range(STEPS):
            if index in burns:
                fuse.lit = True
                with pytest.raises(Boom):
                    optimizer.scale(next_token(model, *tokens(index + 50))).backward()
                assert not fuse.lit
                optimizer.zero_grad()
            loss = next_token(model, *tokens(index))
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs.append(loss.detach())
        return logs

    return train


@pytest.mark.parametrize(
    ("checkpointing", "precision"),
    [
        pytest.param(False, "fp32", id="kept-fp32"),
        pytest.param(True, "bf16", id="recomputed-bf16"),
        pytest.param(False, "bf16", id="kept-bf16", marks=pytest.mark.soak),
        pytest.param(True, "fp32", id="recomputed-fp32", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("place", PLACES, ids=[place.__name__ for place in PLACES])
def test_the_next_step_is_right(place: Place, checkpointing: bool, precision: str) -> None:
    """Interrupted in the first step, in one that is replayed, and in two that follow each other."""
    settings = Settings(precision=precision)
    run = loop(place, (0, 2, 3), checkpointing)

    def attempt(size: int) -> Any:
        return managed(run, settings, lambda: CheckedDevice(check=True, seed=5), Budget(device=size, host=HOST))

    _, got = tightest(attempt, rounds=2)
    check_same(loop(place, (), checkpointing), settings, got)
    assert got.evictions > 0


def under_hooks(burns: tuple[int, ...]) -> Callable[[Make], list[Tensor]]:
    """Train under a pair of saved-tensor hooks that raises in some steps as soon as backward unpacks anything.

    The sum's branch has reached the logits by then. Autograd keeps that branch until the next backward pass.
    """

    def train(make: Make) -> list[Tensor]:
        fuse, logs = Fuse(), []
        model, optimizer = make(models.Language(), ADAMW)

        def unpack(tensor: Tensor) -> Tensor:
            fuse.burn()
            return tensor

        def backward(index: int) -> Tensor:
            logits = model(tokens(index)[0]).float()
            loss = logits.sum() + logits.square().sum()
            optimizer.scale(loss).backward()
            return loss.detach()

        for index in range(STEPS):
            with saved_tensors_hooks(Tensor.detach, unpack):
                if index in burns:
                    fuse.lit = True
                    with pytest.raises(Boom):
                        backward(index + 50)
                    assert not fuse.lit
                    optimizer.zero_grad()
                logs.append(backward(index))
            finish(optimizer)
        return logs

    return train


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hooks_that_raise_before_backward_uses_a_parameter(precision: str) -> None:
    """Autograd keeps a part of the failed backward pass; that is freed before the next forward needs the memory."""
    settings = Settings(precision=precision)

    def attempt(size: int, burns: tuple[int, ...] = ()) -> Any:
        return managed(under_hooks(burns), settings, stand_in, Budget(device=size, host=HOST))

    size, _ = tightest(attempt, rounds=2)
    check_same(under_hooks(()), settings, attempt(size, (0, 2, 3)))


class BrokenLink(CheckedDevice):
    """Raises at one of its copies: the first of a queue after a number of others."""

    def __init__(self) -> None:
        super().__init__(check=True, seed=7)
        self.copies = dict.fromkeys(Queue, 0)
        self.breaks_at: tuple[Queue, int] | None = None

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        """Copy, or raise once."""
        self.copies[queue] += 1
        if self.breaks_at is not None and queue is self.breaks_at[0] and self.copies[queue] >= self.breaks_at[1]:
            self.breaks_at = None
            raise Boom
        super().copy(queue, target, source)


def broken(device: BrokenLink, queue: Queue, part: float) -> Callable[[Make], list[Tensor]]:
    """Train; in two steps a copy in the given part of those that a step makes breaks off, and what raised is redone."""

    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(), ADAMW)
        logs, before, breaks = [], 0, 0

        def passes(index: int) -> Tensor:
            loss = next_token(model, *tokens(index))
            optimizer.scale(loss).backward()
            return loss.detach()

        for index in range(STEPS):
            count, before = device.copies[queue] - before, device.copies[queue]
            if index in (2, 3):
                device.breaks_at = (queue, before + 1 + int(part * count))
            try:
                loss = passes(index)
            except Boom:
                breaks += 1
                optimizer.zero_grad()
                loss = passes(index)
            try:
                optimizer.step()
            except Boom:
                breaks += 1
                optimizer.step()
            optimizer.zero_grad()
            logs.append(loss)
        assert breaks == 2 or not device.copies[queue]
        return logs

    return train


@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("queue", [Queue.H2D, Queue.D2H])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_that_breaks_off(precision: str, queue: Queue, part: float) -> None:
    settings = Settings(precision=precision)

    def attempt(size: int) -> Any:
        device = BrokenLink()
        return device, managed(broken(device, queue, part), settings, lambda: device, Budget(device=size, host=HOST))

    _, (device, got) = tightest(attempt, rounds=2)
    assert device.copies[queue] > STEPS, "nothing was copied that could have broken off"
    check_same(broken(BrokenLink(), queue, part), settings, got)
    assert got.evictions > 0


def test_statistics_are_those_of_a_run_without_the_exception() -> None:
    """What an interrupted step leaves behind takes no memory: the tiers hold what they held before."""
    held: list[dict[str, int]] = []

    def watched(make: Make) -> list[Tensor]:
        fuse, model = Fuse(), models.Language()
        in_backward(model, fuse)
        model, optimizer = make(model, ADAMW)
        for index in range(STEPS):
            fuse.lit = index == 3
            try:
                next_token(model, *tokens(index)).backward()
            except Boom:
                optimizer.zero_grad()
                next_token(model, *tokens(index)).backward()
            finish(optimizer)
            held.append({name: tier.current_bytes for name, tier in statistics(model).tiers.items()})
        return []

    managed(
        watched, Settings(precision="bf16"), lambda: CheckedDevice(check=True, seed=5), Budget(device="1MiB", host=HOST)
    )
    assert held[2] == held[3] == held[4]


class Interrupted(nn.Module):
    """Blocks and a loss; raises once, on its way forward or back, but not on fake tensors."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = models.stack()
        self.fuses = {name: Fuse() for name in ("forward", "backward")}
        self.fuses[where].lit = True

    def forward(self, x: Tensor) -> Tensor:
        real = type(x) is Tensor
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2 and real:
                self.fuses["forward"].burn()
                x = Fragile.apply(x, self.fuses["backward"])
        return x.float().square().mean()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_fake_tensors_told_still_holds_after_a_pass_that_broke_off(where: str, accumulate: int) -> None:
    """The next pass follows the plan that was made before the first, also where there is hardly any room."""
    more: dict[str, Any] = {"accumulation_steps": accumulate, "options": Options(group_bytes=4096)}
    with chunked_model(Interrupted(where), budget=Budget(device=40_000, host=HOST), **more) as (model, optimizer):
        batch = torch.randn(4, 32)
        with pytest.raises(Boom):
            model(batch).backward()
        optimizer.zero_grad()
        told = hooks_of(model).scheduler.planned
        assert told is not None
        for _ in range(3):
            for _ in range(accumulate):
                model(batch).backward()
            optimizer.step()
        found = statistics(model)
        assert hooks_of(model).scheduler.planned is told
        assert (found.planned_passes, found.divergences) == (3 * accumulate, 1), found.last_divergence


class Guarded(nn.Sequential):
    """Lets nobody hear of state dicts that were loaded."""

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        raise Boom


def test_what_was_hung_on_before_something_failed_is_taken_off() -> None:
    model = Guarded(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(Boom):
        chunked(model, ADAMW)
    for module in model.modules():
        hung = [name for name, value in vars(module).items() if "hook" in name and isinstance(value, dict) and value]
        assert not hung, f"{type(module).__name__} still has {hung}"
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not parameter._post_accumulate_grad_hooks

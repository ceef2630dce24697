"""What people do in notebooks: run a cell again, and interrupt what takes long, at any instant."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import ADAMW, STEPS, finish, next_token, rows, square, tokens
from _reference import Make, Settings
from _runs import HOST, check_same, chunked_model, managed, stand_in, tightest
from ps_core import AlreadyManaged, Budget, DoesNotFit, InvalidInput
from ps_core.engine import chunked, materialized, release, statistics
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from test_exceptions import PLACES, Fuse, Place


@pytest.fixture(autouse=True)
def as_python_starts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Interrupt(Fuse):
    """Ctrl-C, once, when it is lit."""

    def __deepcopy__(self, memo: Any) -> Interrupt:
        return self  # there is one, also where a model that it hooks is copied for a fake pass

    def burn(self, *_: Any) -> None:
        if self.lit:
            self.lit = False
            raise KeyboardInterrupt


def interrupted(place: Place, burns: tuple[int, ...], *, checkpointing: bool) -> Any:
    """Train; steps in ``burns`` are interrupted once and begun again."""

    def train(make: Make) -> list[Tensor]:
        fuse, model = Interrupt(), models.Language(checkpointing=checkpointing)
        place(model, fuse)
        model, optimizer = make(model, ADAMW)
        logs = []
        for index in range(STEPS):
            if index in burns:
                fuse.lit = True
                with pytest.raises(KeyboardInterrupt):
                    optimizer.scale(next_token(model, *tokens(index + 50))).backward()
                assert not fuse.lit
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks stayed on"
                optimizer.zero_grad()
            loss = next_token(model, *tokens(index))
            optimizer.scale(loss).backward()
            finish(optimizer)
            logs.append(loss.detach())
        return logs

    return train


def in_little_memory(train: Any, quick: Any, settings: Settings, device: Any) -> Any:
    """Train in the smallest budget in which ``quick`` fits, or in one that is a little larger."""

    def attempt(loop: Any, size: int) -> Any:
        return managed(loop, settings, device, Budget(device=size, host=HOST))

    size, _ = tightest(partial(attempt, quick), rounds=1)
    for _ in range(8):
        try:
            return attempt(train, size)
        except DoesNotFit as error:
            size = max(size + size // 8, error.needed_bytes)
    raise AssertionError(f"{size:,} bytes are too few with interrupts")


@pytest.mark.parametrize("place", PLACES[::2], ids=[place.__name__ for place in PLACES[::2]])
def test_an_interrupted_pass_is_begun_again(place: Place) -> None:
    """Interrupted in the first step, in one that is replayed, and in two that follow each other."""
    checkpointing = place in PLACES[::4]
    settings = Settings(precision="bf16")
    run, quick = (interrupted(place, burns, checkpointing=checkpointing) for burns in ((0, 2, 3), ()))
    got = in_little_memory(run, quick, settings, stand_in)
    check_same(interrupted(place, (), checkpointing=checkpointing), settings, got)
    assert got.evictions > 0


# At any instant


class CtrlC:
    """Sends the signal when the engine's Python functions have been entered and left so many times.

    Garbage is collected before, not meanwhile: what ends with it would be counted.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> CtrlC:
        gc.collect()
        gc.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "return") and "/ps_core/engine/" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)


POINTS = 24
"""Instants within a step, spread evenly."""


def step(model: nn.Module, optimizer: Any, index: int) -> Tensor:
    loss = next_token(model, *tokens(index))
    optimizer.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def at_every_instant(points: int, steps: int = POINTS) -> Any:
    """Train; every step but the first three is interrupted somewhere, and begun again unless it had been taken."""

    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(layers=2), ADAMW)
        for index in range(2):
            step(model, optimizer, index)
        if points:
            with CtrlC(-1) as counting:
                step(model, optimizer, 2)
            events = counting.count
        else:
            step(model, optimizer, 2)
        kept = 0
        for index in range(3, 3 + steps):
            if not points:
                step(model, optimizer, index)
                continue
            before = statistics(model).steps
            with pytest.raises(KeyboardInterrupt), CtrlC(1 + (index - 3) * events // points):
                step(model, optimizer, index)
            taken = statistics(model).steps - before
            assert taken in (0, 1)
            kept += taken
            optimizer.zero_grad()
            if not taken:
                step(model, optimizer, index)
        if points:
            assert 0 < kept < points, "some came before the step was taken, some after"
        return []

    return train


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_interrupt_at_any_instant_loses_nothing(precision: str) -> None:
    settings = Settings(precision=precision)
    got = in_little_memory(at_every_instant(POINTS), at_every_instant(0, 2), settings, "emulated")
    check_same(at_every_instant(0), settings, got)
    assert got.evictions > 0


def test_a_step_is_taken_whole_or_not_at_all() -> None:
    """An interrupt in its middle comes when it is done."""
    with chunked_model(models.stack()) as (model, optimizer):
        for index in range(2):  # the first does things that no other has to
            square(model, *rows(index)).backward()
            with CtrlC(-1) as counting:
                optimizer.step()
        square(model, *rows(2)).backward()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(KeyboardInterrupt), CtrlC(counting.count // 2):
            optimizer.step()
        assert statistics(model).steps == 3
        assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_interrupt_within_materialized_leaves_a_managed_model() -> None:
    with chunked_model(models.stack()) as (model, optimizer):
        with pytest.raises(KeyboardInterrupt), materialized(model):
            raise KeyboardInterrupt
        assert all(type(parameter) is ManagedParameter for parameter in model.parameters())
        square(model, *rows(0)).backward()
        finish(optimizer)


# Running a cell again

CELL = """
torch.manual_seed(0)
model = models.Language()
seen.append([store().ledger.used_bytes for store in stores])
model, optimizer = chunked(model, ADAMW, device=device, budget=budget)
stores.append(weakref.ref(hooks_of(model).engine.store))
for index in range(3):
    next_token(model, *tokens(index)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_running_a_cell_again_releases_the_earlier_engine(device: str) -> None:
    """At once, although the name ``optimizer`` still stands for the old one, and without a collection of garbage."""
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="1MiB", host=HOST)
    names: dict[str, Any] = globals() | {"device": device, "budget": budget, "stores": [], "seen": []}
    gc.disable()
    try:
        for _ in range(3):
            exec(CELL, names)
        stores, seen = names["stores"], names["seen"]
        assert all(used == [0] * len(used) for run in seen for used in run if run), seen
        assert [len(run) for run in seen] == [0, 1, 2]
    finally:
        gc.enable()
    first = stores[0]()
    assert first is None or not first.arena._memory.numel()
    live = stores[-1]()
    assert any(live.ledger.used_bytes)


def test_the_optimizer_of_a_model_that_is_gone_says_so() -> None:
    model, optimizer = chunked(models.stack(), ADAMW, device="cpu", budget=Budget(host=HOST))
    square(model, *rows(0)).backward()
    gone = weakref.ref(model)
    del model
    assert gone() is None, "its optimizer keeps it"
    assert optimizer is not None
    before = [torch.Size(parameter.shape) for group in optimizer.param_groups for parameter in group["params"]]
    assert before
    with pytest.raises(InvalidInput, match=r"released: call chunked\(\.\.\.\) again"):
        optimizer.step()
    with pytest.raises(InvalidInput, match=r"released: call chunked\(\.\.\.\) again"):
        optimizer.param_groups[0]["params"][0].sum()


def test_parts_of_a_model_keep_the_engine() -> None:
    """Whoever holds a block may go on with it."""
    model, optimizer = chunked(models.stack(), ADAMW, device="cpu", precision="fp32", budget=Budget(host=HOST))
    block = model[0]
    del model
    assert optimizer is not None
    square(block, *rows(0)).backward()
    before = block.wide.weight.sum().item()
    optimizer.step()
    assert block.wide.weight.sum().item() != before


def test_modules_that_take_parameters_over_keep_the_engine() -> None:
    class Other(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    model, _ = chunked(nn.Sequential(nn.Linear(4, 4)), ADAMW, precision="fp32", budget=Budget(host=HOST))
    model[0] = Other(model[0])
    model[0] = Other(model[0])
    square(model, torch.ones(2, 4)).backward()
    release(model)


def test_a_cell_on_the_same_model_says_what_to_do() -> None:
    model, _ = chunked(models.stack(), ADAMW, device="cpu", budget=Budget(host=HOST))
    with pytest.raises(AlreadyManaged, match=r"release\(model\) first"):
        chunked(model, ADAMW, device="cpu", budget=Budget(host=HOST))
    store = hooks_of(model).engine.store
    release(model)
    assert not any(store.ledger.used_bytes)
    release(chunked(model, ADAMW, device="cpu", budget=Budget(host=HOST))[0])

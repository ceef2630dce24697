"""Ctrl-C at chosen instants: each is delivered once, nobody loses one, and the next step is right to the bit.

An instant is one at which Python may run a signal handler: a function's first instruction, or a C function's return.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import _models as models
from _cases import ADAMW, next_token, rows, square, tokens
from _reference import GROUP_BYTES, Make, Settings
from _runs import HOST, check_same, children, chunked_model, managed, stand_in
from ps_core import Budget, Options
from ps_core.engine import chunked, load_checkpoint, materialized, release, save_checkpoint, statistics
from ps_core.engine._devices.tensor_bytes import _PAUSE
from ps_core.engine._parameters.managed_parameter import ManagedParameter
from ps_core.engine._support.interrupts import (
    _HANDLER,
    _STATE,
    callback,
    defer_interrupts_installing,
    install,
    uninstall,
)
from ps_core.engine._support.module_call import COMPILED_CALL_ATTRIBUTE

ENGINE = "/ps_core/engine/"
BOOKS = ENGINE + "_support/interrupts.py"
POINTS = 30
"""Instants within a step, spread evenly."""


@pytest.fixture(autouse=True)
def as_python_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's own handler before and after, and no exception that goes nowhere."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: lost.append(traceback.format_tb(found.exc_traceback)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert not lost
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (_STATE.depth, _STATE.users, _STATE.put, _STATE.came) == (0, 0, set(), {})
    assert not _PAUSE.entered(), "tensors are counted again"
    assert gc.isenabled()
    signal.signal(signal.SIGINT, before)


class CtrlC:
    """Calls the handler at one instant of code in some files (or of one function of theirs).

    With ``again`` once more, so many functions later.
    """

    number = signal.SIGINT

    def __init__(self, at: int, where: str = ENGINE, *, of: str = "", again: int = 0) -> None:
        self.at, self.where, self.of, self.again = at, where, of, again
        self.count = self.later = self.sent = 0

    def __enter__(self) -> CtrlC:
        if self.again:
            sys.settrace(self._trace)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or code.co_flags & inspect.CO_GENERATOR:
            return  # a generator that is closed looks like one that is called
        if self.where in code.co_filename and self.of in ("", code.co_name):
            self.count += 1
            if self.count == self.at:
                self._send(frame)

    def _trace(self, frame: FrameType, event: str, _: object) -> None:
        """What a profiling function raises ends the profiling, so the second comes from here."""
        if self.sent and self.where in frame.f_code.co_filename:
            self.later += 1
            if self.later == self.again:
                self._send(frame)

    def _send(self, frame: FrameType) -> None:
        self.sent += 1
        handler: Any = signal.getsignal(self.number)
        handler(self.number, frame)


def count(work: Callable[[], object], where: str = ENGINE, *, of: str = "") -> int:
    gc.collect()  # what earlier tests left is not to be counted
    gc.disable()
    try:
        with CtrlC(-1, where, of=of) as counting:
            work()
    finally:
        gc.enable()
    return counting.count


def broken_off(work: Callable[[], object], at: int, where: str = ENGINE, *, of: str = "", again: int = 0) -> bool:
    """Do it, broken off once if it gets there; what came is delivered, and nothing is left waiting."""
    came, sending = False, CtrlC(at, where, of=of, again=again)
    try:
        with sending:  # inside: the second may come when the first has been raised
            work()
    except KeyboardInterrupt:
        came = True
    assert sending.sent in ((0, 1, 2) if again else (0, 1))
    assert came == bool(sending.sent), f"sent {sending.sent} of {sending.count} instants at {at}"
    if sending.sent == 2 and _STATE.came:  # the second came where an object died: the next function raises it
        with pytest.raises(KeyboardInterrupt):
            defer_interrupts_installing(gc.isenabled)()
    assert (_STATE.depth, _STATE.came) == (0, {})
    return came


def interrupted(work: Callable[[], object], at: int, where: str = ENGINE, *, of: str = "") -> None:
    """Do it, broken off."""
    assert broken_off(work, at, where, of=of)


def step(model: nn.Module, optimizer: Any, index: int) -> Tensor:
    loss = next_token(model, *tokens(index))
    optimizer.scale(loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def training(points: int, again: int = 0, limits: tuple[float, ...] = (1.0,)) -> Callable[[Make], list[Tensor]]:
    """Train; every step but the first two is broken off somewhere, and done again unless it had been taken.

    ``limits``: those of the gradients' norm, one after the other.
    """

    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(layers=2), ADAMW)
        logs = [step(model, optimizer, index) for index in range(2)]
        events = count(lambda: logs.append(step(model, optimizer, 2)))
        reached = 0
        for index in range(3, 3 + POINTS):
            optimizer.max_grad_norm = limits[index % len(limits)]
            if points:
                before, at = statistics(model).steps, 1 + (index - 3) * events // POINTS
                reached += broken_off(partial(step, model, optimizer, index), at, again=again)
                optimizer.zero_grad()
                if statistics(model).steps > before:
                    continue
            step(model, optimizer, index)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if points:
            assert reached >= POINTS - 4, "steps that wait less for the disk are shorter"
            before_it = statistics(model)
            logs.append(step(model, optimizer, 99))
            after = statistics(model)
            assert after.planned_passes == before_it.planned_passes + 1, "plans are followed as before"
            assert after.steps == before_it.steps + 1
        else:
            logs.append(step(model, optimizer, 99))
        return logs

    return train


WHERE = {
    "cpu": ("cpu", None, HOST),
    "emulated": ("emulated", 64_000, HOST),
    "cpu and disk": ("cpu", None, 100_000),
    "emulated and disk": ("emulated", 64_000, 60_000),
}
WITH_WORKER: dict[str, Any] = WHERE | {"a worker": (stand_in, 64_000, HOST)}


@pytest.mark.parametrize("again", [0, 3], ids=["once", "twice"])
@pytest.mark.parametrize("where", WITH_WORKER)
def test_a_step_broken_off_anywhere(where: str, again: int, tmp_path: Path) -> None:
    device, room, host = WITH_WORKER[where]
    below = {"disk": "64MiB", "disk_dir": str(tmp_path)} if "disk" in where else {}
    told = Settings(precision="bf16")
    got = managed(training(POINTS, again), told, device, Budget(device=room, host=host, **below))
    check_same(training(0), told, got)


@pytest.mark.parametrize("again", [0, 3], ids=["once", "twice"])
@pytest.mark.parametrize("device", ["emulated", stand_in], ids=["emulated", "a worker"])
def test_a_step_that_can_be_undone_broken_off_anywhere(device: Any, again: int) -> None:
    """Two steps are not clipped, and the third is: so its early steps are undone."""
    options = Options(poison=True, group_bytes=GROUP_BYTES, step="speculative")
    told = Settings(precision="bf16", max_grad_norm=1e9, options=options)
    loop = partial(training, limits=(1e9, 1e9, 1e-3))
    got = managed(loop(POINTS, again), told, device, Budget(device=90_000, host=HOST))
    check_same(loop(0), told, got)
    assert got.statistics[0].undone_group_steps > POINTS


# The first pass, which is traced with fake tensors and planned


class WithLoss(models.Language):
    """Returns its loss, so that it can be traced."""

    def forward(self, batch: Tensor) -> Tensor:
        logits = super().forward(batch)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def first_step(points: Callable[[int], Any], where: str) -> Callable[[Make], list[Tensor]]:
    """Train two steps, the first of which is broken off and begun again; at these instants one after the other."""

    def passes(model: nn.Module, optimizer: Any) -> Tensor:
        loss = model(*tokens(0))
        optimizer.scale(loss).backward()
        return loss.detach()

    def train(make: Make) -> list[Tensor]:
        logs = []
        model, optimizer = make(WithLoss(layers=1), ADAMW)
        events = count(lambda: passes(model, optimizer), where)
        for at in points(events):
            model, optimizer = make(WithLoss(layers=1), ADAMW)
            files, before = len(os.listdir("/proc/self/fd")), children()
            interrupted(partial(passes, model, optimizer), at, where)
            assert len(os.listdir("/proc/self/fd")) == files
            assert children() <= before
            optimizer.zero_grad()
            for _ in range(2):
                logs.append(passes(model, optimizer))
                optimizer.step()
                optimizer.zero_grad()
            assert statistics(model).moments > 0, "it was planned in the end"
        return logs

    return train


@pytest.mark.parametrize(("where", "points"), [("/_tracing/", 12), (ENGINE, 6)], ids=["the fake pass", "anywhere"])
def test_a_first_pass_broken_off(where: str, points: int) -> None:
    told, runs = Settings(precision="bf16"), []

    def some(events: int) -> Any:
        runs.append(range(1, events, events // points))
        return runs[-1]

    budget = Budget(device="256KiB", host=HOST)
    got = managed(first_step(some, where), told, "emulated", budget)
    assert len(runs[0]) >= points

    def undisturbed(make: Make) -> list[Tensor]:
        return first_step(lambda _: (), where)(make) + _plainly(make, len(runs[0]))

    check_same(undisturbed, told, got)


def _plainly(make: Make, times: int) -> list[Tensor]:
    logs = []
    for _ in range(times):
        model, optimizer = make(WithLoss(layers=1), ADAMW)
        for _ in range(2):
            loss = model(*tokens(0))
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            logs.append(loss.detach())
    return logs


class Interrupting(WithLoss):
    """Sends Ctrl-C while it runs on fake tensors, then computes on."""

    operators = 0

    def forward(self, batch: Tensor) -> Tensor:
        if isinstance(batch, FakeTensor):
            signal.raise_signal(signal.SIGINT)
            for _ in range(10):
                batch = batch + 0
                Interrupting.operators += 1
        return super().forward(batch)


def test_an_interrupt_ends_the_fake_pass_at_an_operator() -> None:
    """Not within the mode's own code, which C++ calls where it can raise nothing."""
    with chunked_model(Interrupting(), budget=Budget(device="256KiB", host=HOST)) as (model, _):
        with pytest.raises(KeyboardInterrupt):
            model(*tokens(0))
        assert Interrupting.operators == 0
        assert statistics(model).planned_passes == 0


def test_a_handler_that_raises_nothing_costs_the_fake_pass_only(caplog: pytest.LogCaptureFixture) -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        with chunked_model(Interrupting(), budget=Budget(device="256KiB", host=HOST)) as (model, _):
            with caplog.at_level("INFO", "ps_core"):
                model(*tokens(0)).backward()
            assert "an interrupt came (Ctrl-C)" in caplog.text
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert came == [signal.SIGINT]


# Elsewhere


def test_where_an_object_dies_an_interrupt_waits() -> None:
    """The pass is recorded, so deaths of tensors are counted, by functions whose exceptions Python only prints."""
    with chunked_model(models.Language(layers=1), budget=Budget(device="256KiB", host=HOST)) as (model, optimizer):

        def passes() -> None:
            next_token(model, *tokens(0)).backward()

        deaths = count(passes, of="_died")
        assert deaths > 10
        for at in (1, deaths // 2):
            optimizer.zero_grad()
            interrupted(passes, at, of="_died")
        optimizer.zero_grad()
        passes()
        optimizer.step()
        assert statistics(model).steps == 1


@pytest.mark.parametrize("write", [False, True])
def test_materialized_gives_parameters_back_wherever_it_is_broken_off(write: bool) -> None:
    with chunked_model(models.stack(1)) as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def within() -> None:
            with materialized(model, write=write):
                pass

        events = count(within)
        for at in range(1, events, max(1, events // 40)):
            interrupted(within, at)
            assert all(type(parameter) is ManagedParameter for parameter in model.parameters())
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        square(model, *rows(0)).backward()
        optimizer.step()
        assert statistics(model).steps == 1


def test_a_pass_within_another_leaves_the_handler() -> None:
    with (
        chunked_model(models.stack(2)) as (student, optimizer),
        chunked_model(models.stack(1), spec=None) as (teacher, _),
    ):
        out = student(*rows(0))
        with torch.no_grad():
            teacher(*rows(0))
        assert signal.getsignal(signal.SIGINT) == _HANDLER, "the student's pass is still on"
        out.square().mean().backward()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        optimizer.step()


def test_an_interrupt_that_waits_comes_with_the_next_one() -> None:
    """What came within a callback waits; if another comes before that is over, it is one interrupt and not two."""

    @callback
    def dies() -> None:
        _STATE.handle(signal.SIGINT, sys._getframe())

    install()
    try:
        dies()
        assert len(_STATE.came) == 1
        with pytest.raises(KeyboardInterrupt):
            _STATE.handle(signal.SIGINT, sys._getframe())
        assert not _STATE.came
    finally:
        uninstall()


def test_an_interrupt_while_the_handler_is_put_in_leaves_nobody_waiting() -> None:
    done: list[int] = []
    work = defer_interrupts_installing(lambda: done.append(1))
    instants = count(work, BOOKS)
    assert instants >= 4
    for at in range(1, 1 + instants):
        interrupted(work, at, BOOKS)
        work()  # takes a handler out that an interrupt left in
        assert (_STATE.depth, _STATE.users, _STATE.put) == (0, 0, set())
    for at in range(1, 1 + count(install, BOOKS)):
        uninstall()
        interrupted(install, at, BOOKS)
        assert _STATE.users == 0
        install()
    uninstall()


@pytest.mark.parametrize("what", ["state_dict", "load_state_dict", "optimizer", "save", "load"])
@pytest.mark.parametrize("where", ["cpu", "emulated and disk"])
def test_what_is_done_between_steps_broken_off_anywhere(what: str, where: str, tmp_path: Path) -> None:
    """It can be done again, and whatever else, with the same outcome."""
    device, room, host = WHERE[where]
    below = {"disk": "64MiB", "disk_dir": str(tmp_path)} if "disk" in where else {}
    model, optimizer = chunked(models.stack(2), ADAMW, device=device, budget=Budget(device=room, host=host, **below))
    assert optimizer is not None
    square(model, *rows(0)).backward()
    optimizer.step()
    path = tmp_path / "checkpoint"
    save_checkpoint(path, model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    load = partial(load_checkpoint, path, model, optimizer)
    work: Callable[[], object] = {
        "state_dict": model.state_dict,
        "load_state_dict": partial(model.load_state_dict, weights),
        "optimizer": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        "save": partial(save_checkpoint, path, model, optimizer, overwrite=True),
        "load": load,
    }[what]
    events = count(work)
    for at in range(1, 1 + events, max(1, events // (POINTS // 2))):
        broken_off(work, at)
        if what != "save":
            load()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(found[at][name], states["state"][at][name]) for at in found for name in found[at])
    interrupted(partial(release, model), 1, "_execution/hooks.py", of="remove")
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, weights[name])


@pytest.mark.parametrize("where", WHERE)
def test_chunked_broken_off_anywhere_leaves_the_model_as_it_was(where: str, tmp_path: Path) -> None:
    device, room, host = WHERE[where]
    below = {"disk": "64MiB", "disk_dir": str(tmp_path)} if "disk" in where else {}

    def manage(model: nn.Module) -> None:
        chunked(model, ADAMW, device=device, budget=Budget(device=room, host=host, **below), precision="fp32")

    def check(model: nn.Module, before: dict[str, Tensor]) -> None:
        for module in model.modules():
            assert not module._state_dict_hooks
            assert not module._state_dict_pre_hooks
            assert COMPILED_CALL_ATTRIBUTE not in vars(module)
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter
            assert torch.equal(parameter, before[name])
            assert not parameter._post_accumulate_grad_hooks
            assert not parameter._backward_hooks

    manage(models.stack(2))
    model = models.stack(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    events = count(lambda: manage(model))
    release(model)
    files = len(os.listdir("/proc/self/fd"))
    for at in range(1, 1 + events, max(1, events // POINTS)):
        broken_off(partial(manage, model), at)
        if any(type(parameter) is ManagedParameter for parameter in model.parameters()):
            release(model)  # it came when all was done
        check(model, before)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(tmp_path.iterdir())


def test_one_interrupt_amid_chunked_is_one() -> None:
    def manage() -> None:
        with chunked_model(models.stack(), device="cpu", budget=Budget(host=HOST)):
            pass

    for at in range(1, 1 + count(manage, of="_install"), 3):
        interrupted(manage, at, of="_install")
        interrupted(manage, 1, of="reserve_homes")  # and the next comes too

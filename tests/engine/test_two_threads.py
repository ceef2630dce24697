"""Threads within one model's pass: backward on threads of its own, and two threads at once, which is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import finish, next_token, rows, square, tokens
from _fake_cuda import FakeRuntime
from _reference import Make, Settings, differences, plain
from _runs import HOST, chunked_model, managed
from ps_core import SGD, Budget, InvalidInput, Trace
from ps_core.engine import materialized
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._tracing import fake_isolation
from ps_core.engine._tracing.fake_trace import trace

WAIT_S = 60


def on_a_thread(function: Callable[[], Any]) -> Any:
    """Call a function on a new thread."""
    with ThreadPoolExecutor(1, "other") as pool:
        return pool.submit(function).result()


def language(make: Make, *, where: str = "backward", micro_batches: int = 2) -> list[Tensor]:
    """A training of which a part runs on a new thread each time; ``where``: backward, forward or step."""

    def run(part: str, function: Callable[[], Any]) -> Any:
        return on_a_thread(function) if part in where else function()

    model, optimizer = make(models.Language(tied=True, checkpointing=True), SGD(lr=0.2, momentum=0.9))
    logs = []
    for index in range(4):
        for micro in range(micro_batches):
            loss = run("forward", partial(next_token, model, *tokens(10 * index + micro)))
            run("backward", optimizer.scale(loss).backward)
            logs.append(loss.detach())
        run("step", partial(finish, optimizer))
        with torch.no_grad():
            logs.append(next_token(model, *tokens(99)))
    return logs


@pytest.mark.parametrize("where", ["backward", "forward", "forward backward step"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "emulated", "played CUDA", "played CUDA, no thread of its own"])
def test_parts_of_a_step_on_threads_of_their_own(device: str, micro_batches: int, where: str) -> None:
    """On the played device a backward pass comes from a thread of the caller's, and runs on the device's."""
    settings = Settings(precision="bf16", accumulation_steps=micro_batches)
    loop = partial(language, where=where, micro_batches=micro_batches)
    budget = Budget(host=HOST) if device == "cpu" else Budget(device="96KiB", host=HOST)
    runtime = FakeRuntime(1, device_thread="own" not in device)
    played: Any = partial(CudaDevice, runtime) if "CUDA" in device else device
    with runtime:
        got = managed(loop, settings, played, budget)
    assert not differences(plain(loop, settings), got)
    assert got.statistics[0].divergences == 0
    assert got.statistics[0].planned_passes > 0


class Held(nn.Module):
    """Waits within forward or backward, where it is told to, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.stack()
        self.where = ""
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied: the first pass runs on demand")

    def wait(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            self.begun.set()
            assert self.may_go_on.wait(WAIT_S)

    def forward(self, x: Tensor) -> Tensor:
        self.wait("forward")
        return Wait.apply(self.body(x), self)


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Held) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.module.body(gradient)  # so the engine has work in this pass by now
        ctx.module.wait("backward")
        return gradient, None


@contextmanager
def held_in(model: Any, where: str, work: Callable[[], Any]) -> Iterator[None]:
    """Within the block a thread called "first" does some work, and waits where the model does."""
    model.begun.clear()
    model.may_go_on.clear()
    model.where = where
    with ThreadPoolExecutor(1, "first") as pool:
        done = pool.submit(work)
        try:
            assert model.begun.wait(WAIT_S)
            yield
        finally:
            model.may_go_on.set()
        done.result()


DEVICES = ["cpu", "emulated", "played CUDA"]


@contextmanager
def held_model(device: str) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(4)
    model = Held()
    with FakeRuntime(2) if device == "played CUDA" else nullcontext() as runtime:
        played: Any = CudaDevice(runtime) if runtime else device
        budget = Budget(host=HOST) if device == "cpu" else Budget(device="1MiB", host=HOST)
        with chunked_model(model, device=played, budget=budget) as made:
            yield made


def train(device: str, intrude: Callable[[Any, Any, int], None]) -> list[Tensor]:
    """Make a model and train it."""
    with held_model(device) as (model, optimizer):
        return four_steps(model, optimizer, intrude)


def four_steps(model: Any, optimizer: Any, intrude: Callable[[Any, Any, int], None] = lambda *_: None) -> list[Tensor]:
    """Return the losses of four steps, and the weights after them."""
    logs = []
    for index in range(4):
        intrude(model, optimizer, index)
        loss = square(model, *rows(index))
        loss.backward()
        finish(optimizer)
        logs.append(loss.detach())
    return logs + [each.clone() for each in model.state_dict().values()]


INTRUDERS: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "forward": lambda model, _, __: model(*rows(8)),
    "backward": lambda _, __, loss: loss.backward(retain_graph=True),
    "a part's forward": lambda model, _, __: model.body[0](rows(8)[0].bfloat16()),
    "step": lambda _, optimizer, __: optimizer.step(),
    "state dict": lambda model, _, __: model.state_dict(),
    "materialized": lambda model, _, __: materialized(model).__enter__(),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("intruder", INTRUDERS)
def test_a_second_thread_in_one_pass_is_refused_by_name(intruder: str, where: str, device: str) -> None:
    """The first goes on as if nothing had happened."""

    if (intruder, where, device) == ("backward", "backward", "played CUDA"):
        pytest.skip("the device's only thread is held, so a second backward pass does not get there")
    within = "autograd" if device == "played CUDA" and where == "backward" else "first"
    said = rf"in thread '[^']*' while thread '{within}.*' is in {where} of the same model"

    def steps(model: Any, index: int) -> tuple[Tensor, Callable[[], None]]:
        square(model, *rows(4)).backward()  # so that there is something to step with
        earlier = square(model, *rows(5))

        def work() -> None:
            loss = square(model, *rows(6))
            if where == "backward":
                loss.backward()

        return earlier, work

    def intrude(model: Any, optimizer: Any, index: int) -> None:
        earlier, work = steps(model, index)
        with held_in(model, where, work):
            if index > 0:  # the first time nothing comes
                with pytest.raises(InvalidInput, match=said):
                    INTRUDERS[intruder](model, optimizer, earlier)

    def undisturbed(model: Any, optimizer: Any, index: int) -> None:
        _, work = steps(model, index)
        work()

    got, expected = train(device, intrude), train(device, undisturbed)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_two_models_may_train_on_two_threads(device: str) -> None:
    """Both are made before, since PyTorch's random state is the whole process's: a first pass restores it."""
    expected = train(device, lambda *_: None)
    with ExitStack() as made, ThreadPoolExecutor(2) as pool:
        pairs = [made.enter_context(held_model(device)) for _ in range(2)]
        for got in [pool.submit(four_steps, *pair) for pair in pairs]:
            assert all(torch.equal(one, other) for one, other in zip(got.result(), expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_that_fails_leaves_its_thread(device: str) -> None:
    """Another thread may go on at once, although autograd reports no end."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("mine")

    with held_model(device) as (model, optimizer):
        for index in range(4):
            x = rows(index)[0].requires_grad_()
            x.register_hook(fail)
            with pytest.raises(RuntimeError, match="mine") as error:
                on_a_thread(square(model, x).backward)
            optimizer.zero_grad()
            square(model, *rows(index)).backward()
            finish(optimizer)
            del error


def test_one_fake_pass_runs_at_a_time() -> None:
    """Modes that two threads leave in the order in which they entered turn ``torch.compile`` off for good."""
    alone = threading.Lock()

    class Alone(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with acquired(alone):
                time.sleep(0.05)
                return super().forward(x).sum()

    def run(_: int) -> Trace:
        return trace(Alone(2, 2), torch.ones(1, 2))

    with ThreadPoolExecutor(4) as pool:
        assert all(len(each.moments) == 2 for each in pool.map(run, range(4)))


def test_a_model_that_waits_for_the_first_pass_of_another_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one gives up its estimate, and runs on demand."""
    monkeypatch.setattr(fake_isolation, "WAIT_S", 0.1)
    told: list[float] = []

    class Judged(nn.Module):
        def __init__(self, judge: Callable[[], Tensor] | None) -> None:
            super().__init__()
            self.layers, self.judge = models.stack(4), judge

        def forward(self, x: Tensor) -> Tensor:
            if self.judge is not None:
                told.append(on_a_thread(self.judge).item())
            return self.layers(x).square().mean()

    with chunked_model(Judged(None), budget=Budget(device="200KiB", host=HOST)) as (judge, _):
        asked = partial(judge, *rows(1))
        with chunked_model(Judged(asked), budget=Budget(device="200KiB", host=HOST)) as (model, optimizer):
            model(*rows(0)).backward()
            finish(optimizer)
    assert len(set(told)) == 1


def test_a_process_forked_amid_another_threads_fake_pass_runs_its_own() -> None:
    inside, over = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert over.wait(WAIT_S)
            return super().forward(x).sum()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trace, Slow(2, 2), torch.ones(1, 2))
        assert inside.wait(WAIT_S)
        child = os.fork()
        if not child:
            signal.alarm(WAIT_S)  # ends it where it waits for ever
            over.set()
            os._exit(len(trace(Slow(2, 2), torch.ones(1, 2)).moments))
        over.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        running.result()


@contextmanager
def acquired(lock: threading.Lock) -> Iterator[None]:
    assert lock.acquire(blocking=False), "another thread is in a fake pass"
    try:
        yield
    finally:
        lock.release()

"""The worker's thread: by itself, and under a model that trains while the thread is late."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _reference import Make, Settings, differences, plain
from _runs import HOST, let_go, managed
from ps_core import SGD, AdamW, Budget, InvalidInput, Options
from ps_core.engine import chunked, load_checkpoint, release, save_checkpoint, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.host_worker import HostWorker, WorkDone


def nothing() -> None:
    """Prepare nothing."""


class Gate:
    """An event that a thread waits for."""

    queue = None

    def __init__(self) -> None:
        self.opened = threading.Event()

    def block(self) -> None:
        self.opened.wait(30)


class LateWorker(HostWorker):
    """Its thread sleeps at random before it works."""

    def __init__(self, seed: int) -> None:
        super().__init__(nothing)
        self._random = Random(seed)
        self.launched: list[str] = []
        self.late = 0
        """How often the host thread went on while work was not over."""

    def launch(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], object]
    ) -> WorkDone:
        self.launched.append(what)
        self.late += self.busy
        pause = self._random.choice((0.0, 0.0, 0.002))

        def late() -> None:
            time.sleep(pause)
            work()

        return super().launch(what, reads, writes, late)


def late_device(runtime: FakeRuntime, seed: int) -> CudaDevice:
    device = CudaDevice(runtime)
    device._worker = LateWorker(seed)
    return device


# ---- the thread ----


def test_work_is_done_in_order_beside_the_host_thread() -> None:
    worker, gate, done = HostWorker(nothing), Gate(), []
    first = worker.launch("first", (), (), partial(done.append, 1))
    first.block()
    worker.wait(gate)
    second = worker.launch("second", (), (), partial(done.append, 2))
    third = worker.launch("third", (), (), partial(done.append, threading.current_thread))
    assert (done, second.done, third.done, worker.busy) == ([1], False, False, True)
    gate.opened.set()
    worker.synchronize()
    assert done == [1, 2, threading.current_thread]
    assert second.done
    assert not worker.busy
    worker.close()
    worker.close()


def test_what_comes_behind_a_failure_is_dropped_and_every_wait_raises_it() -> None:
    worker, gate, done = HostWorker(nothing), Gate(), []
    worker.wait(gate)
    worker.launch("fails", (), (), partial(int, "x"))
    after = worker.launch("after", (), (), partial(done.append, 1))
    gate.opened.set()
    for wait in (after.block, worker.synchronize, worker.synchronize):
        with pytest.raises(RuntimeError, match=r"mixture of old and new.*ValueError"):
            wait()
    assert worker.busy, "who asks hears of it"
    after.wait()  # other threads only wait
    assert done == []
    worker.close()


def test_a_thread_that_cannot_be_prepared_is_a_failure_too() -> None:
    worker, done = HostWorker(partial(int, "x")), []
    event = worker.launch("work", (), (), partial(done.append, 1))
    with pytest.raises(RuntimeError, match=r"mixture of old and new.*ValueError"):
        event.block()
    assert done == []
    worker.close()


def test_its_memory_and_its_thread_end_with_it() -> None:
    worker, tensor = HostWorker(nothing), torch.zeros(1)
    gone = weakref.ref(tensor)
    worker.launch("adds", (), (), partial(tensor.add_, 1)).block()
    thread = worker._thread
    assert thread is not None
    del tensor
    assert gone() is None, "work that is over keeps nothing"
    del worker
    thread.join(30)
    assert not thread.is_alive()


def test_no_gradients_are_recorded() -> None:
    worker, weight = HostWorker(nothing), torch.zeros(1, requires_grad=True)
    worker.launch("adds", (), (), partial(weight.add_, 1)).block()
    assert weight.item() == 1
    worker.close()


def test_its_operators_and_kernels_use_the_number_of_threads_of_the_thread_that_launches() -> None:
    """As set last: PyTorch's number is each thread's own, and the worker began with an earlier one."""
    worker, found, before = HostWorker(nothing), list[int](), torch.get_num_threads()
    try:
        for count in (2, 1, 3, 3):
            torch.set_num_threads(count)
            worker.launch("asks", (), (), lambda: found.append(torch.get_num_threads())).block()
        assert found == [2, 1, 3, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
        worker.close()


# ---- training ----


def plain_steps(make: Make, *, steps: int = 5, micro_batches: int = 1) -> list[Tensor]:
    """Nothing is read between two steps, so that the next pass begins at once."""
    model, optimizer = make(models.Language(tied=True, checkpointing=True), AdamW(lr=0.01))
    logs = []
    for index in range(steps):
        for micro in range(micro_batches):
            loss = next_token(model, *tokens(100 * index + micro))
            optimizer.scale(loss).backward()
            logs.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return logs


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("precision", "micro_batches"), [("bf16", 1), ("fp16", 1), ("bf16", 3), ("fp32", 2)])
def test_the_same_bits_however_late_it_is(precision: str, micro_batches: int, seed: int) -> None:
    settings = Settings(precision=precision, accumulation_steps=micro_batches, max_grad_norm=0.5)
    loop = partial(plain_steps, micro_batches=micro_batches)
    devices: list[Any] = []

    def device() -> CudaDevice:
        devices.append(late_device(runtime, seed))
        return devices[-1]

    size = "144KiB" if precision == "fp32" else "72KiB"
    runtime = FakeRuntime(seed)
    with runtime:
        got = managed(loop, settings, device, Budget(device=size, host=HOST))
    assert not differences(plain(loop, settings), got)
    assert got.statistics[0].divergences == 0
    (worker,) = [each._worker for each in devices]
    assert worker.late > 0
    kinds = {what.split(" of ")[0] for what in worker.launched}
    assert "step" in kinds
    assert ("sum" in kinds) is (precision == "fp32" or micro_batches > 1)


def interrupted_by_evaluation(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        next_token(model, *tokens(7))


def interrupted_by_state_dict(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def interrupted_by_optimizer_state(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict(masters=True))


def interrupted_by_exception(model: Any, optimizer: Any) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("in backward")

    loss = next_token(model, *tokens(8))
    loss.register_hook(fail)
    with pytest.raises(KeyError, match="in backward"):
        loss.backward()


def interrupted_by_checkpoint(model: Any, optimizer: Any) -> None:
    with TemporaryDirectory() as folder:
        optimizer.zero_grad()
        save_checkpoint(f"{folder}/it", model, optimizer)
        next_token(model, *tokens(6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        load_checkpoint(f"{folder}/it", model, optimizer)


@contextmanager
def language(*, late: bool, group_bytes: int | None = None) -> Iterator[tuple[Any, Any, Any]]:
    """Make a language model, its optimizer and device: the CPU, or a played card whose worker is ``late``."""
    torch.manual_seed(0)
    with FakeRuntime(1) as runtime:
        device: Any = late_device(runtime, 3) if late else "cpu"
        budget, options = Budget(device="72KiB" if late else None, host=HOST), Options(group_bytes=group_bytes)
        told: dict[str, Any] = {"device": device, "precision": "bf16", "budget": budget, "options": options}
        yield *chunked(models.Language(), SGD(lr=0.1), **told), device


@pytest.mark.parametrize(
    "between",
    [
        interrupted_by_evaluation,
        interrupted_by_state_dict,
        interrupted_by_optimizer_state,
        interrupted_by_exception,
        interrupted_by_checkpoint,
    ],
)
def test_what_comes_between_sees_a_finished_step(between: Callable[[Any, Any], None]) -> None:
    """Right behind the step, while the thread works."""
    found = []
    for late in (False, True):
        with language(late=late, group_bytes=4096) as (model, optimizer, _):
            logs = []
            for index in range(4):
                loss = next_token(model, *tokens(index))
                loss.backward()
                logs.append(loss.detach())
                optimizer.step()
                between(model, optimizer)
                optimizer.zero_grad()
            logs += [value.clone() for value in model.state_dict().values()]
            if late:
                assert statistics(model).evictions > 0
            let_go(model)
        found.append(logs)
    assert all(map(torch.equal, *found))


def test_release_right_behind_a_step_sees_a_finished_one() -> None:
    found = []
    for late in (False, True):
        with language(late=late) as (model, optimizer, device):
            for index in range(4):
                next_token(model, *tokens(index)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not late or device.worker.busy
            release(model)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_passes_without_work_for_the_thread_need_no_new_events() -> None:
    runtime = FakeRuntime(1)
    with runtime:
        model, _ = chunked(
            models.Language(), None, device=CudaDevice(runtime), budget=Budget(device="72KiB", host=HOST)
        )
        made = []
        for index in range(8):
            with torch.no_grad():
                next_token(model, *tokens(index))
            made.append(runtime.events)
        assert statistics(model).planned_passes > 4
        let_go(model)
    assert made[3] == made[-1]


def test_a_model_that_is_dropped_ends_the_thread() -> None:
    runtime = FakeRuntime(1)
    with runtime:
        device = late_device(runtime, 3)
        model, optimizer = chunked(
            models.Language(), SGD(lr=0.1), device=device, precision="bf16", budget=Budget(device="72KiB", host=HOST)
        )
        for index in range(3):
            next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        thread: Any = device._worker._thread
        assert thread.is_alive()
        del model, optimizer, device
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()


def test_a_model_may_be_freed_on_its_own_worker() -> None:
    """As by the garbage collector, whose thread nobody chooses."""
    runtime = FakeRuntime(1)
    with runtime:
        device = late_device(runtime, 3)
        model, optimizer = chunked(
            models.Language(), SGD(lr=0.1), device=device, precision="bf16", budget=Budget(device="72KiB", host=HOST)
        )
        model.blocks[0].parents = [model]
        for index in range(3):
            next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        worker: Any = device._worker
        thread = worker._thread
        del model, optimizer, device
        worker.launch("collect", (), (), gc.collect)
        thread.join(30)
        assert not thread.is_alive()


def test_after_a_failure_a_dropped_model_gives_its_memory_back() -> None:
    runtime = FakeRuntime(1)
    with runtime:
        device = late_device(runtime, 3)
        model, _ = chunked(
            models.Language(), SGD(lr=0.1), device=device, precision="bf16", budget=Budget(device="72KiB", host=HOST)
        )
        worker: Any = device._worker
        worker.launch("fails", (), (), partial(int, "x"))
        with pytest.raises(RuntimeError, match="mixture of old and new"):
            model.state_dict()
        thread = worker._thread
        del model, device
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_a_failure_release_gives_plain_parameters_and_says_what_they_are(precision: str) -> None:
    """Each element is one from before the step or from after it, and none is a gradient that lay in its place."""
    found: list[dict[str, Tensor]] = []
    for fails in (False, True):
        runtime = FakeRuntime(1)
        with runtime:
            device = late_device(runtime, 3)
            torch.manual_seed(0)
            model, optimizer = chunked(
                models.Language(), SGD(lr=0.1), device=device, precision=precision,
                budget=Budget(device="96KiB" if precision == "bf16" else "224KiB", host=HOST),
            )  # fmt: skip
            for index in range(3):
                next_token(model, *tokens(index)).backward()
                if index == 2:
                    found.append({name: value.clone() for name, value in model.state_dict().items()})
                    if fails:
                        device._worker.launch("fails", (), (), partial(int, "x"))
                with contextlib.suppress(RuntimeError):
                    optimizer.step()
            if fails:
                with pytest.raises(RuntimeError, match="mixture of old and new"):
                    next_token(model, *tokens(9))
                with pytest.warns(UserWarning, match=r"release\(model\).*mixture of old and new.*ValueError"):
                    release(model)
            else:
                release(model)
        found.append(model.state_dict())
    before, after, _, left = found
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    for name, value in left.items():
        assert torch.all((value == before[name]) | (value == after[name])), name
    assert not all(torch.equal(value, after[name]) for name, value in left.items())


def test_a_forked_process_does_not_wait_for_a_thread_that_it_has_not() -> None:
    worker, gate = HostWorker(nothing), Gate()
    worker.wait(gate)
    event = worker.launch("waits", (), (), nothing)
    child = os.fork()
    if child == 0:
        try:
            event.block()
        except InvalidInput as error:
            os._exit(17 if "was forked from" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    gate.opened.set()
    worker.close()

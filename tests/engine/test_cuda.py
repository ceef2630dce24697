"""The CUDA device on a runtime that the CPU plays: the real engine, with copies that lag and memory that runs out."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _models as models
from _cases import CASES, finish, next_token, rows, square, tokens
from _fake_cuda import FakeEvent, FakeRuntime, FakeStream
from _reference import Make, Settings, differences, plain
from _runs import HOST, check_same, chunked_model, managed, tightest
from ps_core import SGD, AdamW, Budget, InvalidInput, Options
from ps_core._plan import Queue
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.cuda.device import CudaDevice, cuda_device
from ps_core.engine._devices.cuda.memory import AllocatorBytesTracker
from ps_core.engine._devices.disk.file import DiskFile
from ps_core.engine._memory.tier_store import Arena
from ps_core.engine._parameters.unmanaged import move_unmanaged
from ps_kernels import PinnedArena

CASE = {each.name: each for each in CASES}
NAMES = ("tied", "lstm", "frozen", "mixed_dtypes", "two_forwards", "detached_weight", "evaluation_before_step")


def check_on_the_fake(loop: Any, settings: Settings, seed: int) -> tuple[FakeRuntime, Any]:
    """Under the tightest budget, with everything that is freed poisoned."""
    runtimes: list[FakeRuntime] = []

    def attempt(size: int) -> Any:
        runtimes.append(FakeRuntime(seed, device_thread=seed != 2))  # with one seed backward runs where it is called
        with runtimes[-1]:
            return managed(loop, settings, lambda: CudaDevice(runtimes[-1]), Budget(device=size, host=HOST))

    size, got = tightest(attempt, rounds=1)
    check_same(loop, settings, got)
    assert got.evictions > 0, f"nothing was ever evicted under {size:,} bytes"
    return runtimes[-1], got


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_as_in_plain_pytorch(name: str, seed: int) -> None:
    case = CASE[name]
    precision = ("bf16", "fp16")[seed - 1]
    check_on_the_fake(case.run, Settings(precision=precision, max_grad_norm=0.5, options=case.options), seed)


def language(make: Make, *, steps: int = 4, micro_batches: int = 1, checkpointing: bool = True) -> list[Tensor]:
    model, optimizer = make(models.Language(tied=True, checkpointing=checkpointing), SGD(lr=0.2, momentum=0.9))
    logs = []
    for index in range(steps):
        for micro in range(micro_batches):
            loss = next_token(model, *tokens(100 * index + micro))
            optimizer.scale(loss).backward()
            logs.append(loss.detach())
        finish(optimizer)
        logs.append(torch.tensor(optimizer.last_norm))
    return logs


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_and_recomputation(precision: str, micro_batches: int) -> None:
    settings = Settings(precision=precision, accumulation_steps=micro_batches)
    check_on_the_fake(partial(language, micro_batches=micro_batches), settings, 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_a_disk_below(precision: str, tmp_path: Path) -> None:
    settings = Settings(precision=precision)
    plain_one = plain(language, settings)
    for seed in (1, 2):
        runtime = FakeRuntime(seed)
        budget = Budget(device="192KiB", host="144KiB", disk="4MiB", disk_dir=str(tmp_path))
        with runtime:
            got = managed(language, settings, partial(CudaDevice, runtime), budget)
        assert not differences(plain_one, got)
        (counted,) = got.statistics
        assert min(counted.moved_bytes[link] for link in ("disk->host", "host->disk", "host->device")) > 0


def test_threads_that_may_call_cuda_use_the_devices_own_card(tmp_path: Path) -> None:
    """A new thread would use the first card, and take memory there."""
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    device.attach(DiskFile(str(tmp_path)))
    device.worker.launch("nothing", (), (), lambda: None).block()
    memory = device.host(4096)
    device.write(device._disk._attached[0].reserve(4096), 0, memory)  # type: ignore[index]
    device.synchronize()
    names = {thread.name for thread in device._disk.streams._threads}
    assert len(names) == 6
    device.close()
    assert runtime.adopted == names | {"ps_core worker"}


def test_without_waiting_results_are_wrong() -> None:
    """So the runtime that is played here does show a wait that is left out."""
    settings = Settings(precision="bf16")
    wrong = 0
    for seed in range(3):
        runtime = FakeRuntime(seed, deaf=True)
        with runtime:
            got = managed(language, settings, partial(CudaDevice, runtime), Budget(device="64KiB", host=HOST))
        wrong += bool(differences(plain(language, settings), got))
    assert wrong == 3


def test_the_first_pass_is_foreseen_although_cuda_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(precision="bf16")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    runtime = FakeRuntime(5)
    with runtime:
        got = managed(with_loss, settings, partial(CudaDevice, runtime), Budget(device="96KiB", host=HOST))
    assert not differences(plain(with_loss, settings), got)
    assert got.statistics[0].planned_passes == 4, "the first of them by a plan from fake tensors"


class WithLoss(models.Language):
    """A model that returns its loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token(super().forward, tokens)


def with_loss(make: Make) -> list[Tensor]:
    model, optimizer = make(WithLoss(tied=True), SGD(lr=0.2, momentum=0.9))
    logs = []
    for index in range(4):
        loss = model(*tokens(100 * index))
        loss.backward()
        logs.append(loss.detach())
        finish(optimizer)
    return logs


def test_events_and_host_memory_are_used_again() -> None:
    runtime = FakeRuntime(4)
    with runtime:
        model, optimizer = chunked(
            models.Language(tied=True), AdamW(), device=CudaDevice(runtime), accumulation_steps=2,
            budget=Budget(device="96KiB", host=HOST), options=Options(group_bytes=2048),
        )  # fmt: skip
        counts = []
        for index in range(24):
            for _ in range(2):
                next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append((runtime.events, runtime.hosts))
        assert statistics(model).planned_passes >= 46, "gradients are staged in host memory by plan"
    events, hosts = (last - first for first, last in zip(counts[3], counts[-1], strict=True))
    assert events < 10, "how many are in use at once depends on the worker's thread, but not on the number of steps"
    assert hosts < 10
    assert counts[-1][0] < 400


class Poor(FakeRuntime):
    """The computer gives no more host memory once it is ``spent``."""

    spent = True

    def host(self, size_bytes: int, *, pin: bool) -> PinnedArena:
        return super().host(2**60 if self.spent else size_bytes, pin=pin)


def test_host_memory_that_the_computer_does_not_give_is_the_budgets() -> None:
    runtime, model, budget = Poor(), models.Language(tied=True), Budget(device="96KiB", host=HOST)
    with runtime:
        with pytest.raises(
            InvalidInput,
            match=r"^Budget\.host: cannot allocate [\d,]+ bytes of host memory \(.*\); expected a smaller "
            r"Budget\(host=\.\.\.\)$",
        ):
            chunked(model, AdamW(), device=CudaDevice(runtime), budget=budget, options=Options(group_bytes=2048))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        runtime.spent = False
        chunked(model, AdamW(), device=CudaDevice(runtime), budget=budget, options=Options(group_bytes=2048))
        next_token(model, *tokens(0)).backward()
        release(model)


def test_a_stream_that_the_user_changes_waits_for_the_one_before() -> None:
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    other = runtime.stream()
    order: list[str] = []
    device.declare_access(Queue.COMPUTE, "before", (), ())
    runtime.compute.todo.append(lambda: order.append("old"))  # something slow
    with runtime.using(other):
        device.declare_access(Queue.COMPUTE, "after", (), ())
        other.launch(lambda: order.append("new"))
    other.catch_up(other.end)
    assert order == ["old", "new"]
    with runtime.using(other):
        before = other.end
        device.declare_access(Queue.COMPUTE, "again", (), ())
    assert other.end == before, "the stream is no other than before"


def test_an_event_covers_what_its_stream_waited_for() -> None:
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    source, middle, target = torch.arange(8.0), torch.zeros(8), torch.zeros(8)
    device.copy(Queue.H2D, middle, source)
    device.wait(Queue.D2H, device.record(Queue.H2D))
    first = device.record(Queue.D2H)
    device.copy(Queue.D2H, target, middle)
    device.wait(Queue.CPU, first)
    assert torch.equal(middle, source)
    device.wait(Queue.CPU, device.record(Queue.D2H))
    assert torch.equal(target, source)
    assert device.record(Queue.D2H) is device.record(Queue.D2H), "nothing was launched between"
    device.wait(Queue.H2D, device.record(Queue.CPU))
    with pytest.raises(InvalidInput, match="expected an event of this device"):
        device.wait(Queue.CPU, CpuDevice().record(Queue.H2D))


def test_host_memory_is_not_handed_out_before_its_copies_are_done() -> None:
    runtime = FakeRuntime(0)
    runtime._eagerness = 0.0
    device = CudaDevice(runtime)
    target, first = torch.zeros(64, dtype=torch.uint8), device.host(64)
    address = first.fill_(7).data_ptr()
    device.copy(Queue.H2D, target, first)
    del first
    second = device.host(64)
    assert second.data_ptr() == address
    second.fill_(9)
    device.synchronize()
    assert bool((target == 7).all())
    del second
    device.close()
    gc.collect()


@pytest.mark.parametrize("queue", [Queue.H2D, Queue.D2H])
def test_memory_that_comes_back_leaves_no_event_that_covers_too_little(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back on any thread: here while the training's launches a copy, right behind an event of the former's."""
    runtime = FakeRuntime(0)
    runtime._eagerness = 0.0
    device = CudaDevice(runtime)
    source, target = torch.arange(8.0), torch.zeros(8)
    memory, record = device.host(64), FakeEvent.record
    launched: list[Queue] = []

    def interrupted(event: FakeEvent, stream: FakeStream) -> None:
        record(event, stream)
        if stream is device._streams[queue] and not launched:
            launched.append(queue)
            device.copy(queue, target, source)

    monkeypatch.setattr(FakeEvent, "record", interrupted)
    del memory
    assert launched
    device.wait(Queue.CPU, device.record(queue))
    assert torch.equal(target, source), "the event stands behind the copy"
    device.close()


@pytest.mark.filterwarnings("default")
def test_pinning_that_fails_is_said_once() -> None:
    class Real(FakeRuntime):
        def host(self, size_bytes: int, *, pin: bool) -> Any:
            from ps_kernels import PinnedArena

            return PinnedArena(size_bytes, pin=pin)

    device = CudaDevice(Real())
    with pytest.warns(UserWarning, match="host memory is not pinned") as said:
        held = [device.host(size) for size in (64, 128)]
    assert len(said) == 1
    assert [each.numel() for each in held] == [64, 128]
    CudaDevice(Real(), pin=False).host(64)


# Budgets.


def test_the_budget_is_kept_by_the_allocators_own_figures() -> None:
    """Arena, slots of their own, activations and gradients together: once what the model takes is known."""
    runtime, stack = FakeRuntime(6), models.stack()
    with runtime:
        size = 96 * 1024
        device = CudaDevice(runtime)
        with chunked_model(stack, device=device, budget=Budget(device=size, host=HOST)) as (model, optimizer):
            others = runtime.allocated().now - device._owned.bytes
            for index in range(6):
                batch = rows(index)
                if index == 2:
                    runtime.reset_peak()
                square(model, *batch).backward()
                if index >= 2:
                    assert size * 0.9 < runtime.allocated().peak - others <= size
                finish(optimizer)
            assert statistics(model).tiers["device"].peak_bytes <= size
            assert statistics(model).evictions > 0


def test_a_block_of_another_length_takes_no_memory_beside_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator keeps what is freed, and takes more from the card for a block of another size."""
    with FakeRuntime() as runtime:
        device, seen = CudaDevice(runtime), []
        monkeypatch.setattr(runtime, "release_cached", lambda: seen.append(device._owned.bytes))
        arena = Arena(device, 4096, exists=True, host=False, poison=False)
        arena.resize(2048)
        slots = [arena.reserve(256, offset) for offset in (0, 1792, 3840)]
        for index, slot in enumerate(slots):
            slot.memory.fill_(index + 1)
        seen.clear()
        arena.resize(1024)
        assert seen == [256], "the old block was freed before; what lies beyond it stays"
        assert device._owned.bytes == 1024 + 2 * 256
        assert [slot.memory.unique().tolist() for slot in slots] == [[1], [2], [3]]
        arena.close()


def test_nonmodel_bytes_are_the_allocators_less_what_is_the_engines() -> None:
    runtime = FakeRuntime()
    with runtime:
        before = torch.zeros(1000, dtype=torch.uint8)  # of others
        device = CudaDevice(runtime)
        tracker = device.nonmodel_bytes()
        assert isinstance(tracker, AllocatorBytesTracker)
        arena = device.arena(5000)
        tracker.start()
        assert tracker.take_peak() == 0
        one = torch.zeros(300, dtype=torch.uint8)
        assert tracker.current_bytes == 300
        del one
        assert (tracker.current_bytes, tracker.take_peak()) == (0, 300)
        two = torch.zeros(200, dtype=torch.uint8)
        with tracker.paused(), tracker.paused():
            slot = device.arena(4000)
            torch.zeros(9999, dtype=torch.uint8)
        assert tracker.take_peak() == 200, "what the engine does does not count"
        device.synchronize()  # the copy streams are noted as its users
        del arena, slot
        assert tracker.current_bytes == 200
        tracker.stop()
        del before
        tracker.start()
        assert (tracker.current_bytes, device._owned.bytes) == (200 - 200, 0), "the mark below went down with what went"
        del two


def test_a_pause_whose_end_an_interrupt_skipped_is_over_with_the_moment() -> None:
    runtime = FakeRuntime()
    with runtime:
        device = CudaDevice(runtime)
        tracker, other = device.nonmodel_bytes(), device.nonmodel_bytes()
        tracker.start()
        tracker.paused().__enter__()
        tracker.take_peak()
        torch.zeros(300, dtype=torch.uint8)
        other.start()  # resets the allocator's peak
        with tracker.paused():
            torch.zeros(9999, dtype=torch.uint8)
        assert tracker.take_peak() == 300


def test_without_a_budget_it_is_what_is_free_less_a_tenth() -> None:
    runtime = FakeRuntime()
    runtime.allocator.limit_bytes = 1_000_000
    with chunked_model(models.stack(), device=CudaDevice(runtime), budget=Budget(host=HOST)) as (model, _):
        assert statistics(model).tiers["device"].budget_bytes == 900_000 & -128
    with pytest.raises(InvalidInput, match=r"is 2,000,000 bytes, but cpu has 1,000,000, of which"):
        chunked(models.stack(), None, device=CudaDevice(runtime), budget=Budget(device=2_000_000))


# Names, and what is in no chunk.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match="torch finds no CUDA device here"):
        chunked(models.stack(), None, device="cuda:0")
    for name in ("cuda:x", "cuda:-1"):
        with pytest.raises(InvalidInput, match="device must be 'cuda' or like 'cuda:1'"):
            cuda_device(name, pin=True)
    with pytest.raises(InvalidInput, match="or one CUDA device like 'cuda:1'"):
        chunked(models.stack(), None, device="tpu")


def test_the_index_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidInput, match="'cuda:2': this computer has 2 CUDA devices, from cuda:0"):
        cuda_device("cuda:2", pin=True)


def test_buffers_and_other_parameters_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("again", self.norm.running_mean)
            self.register_buffer("none", None)
            self.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

    model = Model()
    pointed: dict[int, torch.device] = {}
    monkeypatch.setattr(
        "ps_core.engine._parameters.unmanaged.set_data",
        lambda parameter, data: pointed.update({id(parameter): data.device}),
    )
    where = torch.device("meta")  # a parameter cannot go there, so that is only noted
    move_unmanaged(model, where)
    assert {each.device for each in model.buffers()} == {where}
    assert model.again is model.norm.running_mean, "one buffer of two names stays one"
    assert pointed == {id(each): where for each in model.parameters()}

"""Pinned host memory on the CUDA that the CPU plays: few registrations, and none made or undone between steps."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST
from ps_core import AdamW, Budget, Options
from ps_core._plan import Queue
from ps_core._simulate.machine import Machine
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices import host_pool
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.select import resolve_device
from ps_core.engine._memory.tier_store import Arena

MIB = 1 << 20
PAGE = host_pool._pages(1)


def train(model: Any, optimizer: Any, steps: int, micro_batches: int = 1) -> None:
    for index in range(steps):
        for micro in range(micro_batches):
            next_token(model, *tokens(10 * index + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()


class SlowHost(CudaDevice):
    """A device whose computer steps so slowly that plans keep on the device what fits there."""

    @property
    def machine(self) -> Machine:
        return replace(super().machine, host_bandwidth=1e6)


def managed(runtime: FakeRuntime, budget: Budget, model: Any = None, **more: Any) -> tuple[Any, Any]:
    return chunked(
        model or models.Language(tied=True), AdamW(), device=SlowHost(runtime), budget=budget,
        options=Options(group_bytes=2048), **more,
    )  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_nothing_is_pinned_or_unpinned_between_steps(micro_batches: int) -> None:
    with FakeRuntime(4) as runtime:
        model, optimizer = managed(runtime, Budget(device="96KiB", host=HOST), accumulation_steps=micro_batches)
        train(model, optimizer, 4, micro_batches)
        before = runtime.hosts, runtime.unpinned
        train(model, optimizer, 12, micro_batches)
        assert runtime.unpinned == before[1]
        assert runtime.hosts <= before[0] + 1, "one more where the worker let go of a block late"
        assert statistics(model).evictions > 0
        release(model)


def test_large_blocks_that_every_step_takes_stay_pinned() -> None:
    """More of them than two gigabytes; nothing is written there, so the system has to find no pages."""
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    for _ in range(3):
        held = [device.host(256 * MIB) for _ in range(12)]
        del held
    assert (runtime.hosts, runtime.unpinned) == (12, 0)
    device.close()
    assert not runtime.pinned


def test_home_slots_share_a_registration_that_is_given_back_once_all_is_on_the_device() -> None:
    with FakeRuntime(4) as runtime:
        model, optimizer = managed(runtime, Budget(device="16MiB", host=HOST))
        assert len(model.table.weight._owner.groups) > 3
        assert (runtime.hosts, len(runtime.pinned)) == (1, 1)
        train(model, optimizer, 3)
        assert statistics(model).planned_passes >= 2
        assert not runtime.pinned, "every home slot is on the device by now"
        release(model)


class WithLoss(models.Language):
    """A model that returns its loss: fake tensors foresee its first pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token(super().forward, tokens)


@pytest.mark.parametrize("others_first", [False, True])
def test_what_is_kept_for_another_plan_goes_back_once_a_pass_ran(others_first: bool) -> None:
    """Also where the foreseen pass is never planned from, for the one that ran has more rows of fewer tokens."""
    with FakeRuntime(4) as runtime:
        model, optimizer = managed(runtime, Budget(device="16MiB", host=HOST), WithLoss(tied=True))
        if others_first:
            model(tokens(0)[0]).backward()
            assert statistics(model).planned_passes == 1, "it was foreseen"
            assert runtime.pinned
            optimizer.zero_grad()
        model(tokens(1)[0][:, :5].repeat(6, 1)).backward()
        optimizer.step()
        assert statistics(model).planned_passes == 1
        assert not runtime.pinned, "every home slot is on the device by now"
        release(model)


def test_contents_of_the_arena_pin_no_memory_while_it_gets_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie outside every budget: in blocks that home slots left behind, or in memory that is not pinned."""
    monkeypatch.setattr(host_pool, "_LEAST_BYTES", 0)
    with FakeRuntime(4) as runtime:
        model, optimizer = managed(runtime, Budget(device="300KiB", host="100KiB"))
        train(model, optimizer, 3)
        assert not runtime.pinned, "the plan has all home slots on the device"
        with torch.no_grad():
            next_token(model, *(each.repeat(3, 1) for each in tokens(0)))  # for which some of them leave
        store = model.table.weight._owner.store
        sizes = [slot.bytes for each in model.table.weight._owner.groups for slot in _host_slots(each)]
        assert sum(sizes) == store.ledger.used_bytes[1] > 0
        assert sum(runtime.pinned.values()) == sum(map(host_pool._pages, sizes))
        release(model)


def _host_slots(group: Any) -> list[Any]:
    return [chunk.home for chunk in group.chunks.values() if chunk.home.tier == 1]


def test_contents_of_the_arena_take_blocks_that_are_kept() -> None:
    with FakeRuntime() as runtime:
        device = CudaDevice(runtime)
        arena = Arena(device, 4 * PAGE, exists=True, host=False, poison=False)
        arena.resize(2 * PAGE)
        slots = [arena.reserve(PAGE, offset) for offset in (0, PAGE, 3 * PAGE)]
        for value, slot in enumerate(slots):
            slot.memory.fill_(value)
        for kept in (False, True):
            if kept:
                device.prepare_host([2 * PAGE])
            arena.resize(PAGE * (1 + 3 * kept))
            assert runtime.hosts == kept
            assert [slot.memory.unique().tolist() for slot in slots] == [[0], [1], [2]]
        found = [device.kept_host(PAGE) for _ in range(3)]
        assert [each is None for each in found] == [False, False, True]
        arena.close()


def test_registrations_end_at_a_limit_and_larger_blocks_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "_MOST_BYTES", 10 * PAGE)
    runtime = FakeRuntime()
    device = CudaDevice(runtime)
    device.prepare_host([4 * PAGE, 5 * PAGE + 1, 4 * PAGE, 5 * PAGE, 30 * PAGE])
    assert sorted(runtime.pinned.values()) == [9 * PAGE, 10 * PAGE, 30 * PAGE]
    sizes = [30 * PAGE, 4 * PAGE, 5 * PAGE, 4 * PAGE, 5 * PAGE + 1]
    held = [device.host(size) for size in sizes]
    assert runtime.hosts == 3, "they are handed out in any order"
    assert [memory.numel() for memory in held] == sizes
    assert all(memory.data_ptr() % PAGE == 0 for memory in held)
    del held
    device.prepare_host(sizes)
    assert runtime.hosts == 3, "what is free already serves"
    device.close()


def test_neighbours_are_joined_for_a_larger_block_and_waited_for() -> None:
    runtime = FakeRuntime(0)
    runtime._eagerness = 0.0
    device = CudaDevice(runtime)
    device.prepare_host([PAGE] * 4)
    targets = [torch.zeros(PAGE, dtype=torch.uint8) for _ in range(2)]
    first, second, third, last = (device.host(PAGE) for _ in range(4))
    for target, source in zip(targets, (first, second), strict=True):
        device.copy(Queue.H2D, target, source.fill_(7))
    address = first.data_ptr()
    del target, source, first, second
    joined = device.host(2 * PAGE).fill_(9)
    assert joined.data_ptr() == address
    assert all(bool((target == 7).all()) for target in targets), "copies came before the next use"
    assert (runtime.hosts, runtime.unpinned) == (1, 0)
    del joined, third
    larger = device.host(PAGE * 3)
    assert runtime.hosts == 1
    del larger, last
    beyond = device.host(5 * MIB)
    assert list(runtime.pinned.values()) == [5 * MIB], "the first registration was too small, and no block lay in it"
    assert beyond.numel() == 5 * MIB
    device.close()


def test_blocks_never_overlap_and_memory_does_not_grow_beyond_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "_LEAST_BYTES", 0)
    for seed in range(20):
        random, runtime = Random(seed), FakeRuntime()
        device = CudaDevice(runtime)
        device.prepare_host([random.randrange(1, 6 * PAGE) for _ in range(random.randrange(8))])
        held: dict[int, Tensor] = {}
        most = sum(runtime.pinned.values())
        for value in range(150):
            if held and random.random() < 0.5:
                chosen = random.choice(list(held))
                assert bool((held.pop(chosen) == chosen).all()), "somebody else wrote there"
            else:
                held[value] = device.host(random.randrange(1, 6 * PAGE)).fill_(value)
                used = sum(host_pool._pages(each.numel()) for each in held.values())
                most = max(most, used)
                assert used <= sum(runtime.pinned.values()) <= 2 * most + 6 * PAGE
            if random.random() < 0.05:
                device.trim_host()
        assert all(bool((memory == value).all()) for value, memory in held.items())
        held.clear()
        device.trim_host()
        assert not runtime.pinned
        device.close()


def test_blocks_that_other_threads_release_meanwhile_are_not_lost() -> None:
    """As where the worker's thread lets go of one while the host thread looks for another."""
    runtime = FakeRuntime(0)
    device = CudaDevice(runtime)
    stop = threading.Event()

    def churn(value: int) -> None:
        while not stop.is_set():
            memory = device.host(PAGE * (1 + value)).fill_(value)
            if not bool((memory == value).all()):
                wrong.append(value)

    wrong: list[int] = []
    threads = [threading.Thread(target=churn, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        device.host(PAGE * 4)
        device.trim_host()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    device.trim_host()
    assert not runtime.pinned
    device.close()


@pytest.mark.parametrize("keeps", [True, False])
def test_the_emulated_accelerator_keeps_released_host_memory(keeps: bool) -> None:
    made: list[int] = []
    device = CpuDevice(keeps_host_memory=keeps)
    kept = device._kept
    if kept is not None:
        make = kept._make
        kept._make = lambda size: made.append(size) or make(size)
    for _ in range(3):
        device.host(8 * MIB).fill_(1)
    device.close()
    assert made == ([8 * MIB] if keeps else []), "one arena serves all three blocks, one after the other"


def test_emulated_keeps_host_memory_and_the_cpu_does_not() -> None:
    assert resolve_device("emulated", pin=False)._kept is not None
    assert resolve_device("cpu", pin=False)._kept is None

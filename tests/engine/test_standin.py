"""The stand-in for an accelerator: right schedules pass, each ordering bug is caught, memory and time are kept."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from checked_device.device import CheckedDevice
from checked_device.faults import InjectedFault
from ps_core import InvalidInput, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.device import Device, Event

DOCS = Path(__file__).resolve().parents[2] / "docs" / "ordering.md"
SLOT = 256
RIGHT_SEEDS, FAULT_SEEDS = range(50), range(30)


def made(how: dict[str, Any]) -> Device:
    """The plain device, or one that checks."""
    return CheckedDevice(**how) if how else CpuDevice()


class Slot:
    """Memory, and the events that whoever uses it next has to wait for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.written: Event | None = None
        self.read: list[Event] = []


class Training:
    """A pipeline over disk, host and device: fetch ahead, compute, copy out, step behind, write back.

    Every access waits for what its slots were last used for, on other queues, and for nothing else. There are three
    kinds of layers: trained ones, read from the disk, whose gradient is written over the weight; layers that are
    gathered and save an activation on the disk; frozen ones, staged by the host in one buffer.
    """

    def __init__(self, device: Device, seed: int) -> None:
        random = Random(seed)
        self.device = device
        self.layers, self.slots, self.lag = random.randint(7, 10), random.randint(3, 4), random.randint(1, 2)
        self.rounds = random.randint(2, 3)
        self.device_memory, self.host_memory = device.arena(40 * SLOT), device.host(80 * SLOT)
        generator = torch.Generator().manual_seed(seed)
        self.host_memory.random_(0, 256, generator=generator)
        self.used = {"device": 0, "host": 0}
        self.weights = self.take("device", self.slots)
        self.full, self.shared, self.resident, self.activation, self.state = self.take("device", 5)
        self.disk_weights, self.disk_moments = self.take("host", self.layers), self.take("host", self.layers)
        self.disk_activations, self.frozen = self.take("host", self.layers), self.take("host", self.layers)
        self.gradients = self.take("host", 2)
        self.moment, self.inbox, self.outbox, self.staging, self.saved, self.loss = self.take("host", 6)

    def take(self, where: str, count: int) -> list[Slot]:
        memory = self.device_memory if where == "device" else self.host_memory
        first = self.used[where]
        self.used[where] += count
        return [Slot(memory[at * SLOT : (at + 1) * SLOT]) for at in range(first, first + count)]

    def wait(self, queue: Queue, reads: list[Slot], writes: list[Slot]) -> None:
        events = [slot.written for slot in (*reads, *writes)] + [event for slot in writes for event in slot.read]
        for event in events:
            if event is not None and event.queue is not queue:
                self.device.wait(queue, event)

    def done(self, queue: Queue, reads: list[Slot], writes: list[Slot]) -> None:
        event = self.device.record(queue)
        for slot in reads:
            slot.read.append(event)
        for slot in writes:
            slot.written, slot.read = event, []

    def copy(self, queue: Queue, target: Slot, source: Slot) -> None:
        self.wait(queue, [source], [target])
        self.device.copy(queue, target.memory, source.memory)
        self.done(queue, [source], [target])

    def work(self, queue: Queue, what: str, reads: list[Slot], writes: list[Slot], body: Callable[[], object]) -> None:
        self.wait(queue, reads, writes)
        self.device.declare_access(queue, what, [each.memory for each in reads], [each.memory for each in writes])
        body()
        self.done(queue, reads, writes)

    def fetch(self, layer: int) -> None:
        weight = self.weights[layer % self.slots]
        if layer % 3 == 0:
            self.copy(Queue.DISK_R, self.inbox, self.disk_weights[layer])
            self.copy(Queue.H2D, weight, self.inbox)
        elif layer % 3 == 1:
            self.copy(Queue.H2D, weight, self.frozen[layer])
        else:
            staging, frozen = self.staging.memory, self.frozen[layer].memory
            self.work(
                *(Queue.CPU, f"stage {layer}", [self.frozen[layer]], [self.staging]),
                lambda: staging.copy_(frozen ^ layer),
            )
            self.copy(Queue.H2D, weight, self.staging)

    def gather(self, layer: int, source: Slot, target: Slot) -> None:
        part, full = source.memory, target.memory
        self.work(Queue.COLL, f"gather for {layer}", [source], [target], lambda: full.copy_(part * 5 + layer))

    def compute(self, layer: int) -> None:
        weight, state, shared = self.weights[layer % self.slots], self.state.memory, self.shared.memory
        what = f"compute {layer}"
        self.gather(layer, self.resident, self.shared)
        if layer % 3 == 0:
            self.work(
                *(Queue.COMPUTE, what, [self.shared], [weight, self.state]),
                lambda: weight.memory.mul_(3).add_(state.add_(weight.memory).add_(shared)),
            )
            self.copy(Queue.D2H, self.gradients[layer // 3 % 2], weight)
            self.copy(Queue.DISK_R, self.moment, self.disk_moments[layer])
        elif layer % 3 == 1:
            self.gather(layer, weight, self.full)
            full, activation = self.full.memory, self.activation.memory
            self.work(
                *(Queue.COMPUTE, what, [self.full, self.shared], [self.state, self.activation]),
                lambda: activation.copy_(state.mul_(7).add_(full).add_(shared)),
            )
            self.copy(Queue.D2H, self.saved, self.activation)
            self.copy(Queue.DISK_W, self.disk_activations[layer], self.saved)
        else:
            self.work(
                *(Queue.COMPUTE, what, [weight, self.shared], [self.state]),
                lambda: state.sub_(weight.memory).add_(shared),
            )

    def step(self, layer: int) -> None:
        gradient, moment, outbox = self.gradients[layer // 3 % 2], self.moment.memory, self.outbox.memory
        self.work(
            *(Queue.CPU, f"step {layer}", [gradient], [self.moment, self.outbox]),
            lambda: outbox.copy_(moment.mul_(9).add_(gradient.memory)),
        )
        self.copy(Queue.DISK_W, self.disk_moments[layer], self.moment)
        self.copy(Queue.DISK_W, self.disk_weights[layer], self.outbox)

    def read_loss(self) -> None:
        self.loss.memory.copy_(self.state.memory)

    def run(self) -> bytes:
        """Everything there is in memory at the end."""
        for _ in range(self.rounds):
            fetched = 0
            for layer in range(self.layers):
                while fetched < min(self.layers, layer + self.slots):
                    self.fetch(fetched)
                    fetched += 1
                self.compute(layer)
                if layer >= self.lag and (layer - self.lag) % 3 == 0:
                    self.step(layer - self.lag)
            self.work(Queue.CPU, "read the loss", [self.state], [self.loss], self.read_loss)
            for layer in range(self.layers - self.lag, self.layers):
                if layer % 3 == 0:
                    self.step(layer)
        self.device.synchronize()
        return bytes(self.device_memory.tolist() + self.host_memory.tolist())


@cache
def right(seed: int) -> bytes:
    """What a run without delays, checks and faults leaves."""
    return Training(CpuDevice(), seed).run()


def test_runs_differ_by_seed_and_do_something() -> None:
    assert len({right(seed) for seed in RIGHT_SEEDS}) == len(RIGHT_SEEDS)
    training = Training(CpuDevice(), 0)
    before = bytes(training.device_memory.tolist() + training.host_memory.tolist())
    after = training.run()
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    assert changed > 10 * SLOT


@pytest.mark.parametrize("seed", RIGHT_SEEDS)
def test_no_false_alarm_and_the_same_bytes(seed: int) -> None:
    assert Training(CheckedDevice(check=True, seed=seed), seed).run() == right(seed)
    assert Training(CheckedDevice(seed=seed + 1000), seed).run() == right(seed)


HOST_COMPUTES = [
    InjectedFault.COMPUTE_BEFORE_DISK_READ,
    InjectedFault.COMPUTE_OVER_DISK_WRITE,
    InjectedFault.DISK_READ_OVER_COMPUTE,
    InjectedFault.DISK_WRITE_BEFORE_COMPUTE,
]
"""The pipeline here has an accelerator, which no disk is next to; the engine's is in `test_disk_faults`."""
FAULTS = [fault for fault in InjectedFault if fault not in HOST_COMPUTES and fault.recorded is not Queue.CPU]
"""Nor has it a worker thread; the engine's is in `test_faults`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_checker_catches_every_fault_on_every_seed(fault: InjectedFault) -> None:
    missed = [seed for seed in FAULT_SEEDS if not caught(seed, fault)]
    assert missed == []


def caught(seed: int, fault: InjectedFault) -> bool:
    try:
        Training(CheckedDevice(check=True, fault=fault, seed=seed), seed).run()
    except PlanMismatch as error:
        sides = re.search(r"^unordered: .* on (\w+)\) (?:reads|writes) .* on (\w+)\), launched earlier", str(error))
        assert sides is not None
        if fault.waiting is not None and fault.recorded is not None:
            assert sides.groups() == (fault.waiting.name, fault.recorded.name)
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_delays_show_what_a_late_copy_can_show(fault: InjectedFault) -> None:
    shown = [Training(CheckedDevice(seed=seed, fault=fault), seed).run() != right(seed) for seed in FAULT_SEEDS]
    # Compute and collectives are done at once by the host thread; only the checker sees that nobody waits for them.
    assert any(shown) == (fault.recorded not in (Queue.COMPUTE, Queue.COLL))


def test_faults_need_something_that_notices() -> None:
    with pytest.raises(InvalidInput, match=r"lost-event.*check=True or a seed"):
        CheckedDevice(fault=InjectedFault.LOST_EVENT)


def test_the_documented_faults() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \| (.+?) \|$", DOCS.read_text("utf-8"), re.MULTILINE)
    waits = {
        fault: "-"
        if fault.waiting is None or fault.recorded is None
        else f"{fault.waiting.name} for {fault.recorded.name}"
        for fault in InjectedFault
    }
    assert rows == [(str(fault), waits[fault], fault.__doc__) for fault in InjectedFault]


def test_a_message_teaches() -> None:
    device = CheckedDevice(check=True)
    arena, host = device.arena(1024), device.host(512)
    device.copy(Queue.H2D, arena[128:640], host)
    device.record(Queue.H2D)
    with pytest.raises(PlanMismatch) as caught:
        device.declare_access(Queue.COMPUTE, "forward of layer 3", [arena[256:512]], [])
    assert str(caught.value).splitlines() == [
        "unordered: 'forward of layer 3' (operation 1 on COMPUTE) reads arena 0 [256:512] while 'copy' (operation 1 on "
        "H2D), launched earlier, perhaps still writes arena 0 [128:640]; both touch arena 0 [256:512]",
        "  expected: COMPUTE has waited for an event recorded on H2D behind its operation 1; "
        "found: it has waited for H2D up to operation 0",
        "  try: event = device.record(Queue.H2D) right behind 'copy', and device.wait(Queue.COMPUTE, event) before "
        "'forward of layer 3'",
    ]


@pytest.mark.parametrize("how", [{}, {"check": True}, {"seed": 1}])
def test_copies_refuse_what_is_not_the_same_bytes(how: dict[str, object]) -> None:
    device = made(how)
    arena = device.arena(1024)
    with pytest.raises(PlanMismatch, match=r"copy on H2D: expected the same shape and dtype.*float32.*uint8"):
        device.copy(Queue.H2D, arena[:4], torch.ones(4))
    with pytest.raises(PlanMismatch, match="same shape"):
        device.copy(Queue.H2D, arena[:4], arena[8:9])


def test_reading_without_waiting_sees_old_bytes() -> None:
    old = 0
    for seed in range(20):
        device = CheckedDevice(seed=seed)
        arena, host = device.arena(64), device.host(64)
        host.fill_(7)
        device.copy(Queue.H2D, arena, host)
        event = device.record(Queue.H2D)
        old += int(arena.sum()) == 0
        device.wait(Queue.CPU, event)
        assert int(arena.sum()) == 7 * 64
    assert old >= 10


def test_a_delayed_copy_does_not_count_as_a_use_of_a_residency() -> None:
    device = CheckedDevice(seed=0)
    arena = device.arena(1024)
    residency = torch.utils.dlpack.from_dlpack(arena[128:256]).view(torch.float32)
    address = residency.untyped_storage()._cdata
    before = torch._C._storage_Use_Count(address)
    device.copy(Queue.H2D, residency, torch.ones(32))
    assert torch._C._storage_Use_Count(address) == before
    device.synchronize()
    assert residency.tolist() == [1.0] * 32


def test_what_is_remembered_does_not_grow() -> None:
    device, random = CheckedDevice(check=True), Random(0)
    arena, host = device.arena(64 * SLOT), device.host(64 * SLOT)
    history = device._ordering.history  # type: ignore[union-attr]
    largest = []
    for step in range(10_000):
        slot, start = random.randrange(64), random.randrange(0, SLOT, 64)
        part = slice(slot * SLOT + start, (slot + 1) * SLOT)
        queue = random.choice([Queue.H2D, Queue.D2H, Queue.COMPUTE, Queue.DISK_W])
        for other in Queue:
            device.wait(queue, device.record(other))
        if queue is Queue.H2D:
            device.copy(queue, arena[part], host[part])
        elif queue is Queue.D2H:
            device.copy(queue, host[part], arena[part])
        else:
            device.declare_access(queue, "use", [host[part]], [arena[part]] if queue is Queue.COMPUTE else [])
        if step % 1000 == 999:
            largest.append(len(history))
    assert 64 < max(largest) <= 64 * 2 * 4 * 2  # slots, memories, parts of a slot, a writer and a reader
    assert max(largest[5:]) <= 1.1 * max(largest[:5])


def test_memory_that_is_given_back_is_forgotten() -> None:
    device = CheckedDevice(check=True)
    arena = device.arena(1 << 16)
    for _ in range(200):
        loose = torch.ones(1 << 12)  # the allocator gives the same address again and again
        device.declare_access(Queue.COMPUTE, "make a gradient", [], [loose])
        device.copy(Queue.COMPUTE, arena[: loose.nbytes], loose.view(torch.uint8))
        del loose
        on_host = torch.ones(1 << 12)
        device.declare_access(Queue.CPU, "use something else", [], [on_host])
        del on_host
    gc.collect()
    device.declare_access(Queue.COMPUTE, "tidy up", [], [])
    assert len(device._ordering.history) == 1  # type: ignore[union-attr]


def test_loose_memory_is_checked_while_it_lives() -> None:
    device, loose = CheckedDevice(check=True), torch.ones(8)
    device.declare_access(Queue.COMPUTE, "make a gradient", [], [loose])
    with pytest.raises(PlanMismatch, match=r"reads tensor \d+ \[4:12\] while 'make a gradient'"):
        device.declare_access(Queue.CPU, "read it", [loose[1:3]], [])
    with pytest.raises(PlanMismatch, match=r"reads tensor \d+ \[0:28\]"):
        device.declare_access(Queue.CPU, "read every second element", [loose[0:7:2]], [])


def test_an_alias_that_is_seen_before_the_whole() -> None:
    device, loose = CheckedDevice(check=True), torch.ones(64)
    alias = torch.utils.dlpack.from_dlpack(loose[:16])
    device.declare_access(Queue.COMPUTE, "use an alias", [alias], [])
    device.declare_access(Queue.COMPUTE, "use the rest", [], [loose[32:]])
    with pytest.raises(PlanMismatch, match=r"reads tensor \d+ \[128:256\]"):
        device.declare_access(Queue.CPU, "read the rest", [loose[32:]], [])
    del alias, loose
    gc.collect()
    device.declare_access(Queue.COMPUTE, "tidy up", [], [])
    assert device._places._starts == []


def test_memory_that_is_made_again_and_again_is_known_once() -> None:
    device = CheckedDevice(seed=1)
    for value in range(50):
        arena, host = device.arena(4096 * (value + 1)), device.host(4096 * (value + 1))
        device.copy(Queue.H2D, arena, host.fill_(value))
        device.synchronize()
        assert arena.unique().tolist() == [value]
    assert len(device._places._starts) <= 4


def test_the_host_thread_copies_at_once_and_closing_finishes_the_rest() -> None:
    for seed in range(10):
        device = CheckedDevice(seed=seed)
        arena, host = device.arena(64), device.host(64)
        device.copy(Queue.CPU, host, torch.full((64,), 9, dtype=torch.uint8))
        assert host.unique().tolist() == [9]
        device.copy(Queue.H2D, arena, host)
        device.close()
        assert arena.unique().tolist() == [9]
        device.close()


def mapped_bytes() -> tuple[int, int]:
    """Of this process: address space, and what is resident."""
    total, resident = Path("/proc/self/statm").read_text("ascii").split()[:2]
    return int(total) * 4096, int(resident) * 4096


@pytest.mark.parametrize("kind", ["arena", "host"])
@pytest.mark.parametrize("how", [{}, {"check": True, "seed": 1}])
def test_memory_is_exact_lazy_and_given_back(kind: str, how: dict[str, object]) -> None:
    size, device = (256 << 20) + 3, made(how)
    gc.collect()
    total, resident = mapped_bytes()
    memory = getattr(device, kind)(size)
    assert (memory.dtype, memory.shape, memory.device) == (torch.uint8, (size,), device.torch_device)
    assert memory.data_ptr() % 128 == 0
    assert memory.untyped_storage().nbytes() == size
    assert 0 <= mapped_bytes()[0] - total - size < 4096 + (1 << 20)
    assert mapped_bytes()[1] - resident < 8 << 20
    memory[: 64 << 20].fill_(1)
    assert 56 << 20 < mapped_bytes()[1] - resident < 72 << 20
    view = memory[5:10]
    del memory
    assert view.tolist() == [1] * 5
    assert mapped_bytes()[0] - total >= size
    del view
    device.close()
    assert mapped_bytes()[0] - total < size // 2  # less the stacks and heaps of threads that torch has started
    assert mapped_bytes()[1] - resident < 8 << 20


@pytest.mark.parametrize("kind", ["arena", "host"])
def test_memory_refuses_nothing(kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"{kind}: expected a size of at least 1 byte, found 0"):
        getattr(CpuDevice(), kind)(0)


def test_an_event_of_another_device_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected an event of this device, found object"):
        CheckedDevice(check=True).wait(Queue.COMPUTE, object())  # type: ignore[arg-type]

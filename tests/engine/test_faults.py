"""Waits left out of the engine, one kind at a time: the checker refuses each of them on every seed.

A kind of wait is looked for in a loop where nothing else orders the same work (`CAUGHT`). Where something always does,
that is shown too (`IMPLIED`). Nothing is poisoned, for that is work of its own, which could give a fault away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import ADAMW, finish, next_token, tokens
from _reference import GROUP_BYTES, SEED, Settings
from _runs import HOST, let_go
from checked_device.device import CheckedDevice
from checked_device.faults import InjectedFault
from ps_core import Budget, Options, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine import chunked, statistics
from ps_core.engine._devices.device import Event

STEPS = 3
FAULT_SEEDS, DELAY_SEEDS, QUIET_SEEDS = range(5), range(8), range(20)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A small language model on a small device; the first pass is recorded, what follows is replayed."""

    device_bytes: int
    micro_batches: int = 1
    reads: bool = True
    """Read everything after each step: whoever does that waits for all work."""

    def run(self, model: Any, optimizer: Any, device: Device | None) -> list[Tensor]:
        """Train, read all parameters, evaluate, write all parameters."""
        logs = []
        for step in range(STEPS):
            if device is not None:
                device.step_begins(step)
            for micro in range(self.micro_batches):
                loss = next_token(model, *tokens(10 * step + micro))
                loss.backward()
                logs.append(loss.detach())
            finish(optimizer)
            if not self.reads:
                continue
            state = model.state_dict()
            logs += [value.clone() for value in state.values()]
            with torch.no_grad():
                logs.append(next_token(model, *tokens(99)))
            model.load_state_dict(state)
        return logs


TIGHT = Training(device_bytes=53_248)
"""Hardly anything fits; gradients go over the parameters, so copies out and refills are on each other's heels."""
HOMELY = Training(device_bytes=90_112)
"""A few groups live on the device and are stepped there; the others come and go."""
SUMS = Training(device_bytes=53_248, micro_batches=2)
"""The host sums what comes down, in fp32."""
BESIDE = Training(device_bytes=53_248, reads=False)
"""The next pass begins while the worker's thread steps."""
TRAININGS = {"beside": BESIDE, "tight": TIGHT, "homely": HOMELY, "sums": SUMS}

CAUGHT = {
    InjectedFault.COMPUTE_BEFORE_FETCH: TIGHT,
    InjectedFault.COMPUTE_OVER_COPY_OUT: TIGHT,
    InjectedFault.FETCH_OVER_COMPUTE: TIGHT,
    InjectedFault.FETCH_OVER_COPY_OUT: TIGHT,
    InjectedFault.COPY_OUT_BEFORE_COMPUTE: TIGHT,
    InjectedFault.HOST_BEFORE_COMPUTE: HOMELY,  # elsewhere it reads what was copied out, and copies wait for compute
    InjectedFault.STEP_BEFORE_GRADIENT: SUMS,  # elsewhere compute waits for copies out first
    InjectedFault.FETCH_BEFORE_STEP: BESIDE,
    InjectedFault.LOST_EVENT: TIGHT,
    InjectedFault.STALE_EVENT: TIGHT,
}
IMPLIED = (InjectedFault.STEP_OVER_FETCH, InjectedFault.COPY_OUT_OVER_STEP)
"""All that is fetched is computed with, and whoever lets the host wait for a fetch lets it wait for compute too.
What comes down to a weight's slot was computed from the weight, which was fetched behind its step.
"""
NO_SUCH_QUEUE = {
    InjectedFault.STEP_BEFORE_DISK_READ: Queue.DISK_R,
    InjectedFault.STEP_OVER_DISK_WRITE: Queue.DISK_W,
    InjectedFault.FETCH_BEFORE_DISK_READ: Queue.DISK_R,
    InjectedFault.DISK_READ_OVER_FETCH: Queue.DISK_R,
    InjectedFault.DISK_WRITE_BEFORE_COPY_OUT: Queue.DISK_W,
    InjectedFault.COPY_OUT_OVER_DISK_WRITE: Queue.DISK_W,
    InjectedFault.DISK_READ_BEFORE_WRITE: Queue.DISK_R,
    InjectedFault.COMPUTE_BEFORE_DISK_READ: Queue.DISK_R,
    InjectedFault.COMPUTE_OVER_DISK_WRITE: Queue.DISK_W,
    InjectedFault.DISK_READ_OVER_COMPUTE: Queue.DISK_R,
    InjectedFault.DISK_WRITE_BEFORE_COMPUTE: Queue.DISK_W,
    InjectedFault.COMPUTE_BEFORE_GATHER: Queue.COLL,
    InjectedFault.GATHER_BEFORE_FETCH: Queue.COLL,
    InjectedFault.GATHER_OVER_COMPUTE: Queue.COLL,
    InjectedFault.FETCH_OVER_GATHER: Queue.COLL,
}
"""Here are two tiers and one process, so nothing is launched on these; `test_disk_faults` has a disk."""


class Device(CheckedDevice):
    """A stand-in whose fault begins with some step, and which can be repaired."""

    def __init__(self, seed: int, fault: InjectedFault | None = None, *, check: bool = True, begins: int = 0) -> None:
        super().__init__(check=check, seed=seed, fault=fault)
        self._begins, self._to_come, self._saboteur = begins, self._saboteur, None
        self.waits: set[tuple[Queue, Queue]] = set()
        self.launches: set[Queue] = set()

    def step_begins(self, step: int) -> None:
        """Now and then."""
        if step == self._begins:
            self._saboteur = self._to_come

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        """Copy, and remember where."""
        self.launches.add(queue)
        super().copy(queue, target, source)

    def declare_access(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Work, and remember where."""
        self.launches.add(queue)
        super().declare_access(queue, what, reads, writes)

    def wait(self, queue: Queue, event: Event) -> None:
        """Wait, and remember who waited for whom."""
        self.waits.add((queue, event.queue))
        super().wait(queue, event)

    def worker_waits_for(self, event: Event) -> None:
        """Wait, and remember for whom."""
        self.waits.add((Queue.CPU, event.queue))
        super().worker_waits_for(event)

    def worker_works(self, *work: Any) -> Any:
        """Work, and remember that."""
        self.launches.add(Queue.CPU)
        return super().worker_works(*work)

    def mend(self) -> None:
        """From here on waits are waits, and what went wrong is not told again."""
        self._saboteur = self._ordering = None


class Hasty(Device):
    """Its host thread can be told to wait for fetches only."""

    hasty = False

    def wait(self, queue: Queue, event: Event) -> None:
        if not (self.hasty and queue is Queue.CPU and event.queue is not Queue.H2D):
            super().wait(queue, event)


@contextmanager
def managed(training: Training, device: Device | str) -> Iterator[tuple[Any, Any]]:
    """The model; let go of on a device that was repaired."""
    budget = Budget(host=HOST) if isinstance(device, str) else Budget(device=training.device_bytes, host=HOST)
    told = Settings(
        precision="bf16",
        accumulation_steps=training.micro_batches,
        options=Options(poison=False, group_bytes=GROUP_BYTES),
    )
    torch.manual_seed(SEED)
    model, optimizer = chunked(models.Language(layers=2), ADAMW, device=device, budget=budget, **told.as_arguments())
    try:
        yield model, optimizer
    finally:
        if isinstance(device, Device):
            device.mend()
        let_go(model)


def logs_of(training: Training, device: Device) -> list[Tensor]:
    """Train on a device."""
    with managed(training, device) as (model, optimizer):
        return training.run(model, optimizer, device)


@cache
def right(training: Training) -> list[Tensor]:
    """What comes out where nothing is ever moved."""
    with managed(training, "cpu") as (model, optimizer):
        return training.run(model, optimizer, None)


def same(training: Training, logs: list[Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(one, other) for one, other in zip(right(training), logs, strict=True))


def sides(error: Exception) -> tuple[str, ...]:
    """The queues of the later and of the earlier operation that the checker refused."""
    found = re.search(r"unordered: .*? \(operation \d+ on (\w+)\) .*? \(operation \d+ on (\w+)\)", str(error))
    assert found is not None, str(error)
    return tuple(name.replace("WORKER", "CPU") for name in found.groups())


def refused(training: Training, device: Device) -> tuple[str, ...] | None:
    """The two queues that the checker named; None: it had nothing to say."""
    try:
        logs_of(training, device)
    except PlanMismatch as error:
        return sides(error)
    return None


def test_every_fault_has_its_place() -> None:
    places = [*CAUGHT, *IMPLIED, *NO_SUCH_QUEUE]
    assert sorted(places) == sorted(InjectedFault)
    assert all(queue in (fault.waiting, fault.recorded) for fault, queue in NO_SUCH_QUEUE.items())


@pytest.mark.parametrize("begins", [0, 1], ids=["from the start", "once a plan is replayed"])
@pytest.mark.parametrize("fault", CAUGHT)
def test_the_checker_catches_a_fault_on_every_seed(fault: InjectedFault, begins: int) -> None:
    found = [refused(CAUGHT[fault], Device(seed, fault, begins=begins)) for seed in FAULT_SEEDS]
    assert None not in found
    if fault.waiting is not None and fault.recorded is not None:
        assert set(found) == {(fault.waiting.name, fault.recorded.name)}


@pytest.mark.parametrize(("place", "name"), list(enumerate(TRAININGS)))
def test_no_false_alarm(place: int, name: str) -> None:
    """Although groups come and go, plans are replayed, and everything is waited for that a fault leaves out."""
    training = TRAININGS[name]
    for seed in range(10 * place, 10 * place + 10):
        device = Device(seed)
        with managed(training, device) as (model, optimizer):
            assert same(training, training.run(model, optimizer, device))
            found = statistics(model)
        assert found.evictions > 0
        assert found.divergences == 0
        assert found.planned_passes == found.passes - training.micro_batches
        faults = {(fault.waiting, fault.recorded) for fault in (*CAUGHT, *IMPLIED) if fault.waiting is not None}
        if training is SUMS:  # what comes down goes to memory of its own
            faults.remove((Queue.D2H, Queue.CPU))
        assert faults <= device.waits
        assert device.launches == set(Queue) - set(NO_SUCH_QUEUE.values())


@pytest.mark.parametrize("fault", IMPLIED)
def test_implied_by_other_waits(fault: InjectedFault) -> None:
    for seed, training in zip(QUIET_SEEDS, cycle(TRAININGS.values())):
        assert same(training, logs_of(training, Device(seed, fault)))


@pytest.mark.parametrize("seed", FAULT_SEEDS)
def test_the_hosts_waits_for_fetches_would_be_enough_and_are_needed_without_the_others(seed: int) -> None:
    """Parameters are written that were copied up for an evaluation."""
    for fault in (None, InjectedFault.STEP_OVER_FETCH):
        device = Hasty(seed, fault)
        with managed(TIGHT, device) as (model, optimizer):
            TIGHT.run(model, optimizer, device)
            state = {name: value + 1 for name, value in model.state_dict().items()}  # others, or nothing is written
            with torch.no_grad():
                next_token(model, *tokens(99))
            device.hasty = True
            if fault is None:
                model.load_state_dict(state)
                device.hasty = False
            else:
                with pytest.raises(RuntimeError) as found:  # torch collects what goes wrong as it loads
                    model.load_state_dict(state)
                assert sides(found.value) == ("CPU", "H2D")


@pytest.mark.parametrize("fault", CAUGHT)
def test_delays_alone_show_what_a_late_copy_can_show(fault: InjectedFault) -> None:
    training = CAUGHT[fault]
    if fault.recorded is Queue.COMPUTE:  # which the host thread has done at once: nobody can come too early
        assert same(training, logs_of(training, Device(0, fault, check=False)))
    else:
        runs = (logs_of(training, Device(seed, fault, check=False)) for seed in DELAY_SEEDS)
        assert not all(same(training, logs) for logs in runs)

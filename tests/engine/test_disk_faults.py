"""Waits for and by the disk left out, one kind at a time: the checker refuses each that nothing else implies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import ADAMW
from _reference import GROUP_BYTES, SEED, Settings
from _runs import let_go
from checked_device.faults import InjectedFault
from ps_core import Budget, Options, PlanMismatch
from ps_core._plan import Queue
from ps_core.engine import chunked
from ps_core.engine._devices.disk.queues import DISK_QUEUES
from test_faults import Device, Training, sides

SEEDS = range(3)
THREE = (60_000, 60_000, 1)
"""Accelerator, host and disk; the budgets of the first two, and passes to a step."""
TWO = (None, 100_000, 1)
"""The host computes, and the disk is next to it."""
TWO_SUMS = (None, 100_000, 3)

CAUGHT = {
    InjectedFault.STEP_BEFORE_DISK_READ: THREE,
    InjectedFault.FETCH_BEFORE_DISK_READ: THREE,
    InjectedFault.DISK_WRITE_BEFORE_COPY_OUT: THREE,
    InjectedFault.DISK_READ_BEFORE_WRITE: TWO_SUMS,
    InjectedFault.COMPUTE_BEFORE_DISK_READ: TWO,
    InjectedFault.COMPUTE_OVER_DISK_WRITE: TWO_SUMS,
    InjectedFault.DISK_READ_OVER_COMPUTE: TWO_SUMS,
    InjectedFault.DISK_WRITE_BEFORE_COMPUTE: TWO,
}
IMPLIED = (
    InjectedFault.STEP_OVER_DISK_WRITE,
    InjectedFault.DISK_READ_OVER_FETCH,
    InjectedFault.COPY_OUT_OVER_DISK_WRITE,
)
"""On the host beside an accelerator each slot is memory of its own: nobody gets another's that is still used."""


def run(row: tuple[int | None, int, int], device: Device, directory: Path) -> list[Tensor]:
    """Train a small language model."""
    accelerator, host, micro = row
    device.name = "cpu" if accelerator is None else "emulated"
    options = Options(poison=False, group_bytes=GROUP_BYTES)
    told = Settings(precision="bf16", accumulation_steps=micro, options=options)
    budget = Budget(device=accelerator, host=host, disk="64MiB", disk_dir=str(directory))
    torch.manual_seed(SEED)
    model, optimizer = chunked(models.Language(layers=2), ADAMW, device=device, budget=budget, **told.as_arguments())
    try:
        return Training(device_bytes=0, micro_batches=micro).run(model, optimizer, device)
    finally:
        device.mend()
        let_go(model)


def refused(row: tuple[int | None, int, int], device: Device, directory: Path) -> tuple[str, ...] | None:
    """The two queues that the checker named; None: it had nothing to say."""
    try:
        run(row, device, directory)
    except PlanMismatch as error:
        return sides(error)
    return None


def test_every_fault_of_the_disk_has_its_place() -> None:
    of_disk = [fault for fault in InjectedFault if fault.waiting in DISK_QUEUES or fault.recorded in DISK_QUEUES]
    assert sorted([*CAUGHT, *IMPLIED]) == sorted(of_disk)


@pytest.mark.parametrize("begins", [0, 1], ids=["from the start", "once a plan is replayed"])
@pytest.mark.parametrize("fault", CAUGHT)
def test_the_checker_catches_a_fault_on_every_seed(fault: InjectedFault, begins: int, tmp_path: Path) -> None:
    found = [refused(CAUGHT[fault], Device(seed, fault, begins=begins), tmp_path) for seed in SEEDS]
    assert None not in found
    assert fault.waiting is not None
    assert all(fault.waiting.name in each for each in found if each is not None)


@pytest.mark.parametrize("row", [THREE, TWO, TWO_SUMS])
def test_no_false_alarm(row: tuple[int | None, int, int], tmp_path: Path) -> None:
    right = run((None, 10**7, row[2]), Device(0), tmp_path)
    for seed in SEEDS:
        device = Device(seed)
        assert all(torch.equal(a, b) for a, b in zip(right, run(row, device, tmp_path), strict=True))
        moving = {Queue.COMPUTE, *DISK_QUEUES} | ({Queue.H2D, Queue.D2H} if row[0] is not None else set())
        assert moving <= {queue for pair in device.waits for queue in pair}


@pytest.mark.parametrize("fault", IMPLIED)
def test_implied_by_other_waits(fault: InjectedFault, tmp_path: Path) -> None:
    right = run((None, 10**7, 1), Device(0), tmp_path)
    for seed in SEEDS:
        logs = run(THREE, Device(seed, fault), tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(right, logs, strict=True))

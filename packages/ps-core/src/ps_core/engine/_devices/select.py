"""Turn a device and a budget into tiers, and open the file of the lowest one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from ps_core._errors import InvalidInput
from ps_core._options import Budget
from ps_core._plan import Tier
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.cuda.device import cuda_device
from ps_core.engine._devices.device import Device
from ps_core.engine._devices.disk.file import DiskFile
from ps_core.engine._support.log import log_line, warn

_WEIGHTS_OF_GROUP = 7
"""The bytes of a 16-bit group, as a multiple of its weights' bytes."""
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in host memory."""
_KEPT_FREE = 10
"""One part in so many of a tier is left free if no budget is given."""


def resolve_device(device: str | torch.device | Device, *, pin: bool) -> Device:
    """Return the device of this name, as PyTorch writes it too."""
    if isinstance(device, torch.device):
        device = str(device)
    if not isinstance(device, str) and hasattr(device, "torch_device"):
        return device
    if not isinstance(device, str):
        raise InvalidInput(f"device must be a text like 'emulated' or 'cuda:1', found {device!r}")
    if device in ("cpu", "emulated"):
        return CpuDevice(name=device, keeps_host_memory=device == "emulated")
    if device.partition(":")[0] == "cuda":
        return cuda_device(device, pin=pin)
    raise InvalidInput(f"device must be 'cpu', 'emulated', 'cuda' or one CUDA device like 'cuda:1', found {device!r}")


def tier_budgets(device: Device, budget: Budget, sharers: int) -> tuple[Tier, ...]:
    """Return the tiers, fastest first; of what several processes share, each tier has this process's part only."""
    host = budget.host_bytes
    if host is None:
        free = available_bytes()
        host = free - free // _KEPT_FREE
    host //= sharers
    disk = () if budget.disk_bytes is None else (Tier("disk", budget.disk_bytes // sharers & -128),)
    if device.name == "cpu":
        if budget.device is not None:
            raise InvalidInput("Budget.device must be None for device='cpu': its memory is Budget.host")
        return (Tier("host", host & -128 if disk else host), *disk)
    return (Tier("device", _device_bytes(device, budget) & -128), Tier("host", host), *disk)


def _device_bytes(device: Device, budget: Budget) -> int:
    found = device.memory_bytes()
    if found is None:
        if budget.device_bytes is None:
            raise InvalidInput(f"device={device.name!r} needs Budget(device=...): how large the accelerator is to be")
        return budget.device_bytes
    free, whole = found
    if budget.device_bytes is None:
        return free - free // _KEPT_FREE
    if budget.device_bytes > whole:
        raise InvalidInput(
            f"Budget(device=...) is {budget.device_bytes:,} bytes, but {device.torch_device} has {whole:,}, of which "
            f"{free:,} are free; None takes what is free, less a tenth"
        )
    return budget.device_bytes


def largest_transient_group_bytes(tiers: tuple[Tier, ...]) -> int:
    """Return the limit for one group's weights: the compute tier, or a seventh of the host tier above a disk."""
    sizes = [tiers[0].capacity_bytes] * (tiers[0].name == "device")
    if tiers[-1].name == "disk":
        sizes.append(tiers[-2].capacity_bytes // _WEIGHTS_OF_GROUP)
    return min(sizes)


def disk_file(budget: Budget) -> DiskFile | None:
    """Return the disk tier's file; None if the budget has no disk."""
    if budget.disk_dir is None:
        return None
    file = DiskFile(budget.disk_dir)
    how = "past the page cache" if file.direct else "through the page cache, for the file system has no O_DIRECT"
    log_line(f"disk tier: {file.name}, {how}; it has no name in its folder, and goes with the process")
    kind = _file_system(budget.disk_dir)
    if kind in _IN_MEMORY:
        _warn_of_memory(budget.disk_dir, kind)
    return file


@cache
def _warn_of_memory(directory: str, kind: str) -> None:
    """Warn, once for each directory, that the disk tier is in host memory."""
    warn(
        f"Budget.disk_dir: {directory!r} is on a {kind}, which keeps files in host memory: the disk tier takes memory "
        "there, and Budget.host does not count it; choose a directory on a disk"
    )


def _file_system(directory: str) -> str:
    """Return the kind of a directory's file system by its name in Linux; "" if the system does not say."""
    try:
        device = os.stat(directory).st_dev
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace")
    except OSError:
        return ""
    rows = [row.split() for row in mounts.splitlines()]
    number = f"{os.major(device)}:{os.minor(device)}"
    return next((row[row.index("-") + 1] for row in rows if row[2] == number), "")


def available_bytes() -> int:
    """Return the memory that this process may still take, by the system's figures and its control group's."""
    return min(_limits())


def _limits() -> Iterator[int]:
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found:
        yield int(found[1]) * 1024
    else:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, used = Path(limit).read_text().strip(), Path(usage).read_text().strip()
        except OSError:
            continue
        if most != "max":
            yield max(0, int(most) - int(used))

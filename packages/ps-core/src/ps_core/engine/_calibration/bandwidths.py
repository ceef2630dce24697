"""Measure bytes a second: optimizer steps, norms, copies, links, the disk."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import ps_kernels
from ps_core.engine._calibration.cpu_caches import last_cache
from ps_core.engine._calibration.probes import Probe
from ps_core.engine._devices.select import available_bytes

_CPU = torch.device("cpu")
_PARAMETERS = 2**24
"""The least number of parameters of the measured step on a CPU; a device has eight times as many."""
_BLOCK_BYTES = 2**26
_CACHE_SIZES = 4
"""Steps, and copies to and from a device, use this many times the bytes of the processor's last cache.

Some servers' caches hold 300 MiB. Data that stayed in them made memory look a sixth faster than it is.
"""
_PARAMETER_BYTES = 14
"""Bytes of a parameter in a step on the CPU: weight and states in fp32, the gradient in 16 bits."""
_LAUNCHES = 8
"""Launches in a row on a device: a single launch and the wait for it took two fifths as long as a step's work."""
_SMALL_BYTES, _SMALL_COPIES = 4096, 50
_DISK_BYTES = 2**28


def _bytes_beyond_caches() -> int:
    """Return how many bytes no cache holds; four probes take so many, so at most a sixteenth of the free memory."""
    return min(_CACHE_SIZES * last_cache().bytes, available_bytes() // 16)


def _launches(device: torch.device) -> int:
    """Return how often a sample repeats its work."""
    return _LAUNCHES if device.type == "cuda" else 1


class StepRate:
    """Measure the bandwidth of an Adam step: 28 bytes a parameter."""

    def __init__(self, device: torch.device) -> None:
        on_device = device.type == "cuda"
        self._numel = 8 * _PARAMETERS if on_device else max(_PARAMETERS, _bytes_beyond_caches() // _PARAMETER_BYTES)
        p, m, v = (torch.rand(self._numel, dtype=torch.float32, device=device) for _ in range(3))
        grad = torch.rand(self._numel, dtype=torch.float32, device=device).bfloat16()
        self._steps = _launches(device)

        def run() -> None:
            for _ in range(self._steps):
                ps_kernels.adam_step(p, m, v, grad, grad, step=10, lr=1e-3, weight_decay=0.1)

        self.probe = Probe(f"optimizer step on {device.type}", run, device)

    @property
    def moved_bytes(self) -> int:
        """Return how many bytes are read and written in a sample."""
        return 28 * self._numel * self._steps

    def rate(self) -> float:
        """Return the bytes a second."""
        return self.moved_bytes / self.probe.seconds


class HostTraffic:
    """Measure the host memory's bandwidth: an Adam step on all cores, with copies in both directions at the same
    time.
    """

    def __init__(self, device: torch.device) -> None:
        self._step, self._links, self._device = StepRate(_CPU), Links(device), device
        self._rates: list[float] = []
        self.probe = Probe("steps beside copies", self._run, device)

    def _run(self) -> None:
        moved_bytes, start = 0, time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # the step lets go of the interpreter's lock
            steps = pool.submit(self._take_steps)
            while not steps.done():
                moved_bytes += self._links.both_ways()
        moved_bytes += steps.result()
        self._rates.append(moved_bytes / (time.perf_counter() - start))

    def _take_steps(self) -> int:
        """Take as many steps as copies need to reach their rate; return the bytes read and written."""
        steps = _launches(self._device)
        for _ in range(steps):
            self._step.probe.work()
        return steps * self._step.moved_bytes

    def rate(self) -> float:
        """Return the upper quartile of the bytes a second, all reads and writes together."""
        return sorted(self._rates)[3 * (len(self._rates) - 1) // 4]


class NormRate:
    """Measure the bandwidth of the norm of gradients in 16 bits."""

    def __init__(self) -> None:
        grad = torch.rand(2 * _PARAMETERS, dtype=torch.float32, device="cpu").bfloat16()
        out = torch.zeros(2, dtype=torch.float32, device="cpu")
        self._bytes = grad.nbytes
        self.probe = Probe("norm", lambda: ps_kernels.sumsq_finite(grad, out))

    def rate(self) -> float:
        """Return the bytes a second."""
        return self._bytes / self.probe.seconds


class CopyRate:
    """Measure the bandwidth of copies within a device's memory."""

    def __init__(self, device: torch.device) -> None:
        source = torch.rand(_BLOCK_BYTES // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        self._copies = _launches(device)

        def run() -> None:
            for _ in range(self._copies):
                target.copy_(source)

        self.probe = Probe("copy in memory", run, device)

    def rate(self) -> float:
        """Return the bytes copied a second."""
        return self._copies * _BLOCK_BYTES / self.probe.seconds


class Links:
    """Measure the links to and from the device, and the latency of the smallest copy.

    Where the CPU stands in for the device, a link is a copy in memory.
    """

    def __init__(self, device: torch.device) -> None:
        on_device = device.type == "cuda"
        blocks = max(1, -(-_bytes_beyond_caches() // _BLOCK_BYTES)) if on_device else 1
        arena = ps_kernels.PinnedArena(blocks * _BLOCK_BYTES, pin=on_device)
        self._blocks = [arena.tensor(place * _BLOCK_BYTES, _BLOCK_BYTES, torch.uint8) for place in range(blocks)]
        for block in self._blocks:
            block.zero_()
        host, there = self._blocks[0], torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._there, self._device, self._copies_begun = there, device, 0
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_device else []  # type: ignore[no-untyped-call]
        self._copies = _launches(device)

        def small() -> None:
            for _ in range(_SMALL_COPIES):
                there[:_SMALL_BYTES].copy_(host[:_SMALL_BYTES], non_blocking=True)

        self.probes = [
            Probe("link up", lambda: self.up(self._copies), device),
            Probe("link down", lambda: self.down(self._copies), device),
            Probe("small copies", small, device),
        ]

    def up(self, times: int = 1) -> None:
        """Launch copies to the device."""
        for _ in range(times):
            self._there.copy_(self._next_block(), non_blocking=True)

    def down(self, times: int = 1) -> None:
        """Launch copies from the device."""
        for _ in range(times):
            self._next_block().copy_(self._there, non_blocking=True)

    def _next_block(self) -> torch.Tensor:
        """Return the blocks of host memory in turn, so that no cache still holds the one that is returned."""
        self._copies_begun += 1
        return self._blocks[self._copies_begun % len(self._blocks)]

    def both_ways(self) -> int:
        """Copy in both directions, on a device at once; wait, and return the bytes of host memory read and written."""
        if self._device.type != "cuda":
            self.up()
            self.down()
            return 4 * _BLOCK_BYTES  # both sides of a copy are host memory
        half = _BLOCK_BYTES // 2
        for _ in range(_LAUNCHES):
            block = self._next_block()
            with torch.cuda.stream(self._streams[0]):
                self._there[:half].copy_(block[:half], non_blocking=True)
            with torch.cuda.stream(self._streams[1]):
                block[half:].copy_(self._there[half:], non_blocking=True)
        torch.cuda.synchronize(self._device)
        return _LAUNCHES * _BLOCK_BYTES

    def rates(self) -> tuple[float, float, float]:
        """Return the bytes a second up and down, and the latency in seconds."""
        up, down, small = (probe.seconds for probe in self.probes)
        return self._copies * _BLOCK_BYTES / up, self._copies * _BLOCK_BYTES / down, small / _SMALL_COPIES


def disk_rates() -> tuple[float, float]:
    """Return the bytes read and written a second of a file here, past the page cache where that is possible."""
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "calibrate"
        start = time.perf_counter()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            write = _DISK_BYTES / (time.perf_counter() - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(2**23):
                pass
        return _DISK_BYTES / (time.perf_counter() - start), write

"""How fast this computer is: links, optimizer steps, norms, copies and matrix work, measured in less than a minute.

    python -m ps_core.engine._calibrate

prints a machine file; the lines that begin with # are figures that a plan does not use.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import ps_kernels
from ps_core._simulate.machine import Machine, default_machine

_PARAMETERS = 2**24
"""Of the optimizer step: far more than caches hold, on a computer; a device takes eight times as many."""
_BLOCK_BYTES = 2**26
_DISK_BYTES = 2**28
_ROUNDS = 5
_LONGEST_S = 2.0
"""For one figure."""
_TOKENS = (128, 512)
_HIDDEN = 512


def calibrate(device: torch.device) -> tuple[Machine, list[str]]:
    """The machine, and more figures in words."""
    on_cuda = device.type == "cuda"
    base = _base(device)
    host, norm = _host_rates()
    h2d, d2h, latency = _links(device)
    rate, overhead = _matmul(device, torch.bfloat16)
    rate_fp32, _ = _matmul(device, torch.float32)
    read, write = _disk_rates()
    copied = _copy_rate(device)
    more = [
        f"norm of bf16 gradients: {norm / 1e9:.1f} GB/s",
        f"copies in memory of {device.type}, reads and writes together: {copied / 1e9:.1f} GB/s",
    ]
    name = torch.cuda.get_device_name(device) if on_cuda else platform.processor() or "this computer"
    found = replace(
        base,
        name=f"{name}, calibrated",
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        matmul_flops=rate,
        matmul_flops_fp32=rate_fp32,
        device_bandwidth=_step_rate(device) if on_cuda else host,
        h2d_bandwidth=h2d,
        d2h_bandwidth=d2h,
        host_bandwidth=host,
        disk_read_bandwidth=read,
        disk_write_bandwidth=write,
        latency_s=latency,
        moment_overhead_s=overhead,
    )
    return found, more


def _base(device: torch.device) -> Machine:
    """The built-in machine whose other figures (between processes) are taken over."""
    if device.type != "cuda":
        return default_machine(0)
    whole = torch.cuda.get_device_properties(device).total_memory
    return replace(default_machine(whole), memory_bytes=whole)


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """The median, after one that is not counted; of fewer where each takes long."""
    times: list[float] = []
    work()
    while len(times) < rounds and (not times or sum(times) < _LONGEST_S):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step_rate(device: torch.device) -> float:
    """Bytes a second of an Adam step: 28 a parameter."""
    numel = _PARAMETERS * (8 if device.type == "cuda" else 1)
    p, m, v = (torch.rand(numel, device=device) for _ in range(3))
    grad = torch.rand(numel, device=device).bfloat16()
    elapsed = _seconds(lambda: ps_kernels.adam_step(p, m, v, grad, grad, step=10, lr=1e-3, weight_decay=0.1), device)
    return 28 * numel / elapsed


def _host_rates() -> tuple[float, float]:
    """Of Adam and of the norm, on the CPU."""
    cpu = torch.device("cpu")
    grad, out = torch.rand(2 * _PARAMETERS).bfloat16(), torch.zeros(2)
    norm = _seconds(lambda: ps_kernels.sumsq_finite(grad, out), cpu)
    return _step_rate(cpu), grad.nbytes / norm


def _copy_rate(device: torch.device) -> float:
    source = torch.rand(_BLOCK_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _links(device: torch.device) -> tuple[float, float, float]:
    """Up, down, and what even the smallest copy takes. Where the CPU plays the device a link is a copy in memory."""
    host = ps_kernels.PinnedArena(_BLOCK_BYTES, pin=device.type == "cuda").tensor(0, _BLOCK_BYTES, torch.uint8)
    host.zero_()
    there = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=device)
    up = _seconds(lambda: there.copy_(host, non_blocking=True), device)
    down = _seconds(lambda: host.copy_(there, non_blocking=True), device)
    small = _seconds(lambda: there[:4096].copy_(host[:4096], non_blocking=True), device, rounds=50)
    return _BLOCK_BYTES / up, _BLOCK_BYTES / down, small


class _Block(nn.Module):
    """A transformer's block without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_HIDDEN)
        self.wide, self.narrow = nn.Linear(_HIDDEN, 4 * _HIDDEN), nn.Linear(4 * _HIDDEN, _HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual MLP."""
        moved: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return moved


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second inside a block, forward and backward, and the seconds a moment takes besides.

    From two lengths: what grows with the tokens is work, what does not is overhead.
    """
    scale = 16 if device.type == "cuda" else 1
    blocks = nn.Sequential(*(_Block() for _ in range(4))).to(device, dtype)
    parameters = sum(parameter.numel() for parameter in blocks.parameters())
    times = []
    for tokens in _TOKENS:
        x = torch.rand(tokens * scale, _HIDDEN, device=device, dtype=dtype)

        def run(x: torch.Tensor = x) -> None:
            blocks(x).sum().backward()

        times.append(_seconds(run, device))
    few, many = (6.0 * parameters * tokens * scale for tokens in _TOKENS)
    rate = (many - few) / max(times[1] - times[0], 0.25 * times[1])
    overhead = max(0.0, times[0] - few / rate) / (2 * len(blocks))
    return rate, min(overhead, 1.0)


def _disk_rates() -> tuple[float, float]:
    """Of a file here, past what the system keeps in memory where it can be told to."""
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


def main() -> int:
    """Print the machine file."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found, more = calibrate(device)
    sys.stdout.write("".join(f"# {line}\n" for line in more) + found.to_toml())
    return 0


if __name__ == "__main__":
    sys.exit(main())

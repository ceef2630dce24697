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
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ps_kernels
from ps_core._options import AdamW, Budget, Options
from ps_core._simulate.costs import COUNTED
from ps_core._simulate.machine import Machine, default_machine
from ps_core.engine._chunked import chunked
from ps_core.engine._management import management_of
from ps_core.engine._pilot import Pilot
from ps_core.engine._statistics import statistics as engine_statistics
from ps_core.engine._surgery import release

_PARAMETERS = 2**24
"""Of the optimizer step: far more than caches hold, on a computer; a device takes eight times as many."""
_BLOCK_BYTES = 2**26
_DISK_BYTES = 2**28
_ROUNDS = 5
_LONGEST_S = 2.0
"""For one figure."""
_TOKENS = (256, 768)
_LENGTH = 64
_HIDDEN, _HEADS, _BLOCKS = 384, 6, 4
_TINY_HIDDEN, _TINY_BLOCKS, _TINY_BUDGET = 32, 8, 2**19
"""Of a model that hardly computes, so that what is left is the engine's own work."""
_GROUP_BYTES = (2**15, 2**11)


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
        f"copies in memory of {device.type}, reads and writes together: {2 * copied / 1e9:.1f} GB/s",
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
    if not on_cuda:
        moment, tensor, instruction = _own_work()
        found = replace(
            found,
            moment_overhead_s=moment,
            tensor_overhead_s=tensor,
            instruction_overhead_s=instruction,
            played_copy_bandwidth=copied,
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
    return source.nbytes / _seconds(lambda: target.copy_(source), device)


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
    """A transformer's block, recomputed in backward."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.joint, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.wide, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, MLP."""
        found: torch.Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return found

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.joint(self.before(x)).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        moved: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return moved


class _Blocks(nn.Module):
    """Some of them; what it returns is a loss."""

    def __init__(self, blocks: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.first = nn.Linear(hidden, hidden)  # so that recomputed blocks have an input with a gradient
        self.blocks = nn.Sequential(*(_Block(hidden, heads) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares."""
        made: torch.Tensor = self.blocks(self.first(x))
        return made.float().square().mean()


def _matmul(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second inside a block, forward and backward, and the seconds a moment takes besides.

    From two amounts of tokens: what grows with them is work, what does not is overhead. Recomputed blocks take 8
    operations a parameter and token, which is how the engine counts.
    """
    scale = 16 if device.type == "cuda" else 1
    model = _Blocks(_BLOCKS, _HIDDEN, _HEADS).to(device, dtype)
    work = 8.0 * sum(each.numel() for each in model.blocks.parameters())
    work += 6.0 * sum(each.numel() for each in model.first.parameters())
    times = []
    for tokens in _TOKENS:
        x = torch.rand(tokens * scale // _LENGTH, _LENGTH, _HIDDEN, device=device, dtype=dtype)

        def run(x: torch.Tensor = x) -> None:
            model(x).backward()
            model.zero_grad()

        times.append(_seconds(run, device))
    few, many = (work * tokens * scale for tokens in _TOKENS)
    rate = (many - few) / max(times[1] - times[0], 0.25 * times[1])
    overhead = max(0.0, times[0] - few / rate) / (2 * (_BLOCKS + 1))
    return rate, min(overhead, 1.0)


def _own_work() -> tuple[float, float, float]:
    """Seconds of a moment, of a tensor in it, and of a step or norm: the engine's own work and that of small operators.

    From groups of a block and groups of a tensor: the operators are the same, the moments are not, nor how often they
    read a tensor.
    """
    few, many = _tiny(_GROUP_BYTES[0]), _tiny(_GROUP_BYTES[1])
    instruction = few.step_s / max(1, few.steps)
    first, second = (max(0.0, each.passes_s - each.norms * instruction) for each in (few, many))
    both = many.moments * few.tensors - few.moments * many.tensors
    moment = (second * few.tensors - first * many.tensors) / both
    tensor = (first * many.moments - second * few.moments) / both
    return max(0.0, moment), max(0.0, tensor), instruction


class _Tiny(NamedTuple):
    """What a model that hardly computes takes, and of how many parts that is the time."""

    passes_s: float
    step_s: float
    moments: int
    tensors: int
    norms: int
    steps: int


def _tiny(group_bytes: int) -> _Tiny:
    with torch.random.fork_rng(devices=[]):
        model = _Blocks(_TINY_BLOCKS, _TINY_HIDDEN, 2)
        options = Options(group_bytes=group_bytes)
        budget = Budget(device=_TINY_BUDGET, host=2**26)
        managed, optimizer = chunked(model, AdamW(lr=0.0), device="emulated", budget=budget, options=options)
    assert optimizer is not None, "one was asked for"
    x = torch.zeros(1, 16, _TINY_HIDDEN)

    def run() -> None:
        managed(x).backward()
        optimizer.step()

    run()
    run()
    times = []
    for _ in range(4 * _ROUNDS):
        run()
        times.append(engine_statistics(managed).step_time_s)
    pilot = management_of(managed).pilot
    assert isinstance(pilot, Pilot), "there is one process"
    planned = pilot.planned
    assert planned is not None, "it fits, and was traced"
    norms, steps = (
        sum(isinstance(instr.op, COUNTED) for instr in planned.plan.segment(name).instrs)
        for name in planned.program.iteration()
    )
    release(managed)
    moments = planned.program.trace.moments
    return _Tiny(
        passes_s=statistics.median(row["forward"] + row["backward"] for row in times),
        step_s=statistics.median(row["step"] for row in times),
        moments=len(moments),
        tensors=sum(len(moment.reads) + len(moment.grads) for moment in moments),
        norms=norms,
        steps=steps,
    )


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

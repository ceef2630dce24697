"""Measure how fast this computer is: links, optimizer steps, norms, copies, matrix work.

    python -m ps_core.engine._calibrate

prints a machine file, in less than a minute. Lines that begin with # are figures that a plan does not use. They also
say how steady the others are.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from ps_core._simulate.machine import Machine, default_machine
from ps_core.engine._calibration.bandwidths import CopyRate, HostTraffic, Links, NormRate, StepRate, disk_rates
from ps_core.engine._calibration.engine_overhead import Bookkeeping, Launching
from ps_core.engine._calibration.operators import Operators
from ps_core.engine._calibration.probes import BUSY, Row, collect, steadiness
from ps_core.engine._calibration.transformer_blocks import OnADevice, OnTheCpu

_ROUNDS = 12
_OWN = ("moment_overhead_s", "tensor_overhead_s", "instruction_overhead_s", "move_overhead_s")
"""Fields of `Machine` for the engine's own work on the CPU: differences of times, 0 where noise was larger."""


def calibrate(device: torch.device, between: Callable[[], object] | None = None) -> tuple[Machine, list[str]]:
    """Measure this computer; return its `Machine` and notes. ``between`` is called before each round of probes."""
    cpu = torch.device("cpu")
    host, norm, links, copies = StepRate(cpu), NormRate(), Links(device), CopyRate(device)
    traffic = HostTraffic(device)
    rows: list[Row] = [[host.probe], [norm.probe], links.probes, [copies.probe], [traffic.probe]]
    notes: list[str] = []

    def measure() -> None:
        collect(rows, _ROUNDS, between)

    if device.type == "cuda":
        found = _of_a_device(device, rows, measure)
    else:
        found = _of_a_cpu(rows, measure, host, copies, notes)
    read, write = disk_rates()
    up, down, latency = links.rates()
    hidden = [name for name in ("element_s", "element_fp32_s") if device.type == "cpu" and not getattr(found, name)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "this computer"
    found = replace(
        found,
        name=f"{name}, calibrated",
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        h2d_bandwidth=up,
        d2h_bandwidth=down,
        host_bandwidth=host.rate(),
        host_dram_bandwidth=max(host.rate(), traffic.rate()),  # one thread may reach the whole bandwidth
        disk_read_bandwidth=read,
        disk_write_bandwidth=write,
        latency_s=latency,
    )
    return found, [
        f"norm of bf16 gradients: {norm.rate() / 1e9:.1f} GB/s",
        f"copies in memory of {device.type}, reads and writes together: {2 * copies.rate() / 1e9:.1f} GB/s",
        *notes,
        *steadiness(rows),
        *(f"{BUSY}noise hid what elements take beside products: {name} is 0 for that" for name in hidden),
    ]


def _of_a_device(device: torch.device, rows: list[Row], measure: Callable[[], None]) -> Machine:
    """Measure a device. Its built-in machine gives what cannot be measured."""
    step, bf16, fp32 = StepRate(device), OnADevice(device, torch.bfloat16), OnADevice(device, torch.float32)
    launching = Launching(str(device))
    rows += [[step.probe], [bf16.probe], [fp32.probe], launching.probes]
    measure()
    found = torch.cuda.get_device_properties(device)
    whole = found.total_memory
    flops, element_s = bf16.fit(step.rate())
    flops_fp32, element_fp32_s = fp32.fit(step.rate())
    launch_s, tensor_overhead_s = launching.fit()
    return replace(
        default_machine(whole, found.name),
        memory_bytes=whole,
        matmul_flops=flops,
        matmul_flops_fp32=flops_fp32,
        device_bandwidth=step.rate(),
        element_s=element_s,
        element_fp32_s=element_fp32_s,
        moment_overhead_s=0.0,  # what a moment takes besides is launching
        launch_s=launch_s,
        tensor_overhead_s=tensor_overhead_s,
    )


def _of_a_cpu(
    rows: list[Row], measure: Callable[[], None], host: StepRate, copies: CopyRate, notes: list[str]
) -> Machine:
    """Return the machine of a CPU that stands in for the device; append to ``notes`` what was measured with."""
    bf16, fp32, own = OnTheCpu(torch.bfloat16), OnTheCpu(torch.float32), Bookkeeping()
    ops, ops_fp32 = Operators(torch.bfloat16), Operators(torch.float32)
    rows += [bf16.probes, fp32.probes, *own.rows, *ops.rows, *ops_fp32.rows]
    measure()
    slow, slow_fp32, work = ops.fit(), ops_fp32.fit(), own.fit()
    rate, element = bf16.fit(copies.rate(), slow)
    rate_fp32, element_fp32 = fp32.fit(copies.rate(), slow_fp32)
    notes += [bf16.note, fp32.note]
    return replace(
        default_machine(0),
        matmul_flops=rate,
        matmul_flops_fp32=rate_fp32,
        device_bandwidth=host.rate(),
        moment_overhead_s=work.moment,
        tensor_overhead_s=work.tensor,
        instruction_overhead_s=work.instruction,
        move_overhead_s=work.move,
        element_s=element,
        element_fp32_s=element_fp32,
        attention_flops=slow.attention_flops,
        attention_flops_fp32=slow_fp32.attention_flops,
        query_s=slow.query_s,
        query_fp32_s=slow_fp32.query_s,
        query_backward_s=slow.query_backward_s,
        query_backward_fp32_s=slow_fp32.query_backward_s,
        tanh_s=slow.tanh_s,
        tanh_fp32_s=slow_fp32.tanh_s,
        played_copy_bandwidth=copies.rate(),
    )


def main() -> int:
    """Print the machine file. If noise hid a figure, measure once more; if it does so again, say so instead."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    lost: list[str] = []
    for _ in range(2):
        found, more = calibrate(device)
        lost = [] if device.type == "cuda" else [name for name in _OWN if not getattr(found, name)]
        if not lost:
            sys.stdout.write("".join(f"# {line}\n" for line in more) + found.to_toml())
            return 0
    sys.stderr.write(
        f"{', '.join(lost)} came out as 0, twice: the machine is too busy to measure it; calibrate when nothing else "
        "runs, or plan with a built-in machine\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

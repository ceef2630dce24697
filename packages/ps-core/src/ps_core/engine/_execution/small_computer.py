"""Describe the computer that emulated devices are planned with."""

from __future__ import annotations

from dataclasses import replace

from ps_core._simulate.machine import Machine

SMALL_COMPUTER = Machine(
    name="a small computer",
    memory_bytes=0,
    host_memory_bytes=16 * 2**30,
    matmul_flops=1e12,
    matmul_flops_fp32=0.3e12,
    device_bandwidth=20e9,
    h2d_bandwidth=10e9,
    d2h_bandwidth=10e9,
    host_bandwidth=20e9,
    disk_read_bandwidth=1e9,
    disk_write_bandwidth=1e9,
    collective_bandwidth=5e9,
    internode_bandwidth=1e9,
)
"""Rates of a small computer, with which emulated devices are planned."""
ONE_THREAD = replace(SMALL_COMPUTER, played_copy_bandwidth=10e9)
"""The small computer without overlap: no two operations run at once, so unnecessary moves never pay."""
_ROOMY = 0.9
"""Everything fits if it needs no more than this fraction of the first tier: a pass may exceed the plan."""


def emulated_on(homes_bytes: int, nonmodel_bytes: int, capacity_bytes: int) -> Machine:
    """Return the machine to plan with: without overlap if home slots and non-model bytes fit on the device."""
    return ONE_THREAD if homes_bytes + nonmodel_bytes <= _ROOMY * capacity_bytes else SMALL_COMPUTER

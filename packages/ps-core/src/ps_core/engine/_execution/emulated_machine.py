"""The computer that emulated devices are planned with."""

from __future__ import annotations

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
"""Rates of a small computer whose CPU plays the accelerator: what an emulated device is planned with."""

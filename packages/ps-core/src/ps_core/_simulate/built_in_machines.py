"""List machines that come with the simulator.

Every figure is one that real code reaches, not a data sheet's. For five cards it is estimated from the sheet. Matrix
work inside a transformer reaches about 45-60 % of the data sheet, memory and links about 85-90 %. Predictions from
these figures should rather be too slow.
"""

from __future__ import annotations

from ps_core._simulate.rates import Machine

GIB = 2**30
TERA = 1e12
GIGA = 1e9

# Host rates: a dual-socket server with 12-16 DDR4 channels sheets 280-400 GB/s and streams 150-200 in an update whose
# reads and writes mix; DDR5 servers about half as much again. A desktop's two channels sheet 50-90 and stream 35-60.
# Disks: a good NVMe drive per node, sustained (not its cache). Between nodes: one InfiniBand adapter (100 Gbit/s with
# V100, 200 with A100, 400 later) shared as each generation's usual node shares it, at about 80 %.
_BUILT_IN = (
    # 125 TFLOP/s sheet (fp16; no bf16 units), about 60 reached per GPU in published runs; HBM2 900 GB/s; PCIe 3 x16;
    # NVLink 2, 130-150 GB/s bus bandwidth over 8 GPUs, of which a ring all-gather sends about 110 under load.
    Machine(
        name="v100",
        memory_bytes=32 * GIB,
        host_memory_bytes=240 * GIB,
        matmul_flops=60 * TERA,
        matmul_flops_fp32=13 * TERA,
        device_bandwidth=780 * GIGA,
        h2d_bandwidth=12 * GIGA,
        d2h_bandwidth=12 * GIGA,
        host_bandwidth=150 * GIGA,
        disk_read_bandwidth=2.5 * GIGA,
        disk_write_bandwidth=1.5 * GIGA,
        collective_bandwidth=110 * GIGA,
        internode_bandwidth=2.5 * GIGA,
    ),
    # 312 TFLOP/s sheet; 150-190 reached in large transformers; HBM2 1,555 GB/s; PCIe 4 x16; NVLink 3 (300 GB/s each
    # way sheet, about 220 in collectives).
    Machine(
        name="a100-40",
        memory_bytes=40 * GIB,
        host_memory_bytes=1000 * GIB,
        matmul_flops=160 * TERA,
        matmul_flops_fp32=17 * TERA,
        device_bandwidth=1350 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=200 * GIGA,
        disk_read_bandwidth=5 * GIGA,
        disk_write_bandwidth=3 * GIGA,
        collective_bandwidth=220 * GIGA,
        internode_bandwidth=20 * GIGA,
    ),
    # The same chip with HBM2e, 1,935-2,039 GB/s.
    Machine(
        name="a100-80",
        memory_bytes=80 * GIB,
        host_memory_bytes=1000 * GIB,
        matmul_flops=170 * TERA,
        matmul_flops_fp32=17 * TERA,
        device_bandwidth=1700 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=200 * GIGA,
        disk_read_bandwidth=5 * GIGA,
        disk_write_bandwidth=3 * GIGA,
        collective_bandwidth=220 * GIGA,
        internode_bandwidth=20 * GIGA,
    ),
    # 989 TFLOP/s sheet (SXM); large matrix products reach 600-700, training blocks 400-550; HBM3 3,350 GB/s; PCIe 5
    # x16; NVLink 4 (450 GB/s each way sheet). A little under the H200, whose memory feeds the same chip better. Listed
    # after the A100 with as much memory, so that 80 GiB alone is taken for the slower of the two.
    Machine(
        name="h100",
        memory_bytes=80 * GIB,
        host_memory_bytes=2000 * GIB,
        matmul_flops=500 * TERA,
        matmul_flops_fp32=45 * TERA,
        device_bandwidth=2900 * GIGA,
        h2d_bandwidth=50 * GIGA,
        d2h_bandwidth=50 * GIGA,
        host_bandwidth=250 * GIGA,
        disk_read_bandwidth=6 * GIGA,
        disk_write_bandwidth=4 * GIGA,
        collective_bandwidth=330 * GIGA,
        internode_bandwidth=40 * GIGA,
    ),
    # 989 TFLOP/s sheet, large bf16 products measured near 790; HBM3e 4,800 GB/s; PCIe 5 x16 (64 GB/s sheet). The host
    # figure is what 16-48 cores of a DDR5 server stream.
    Machine(
        name="h200",
        memory_bytes=140 * GIB,
        host_memory_bytes=1500 * GIB,
        matmul_flops=600 * TERA,
        matmul_flops_fp32=45 * TERA,
        device_bandwidth=4100 * GIGA,
        h2d_bandwidth=55 * GIGA,
        d2h_bandwidth=55 * GIGA,
        host_bandwidth=200 * GIGA,
        disk_read_bandwidth=6 * GIGA,
        disk_write_bandwidth=4 * GIGA,
        collective_bandwidth=330 * GIGA,
        internode_bandwidth=40 * GIGA,
    ),
    # Dense bf16 with fp32 accumulation sheets 165 TFLOP/s, 120-150 reached; GDDR6X 1,008 GB/s; PCIe 4 x16; a desktop
    # with two DDR5 channels; no NVLink: collectives cross PCIe through the host.
    Machine(
        name="rtx4090",
        memory_bytes=24 * GIB,
        host_memory_bytes=64 * GIB,
        matmul_flops=120 * TERA,
        matmul_flops_fp32=40 * TERA,
        device_bandwidth=880 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=50 * GIGA,
        disk_read_bandwidth=4 * GIGA,
        disk_write_bandwidth=2 * GIGA,
        collective_bandwidth=10 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # Desktop card with 8 GB: 60 TFLOP/s sheet (fp32 accumulation), 272 GB/s, PCIe 4 x8.
    Machine(
        name="rtx4060",
        memory_bytes=8 * GIB,
        host_memory_bytes=16 * GIB,
        matmul_flops=30 * TERA,
        matmul_flops_fp32=10 * TERA,
        device_bandwidth=235 * GIGA,
        h2d_bandwidth=12 * GIGA,
        d2h_bandwidth=12 * GIGA,
        host_bandwidth=40 * GIGA,
        disk_read_bandwidth=3 * GIGA,
        disk_write_bandwidth=1.5 * GIGA,
        collective_bandwidth=6 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # Laptop card with 6 GB, power-limited, PCIe 4 x8 to a machine with soldered or single-channel memory.
    Machine(
        name="laptop",
        memory_bytes=6 * GIB,
        host_memory_bytes=16 * GIB,
        matmul_flops=18 * TERA,
        matmul_flops_fp32=6 * TERA,
        device_bandwidth=170 * GIGA,
        h2d_bandwidth=10 * GIGA,
        d2h_bandwidth=10 * GIGA,
        host_bandwidth=30 * GIGA,
        disk_read_bandwidth=2 * GIGA,
        disk_write_bandwidth=1 * GIGA,
        collective_bandwidth=5 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # 65 TFLOP/s sheet (fp16; no bf16 units) at 70 W, which throttles to 20-28; GDDR6 300 GB/s (ECC on); PCIe 3 x16.
    Machine(
        name="t4",
        memory_bytes=16 * GIB,
        host_memory_bytes=48 * GIB,
        matmul_flops=22 * TERA,
        matmul_flops_fp32=4 * TERA,
        device_bandwidth=240 * GIGA,
        h2d_bandwidth=11 * GIGA,
        d2h_bandwidth=11 * GIGA,
        host_bandwidth=40 * GIGA,
        disk_read_bandwidth=1 * GIGA,
        disk_write_bandwidth=0.5 * GIGA,
        collective_bandwidth=6 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # The next five are estimates from sheets: half to two thirds of the matrix work, as the cards above reach. They are
    # listed after cards with as much memory, so that 16, 24 and 32 GiB alone are taken for those.
    # 362 TFLOP/s sheet at 350 W; GDDR6 864 GB/s; PCIe 4 x16; a server.
    Machine(
        name="l40s",
        memory_bytes=48 * GIB,
        host_memory_bytes=512 * GIB,
        matmul_flops=180 * TERA,
        matmul_flops_fp32=45 * TERA,
        device_bandwidth=750 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=200 * GIGA,
        disk_read_bandwidth=5 * GIGA,
        disk_write_bandwidth=3 * GIGA,
        collective_bandwidth=12 * GIGA,
        internode_bandwidth=10 * GIGA,
    ),
    # 209 TFLOP/s sheet (fp32 accumulation); GDDR7 1,792 GB/s; PCIe 5 x16.
    Machine(
        name="rtx5090",
        memory_bytes=32 * GIB,
        host_memory_bytes=64 * GIB,
        matmul_flops=140 * TERA,
        matmul_flops_fp32=55 * TERA,
        device_bandwidth=1550 * GIGA,
        h2d_bandwidth=45 * GIGA,
        d2h_bandwidth=45 * GIGA,
        host_bandwidth=55 * GIGA,
        disk_read_bandwidth=6 * GIGA,
        disk_write_bandwidth=3 * GIGA,
        collective_bandwidth=12 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # 97 TFLOP/s sheet (fp32 accumulation); GDDR6X 717 GB/s; PCIe 4 x16.
    Machine(
        name="rtx4080",
        memory_bytes=16 * GIB,
        host_memory_bytes=32 * GIB,
        matmul_flops=65 * TERA,
        matmul_flops_fp32=22 * TERA,
        device_bandwidth=620 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=50 * GIGA,
        disk_read_bandwidth=4 * GIGA,
        disk_write_bandwidth=2 * GIGA,
        collective_bandwidth=10 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # 71 TFLOP/s sheet (fp32 accumulation); GDDR6X 936 GB/s; PCIe 4 x16; two DDR4 channels.
    Machine(
        name="rtx3090",
        memory_bytes=24 * GIB,
        host_memory_bytes=64 * GIB,
        matmul_flops=45 * TERA,
        matmul_flops_fp32=18 * TERA,
        device_bandwidth=820 * GIGA,
        h2d_bandwidth=24 * GIGA,
        d2h_bandwidth=24 * GIGA,
        host_bandwidth=40 * GIGA,
        disk_read_bandwidth=3 * GIGA,
        disk_write_bandwidth=1.5 * GIGA,
        collective_bandwidth=10 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # 25 TFLOP/s sheet (fp32 accumulation); GDDR6 360 GB/s; PCIe 4 x16; two DDR4 channels.
    Machine(
        name="rtx3060",
        memory_bytes=12 * GIB,
        host_memory_bytes=32 * GIB,
        matmul_flops=16 * TERA,
        matmul_flops_fp32=7 * TERA,
        device_bandwidth=310 * GIGA,
        h2d_bandwidth=22 * GIGA,
        d2h_bandwidth=22 * GIGA,
        host_bandwidth=40 * GIGA,
        disk_read_bandwidth=3 * GIGA,
        disk_write_bandwidth=1.5 * GIGA,
        collective_bandwidth=8 * GIGA,
        internode_bandwidth=1 * GIGA,
    ),
    # No accelerator: "device" figures are the CPU's own, per process, for tiers host and host-disk. A desktop with
    # AVX-512 or AMX reaches 0.3 TFLOP/s a few cores in fp32 and two or three times that in bf16.
    Machine(
        name="cpu",
        memory_bytes=0,
        host_memory_bytes=64 * GIB,
        matmul_flops=1 * TERA,
        matmul_flops_fp32=0.4 * TERA,
        device_bandwidth=40 * GIGA,
        h2d_bandwidth=10 * GIGA,
        d2h_bandwidth=10 * GIGA,
        host_bandwidth=40 * GIGA,
        disk_read_bandwidth=2 * GIGA,
        disk_write_bandwidth=1 * GIGA,
        collective_bandwidth=5 * GIGA,
        internode_bandwidth=1 * GIGA,
        latency_s=5e-6,
        moment_overhead_s=50e-6,
        launch_s=0.0,
        tensor_overhead_s=0.0,
    ),
)

MACHINES = {entry.name: entry for entry in _BUILT_IN}
"""Built-in machines by name."""

NO_BF16 = ("v100", "t4")
"""Machines without units for bf16: their rate of 16-bit products holds for fp16 alone."""

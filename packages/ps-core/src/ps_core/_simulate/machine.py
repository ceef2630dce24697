"""How fast a machine is: the figures the simulator turns bytes and operations into seconds with.

Every built-in figure is one that real code reaches, not a data sheet's: about 45-60 % of the sheet for matrix work
inside a transformer, about 85-90 % for memory and links. A prediction made from them should err towards slow. Write a
TOML file with the same names to describe another machine; `Machine.to_toml` prints one to start from.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from ps_core._errors import InvalidInput

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates per second: operations (``_flops``) or bytes."""

    name: str
    memory_bytes: int
    """Of one accelerator, 0 for none. It finds the machine nearest to a budget, and is the budget if none is given."""
    host_memory_bytes: int
    """Of a usual node; likewise."""
    matmul_flops: float
    """16-bit matrix work inside a transformer block, of one GPU."""
    matmul_flops_fp32: float
    """The same in fp32 (TF32 where the hardware has it and torch is told to use it: not assumed here)."""
    device_bandwidth: float
    """Accelerator memory, reads and writes together."""
    h2d_bandwidth: float
    """Pinned host to device, of one GPU while the others copy too."""
    d2h_bandwidth: float
    host_bandwidth: float
    """Memory traffic the CPU of one node can stream in an optimizer step; its GPUs share it."""
    disk_read_bandwidth: float
    """Of one node."""
    disk_write_bandwidth: float
    collective_bandwidth: float
    """What one GPU sends in an all-gather within its node."""
    internode_bandwidth: float
    """One GPU's share of its node's network adapters."""
    latency_s: float = 20e-6
    """Before any copy, collective or memory-bound kernel gets going."""
    moment_overhead_s: float = 100e-6
    """Of a moment (a block's worth of kernels), beyond its matrix work."""
    played_copy_bandwidth: float = 0.0
    """Where the CPU plays the accelerator, and one thread does everything: what it copies, beside a link's time. 0:
    there is an accelerator."""
    instruction_overhead_s: float = 0.0
    """There, what each step, norm, sum and cast of a group takes the thread beside its work."""
    tensor_overhead_s: float = 0.0
    """There, what each tensor that a pass reads, or that gets its gradient, takes beside its work."""
    move_overhead_s: float = 0.0
    """There, what each copy, reservation, release and shift takes beside the bytes."""
    element_s: float = 0.0
    """Of a moment in 16 bits, for each element that operators other than matrix products read and write."""
    element_fp32_s: float = 0.0
    """The same in fp32."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or '"' in self.name or "\\" in self.name:
            raise InvalidInput(f"machine: name must be a plain text, found {self.name!r}")
        for key in NUMBERS:
            value = getattr(self, key)
            if (key in MAY_BE_ZERO or key.endswith("_s")) and value == 0 and not isinstance(value, bool):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise InvalidInput(f"machine {self.name!r}: {key} must be a number above 0, found {value!r}")
            low, high = (0, 1e3) if key.endswith("_s") else (1, 1e24)
            if not low <= value <= high:
                raise InvalidInput(f"machine {self.name!r}: {key} must be {low:g} to {high:g}, found {value!r}")
            if key.endswith("_bytes") and not isinstance(value, int):
                raise InvalidInput(f"machine {self.name!r}: {key} must be a whole number, found {value!r}")

    def to_toml(self) -> str:
        """A file that `machine_from_toml` reads back equal."""
        rows = [f'name = "{self.name}"', *(f"{key} = {_number(getattr(self, key))}" for key in NUMBERS)]
        return "\n".join(rows) + "\n"


NUMBERS = tuple(field.name for field in fields(Machine) if field.name != "name")
"""Every field but the name, in order."""
OPTIONAL = tuple(field.name for field in fields(Machine) if field.default is not MISSING)
MAY_BE_ZERO = ("memory_bytes", "played_copy_bandwidth")
"""Besides what takes time (``_s``)."""

UNSTEADY = ("spread: ", "busy machine: ")
"""How notes in a machine file begin that say what its figures are worth."""


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(value).replace("e+", "e")


def machine_from_toml(text: str, source: str = "machine file") -> Machine:
    """The machine a TOML document describes.

    Fields with a default may be left out; with ``base``, the name of a built-in machine, all others may be too.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput(f"{source}: not TOML: {' '.join(str(error).split())}") from error
    base = data.pop("base", None)
    if base is not None:
        if not isinstance(base, str) or base not in MACHINES:
            raise InvalidInput(f"{source}: unknown base {base!r} (known: {', '.join(MACHINES)})")
        known = {key: getattr(MACHINES[base], key) for key in NUMBERS}
        data = {"name": f"{base}, adapted", **known, **data}
    unknown = sorted(data.keys() - {"name", *NUMBERS})
    if unknown:
        raise InvalidInput(f"{source}: unknown key {unknown[0]!r} (known: base, name, {', '.join(NUMBERS)})")
    missing = [key for key in ("name", *NUMBERS) if key not in data and key not in OPTIONAL]
    if missing:
        raise InvalidInput(f"{source}: {missing[0]!r} is missing (or name a built-in machine as base)")
    if not isinstance(data["name"], str):
        raise InvalidInput(f"{source}: name must be a text, found {data['name']!r}")
    return Machine(**data)


def machine(name_or_path: str) -> Machine:
    """A built-in machine by name, or the one a TOML file describes."""
    if name_or_path in MACHINES:
        return MACHINES[name_or_path]
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.exists():
        raise InvalidInput(f"unknown machine {name_or_path!r} (known: {', '.join(MACHINES)}; or a .toml file)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(f"cannot read machine file {name_or_path!r}: {' '.join(str(error).split())}") from error
    return machine_from_toml(text, source=name_or_path)


def default_machine(device_memory_bytes: int) -> Machine:
    """The built-in machine whose accelerator memory is nearest, by ratio; no accelerator: the CPU."""
    if device_memory_bytes <= 0:
        return MACHINES["cpu"]
    accelerators = [entry for entry in MACHINES.values() if entry.memory_bytes]
    return min(accelerators, key=lambda entry: abs(math.log(device_memory_bytes / entry.memory_bytes)))


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
    ),
)

MACHINES = {entry.name: entry for entry in _BUILT_IN}
"""Built-in machines by name."""

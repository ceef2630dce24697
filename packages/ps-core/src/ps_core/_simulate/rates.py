"""Define the figures of a machine, which turn bytes and operations into seconds."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields

from ps_core._errors import InvalidInput
from ps_core._trace import Amounts, Moment


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
    """Memory traffic that the cores of one node stream in an optimizer step; its GPUs share it."""
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
    """Bytes a second that one thread copies on an emulated accelerator, beside a link's time. 0: there is an
    accelerator.
    """
    host_dram_bandwidth: float = 0.0
    """What the memory of one node gives where its cores stream and links copy beside them. 0: not known."""
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
    attention_flops: float = 0.0
    """16-bit attention by itself, between queries, keys and values. 0: as fast as matrix products."""
    attention_flops_fp32: float = 0.0
    query_s: float = 0.0
    """Of 16-bit attention, for each query of each head, beside its operations."""
    query_fp32_s: float = 0.0
    query_backward_s: float = 0.0
    """The same where attention is differentiated."""
    query_backward_fp32_s: float = 0.0
    tanh_s: float = 0.0
    """Of a moment in 16 bits, for each hyperbolic tangent (a GELU's tanh form), beside its elements."""
    tanh_fp32_s: float = 0.0

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

    def computing_s(self, amounts: Amounts | Moment, *, fp32: bool) -> float:
        """Return the seconds to compute these amounts, without a moment's overhead."""
        flops, element, attention, query, query_backward, tanh = self._fp32 if fp32 else self._16_bit
        return (
            (amounts.flops - amounts.attention_flops) / flops
            + amounts.attention_flops / (attention or flops)
            + amounts.elements * element
            + amounts.queries * query
            + amounts.queries_backward * query_backward
            + amounts.tanhs * tanh
        )

    @property
    def host_memory_bandwidth(self) -> float:
        """Return the bandwidth of one node's memory for cores and links together; if unknown, that of its cores."""
        return max(self.host_bandwidth, self.host_dram_bandwidth)

    @property
    def _16_bit(self) -> tuple[float, ...]:
        backward = self.query_backward_s
        return self.matmul_flops, self.element_s, self.attention_flops, self.query_s, backward, self.tanh_s

    @property
    def _fp32(self) -> tuple[float, ...]:
        attention, queries = self.attention_flops_fp32, (self.query_fp32_s, self.query_backward_fp32_s)
        return self.matmul_flops_fp32, self.element_fp32_s, attention, *queries, self.tanh_fp32_s

    def to_toml(self) -> str:
        """Return a TOML file that `machine_from_toml` reads back equal."""
        rows = [f'name = "{self.name}"', *(f"{key} = {_number(getattr(self, key))}" for key in NUMBERS)]
        return "\n".join(rows) + "\n"


NUMBERS = tuple(field.name for field in fields(Machine) if field.name != "name")
"""Every field but the name, in order."""
OPTIONAL = tuple(field.name for field in fields(Machine) if field.default is not MISSING)
MAY_BE_ZERO = (
    *("memory_bytes", "played_copy_bandwidth", "host_dram_bandwidth"),
    *("attention_flops", "attention_flops_fp32"),
)
"""Besides what takes time (``_s``)."""


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(value).replace("e+", "e")

"""Define the figures of a machine, which turn bytes and operations into seconds."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields

from ps_core._errors import InvalidInput
from ps_core._trace import Amounts, Moment
from ps_core._units import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates per second: operations (``_flops``) or bytes."""

    name: str
    memory_bytes: int
    """Bytes of one accelerator, 0 for none. It finds the machine nearest to a budget, and is the default budget."""
    host_memory_bytes: int
    """Bytes of a usual node; the default budget of the host."""
    matmul_flops: float
    """Operations a second of 16-bit matrix work inside a transformer block, on one GPU."""
    matmul_flops_fp32: float
    """The same in fp32 (TF32 only if PyTorch is told to use it, which is not assumed here)."""
    device_bandwidth: float
    """Bytes a second of accelerator memory, reads and writes together."""
    h2d_bandwidth: float
    """Bytes a second from pinned host memory to one GPU while the others copy too."""
    d2h_bandwidth: float
    host_bandwidth: float
    """Bytes a second that one node's cores stream in an optimizer step; its GPUs share them."""
    disk_read_bandwidth: float
    """Bytes a second of one node."""
    disk_write_bandwidth: float
    collective_bandwidth: float
    """Bytes a second that one GPU sends in an all-gather within its node."""
    internode_bandwidth: float
    """One GPU's share of its node's network adapters."""
    latency_s: float = 20e-6
    """Seconds before any copy, collective or memory-bound kernel begins."""
    moment_overhead_s: float = 100e-6
    """Seconds of a moment (a block's kernels) beyond its matrix work."""
    played_copy_bandwidth: float = 0.0
    """Bytes a second that one thread copies on an emulated accelerator, beside a link's time. 0: there is an
    accelerator.
    """
    host_dram_bandwidth: float = 0.0
    """Bytes a second of one node's memory when cores and links both use it. 0: not known."""
    launch_s: float = 50e-6
    """Seconds of the host thread to launch an operator on an accelerator, with the model's Python code around it."""
    tensor_overhead_s: float = 20e-6
    """Seconds that the engine takes for each tensor that a pass reads, or that gets its gradient."""
    instruction_overhead_s: float = 0.0
    """Seconds that the engine takes on an emulated accelerator for each step, norm, sum and cast of a group."""
    move_overhead_s: float = 0.0
    """Seconds that the engine takes there for each copy, reservation, release and shift, beside the bytes."""
    element_s: float = 0.0
    """Seconds for each element that operators other than matrix products read or write, in 16 bits."""
    element_fp32_s: float = 0.0
    """The same in fp32."""
    attention_flops: float = 0.0
    """Operations a second of 16-bit attention between queries, keys and values. 0: as for matrix products."""
    attention_flops_fp32: float = 0.0
    query_s: float = 0.0
    """Seconds of 16-bit attention for each query of each head, beside its operations."""
    query_fp32_s: float = 0.0
    query_backward_s: float = 0.0
    """The same in the backward of attention."""
    query_backward_fp32_s: float = 0.0
    tanh_s: float = 0.0
    """Seconds for each hyperbolic tangent (a GELU's tanh form) in 16 bits, beside its elements."""
    tanh_fp32_s: float = 0.0

    def __post_init__(self) -> None:
        if (
            not isinstance(self.name, str)
            or not self.name
            or not self.name.isprintable()
            or '"' in self.name
            or "\\" in self.name
        ):
            raise InvalidInput(f"machine: name must be a plain text, found {self.name!r}")
        for key in NUMBERS:
            value = getattr(self, key)
            zero = key in MAY_BE_ZERO or key.endswith("_s")
            if zero and value == 0 and not isinstance(value, bool):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                least = "of at least" if zero else "above"
                raise InvalidInput(f"machine {self.name!r}: {key} must be a number {least} 0, found {shown(value)}")
            low, high = (0, 1e3) if key.endswith("_s") else (1, 1e24)
            if not low <= value <= high:
                raise InvalidInput(f"machine {self.name!r}: {key} must be {low:g} to {high:g}, found {shown(value)}")
            if key.endswith("_bytes") and not isinstance(value, int):
                raise InvalidInput(f"machine {self.name!r}: {key} must be a whole number, found {shown(value)}")

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
"""Fields that may be zero, besides times (``_s``)."""


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(value).replace("e+", "e")

"""Choose what the memory of a node's accelerators travels by: their own links, or host memory that all of them share.

[Note: two ways]
NCCL sends over the links between accelerators, at the machine's ``collective_bandwidth``. By way of the host a shard
is copied down. The processor copies it into memory that all processes map, and out of it. Then it is copied up. Each
byte that a process gathers crosses host memory three times, and so does its own shard. The node's processes divide the
bandwidth. So cards with links of their own (NVLink) use NCCL. Cards on PCIe alone use the host where it is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core._simulate.rates import Machine

_CROSSINGS = 3
"""How often a byte that is gathered by way of the host crosses host memory."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What accelerators' memory travels by, and how fast."""

    by_host: bool
    """True: through host memory that the processes of the node share; False: by NCCL."""
    bandwidth: float
    """Bytes a second that one process receives, within a node."""
    why: str
    """Both ways, with their rates."""


def transport(machine: Machine, *, ranks: int, ranks_per_node: int) -> Transport:
    """Return the faster way for accelerators; between nodes it is NCCL."""
    links, host = machine.collective_bandwidth, _by_host(machine, ranks_per_node)
    by_host = ranks == ranks_per_node > 1 and host > links
    names = ("host memory that all processes share", "NCCL")
    first, second = names if by_host else names[::-1]
    high, low = (host, links) if by_host else (links, host)
    beside = "" if ranks > ranks_per_node else f", {second} at {low / 1e9:.3g}"
    return Transport(by_host, high, f"{first} at {high / 1e9:.3g} GB/s a process{beside}")


def _by_host(machine: Machine, ranks: int) -> float:
    memory = machine.host_memory_bandwidth / ranks / _CROSSINGS
    return min(machine.h2d_bandwidth, machine.d2h_bandwidth, memory) * (ranks - 1) / ranks

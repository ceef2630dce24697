"""Compute what one process may use of a user's hardware: GPUs, nodes, memory.

Budgets are cut by named *reserves*: bytes that something outside the plan takes. On the accelerator these are the CUDA
context and library workspaces, and NCCL's buffers with several processes. On the host these are the operating system,
and each process's interpreter and libraries. Fragmentation is a fraction of the non-model data, so it goes to
`Program.nonmodel_overhead`.

[Note: hops]
A gather or sum of few bytes takes the time until the first byte has gone round. NCCL makes a *ring* of all processes.
Then that is a hop for every process: one between nodes for every node but one, the rest within nodes. A *tree*
(doubling distances, across nodes and within each) has the logarithms of both numbers instead. That is the best that is
possible, and libraries have it for some collectives and shapes only. So predictions use the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core._errors import InvalidInput
from ps_core._plan import Tier
from ps_core._units import ALIGNMENT_BYTES, check_number, check_whole

DEVICE_RESERVE_BYTES = 600 * 10**6
"""Bytes of the CUDA context, cuBLAS workspaces and kernels."""
DEVICE_RESERVE_NCCL_BYTES = 1200 * 10**6
"""Bytes of the same with NCCL's channels and buffers."""
HOST_RESERVE_BYTES = 4 * 10**9
"""Bytes of a node for the operating system."""
HOST_RESERVE_PER_RANK_BYTES = 2_500_000_000
"""Bytes for each process's interpreter, libraries and batches."""
FRAGMENTATION = 0.05
"""The fraction of non-model bytes that is added to them."""
LINK_HOP_S, NODE_HOP_S = 3.4e-6, 14e-6
"""Seconds from a GPU to the next, within a node and to another, by NCCL's own model for large messages."""


def ring_s(ranks: int, ranks_per_node: int) -> float:
    """Return the seconds of a collective's hops in a ring of all processes; see [Note: hops]."""
    nodes = ranks // ranks_per_node
    return (ranks - nodes) * LINK_HOP_S + (nodes - 1) * NODE_HOP_S


def tree_s(ranks: int, ranks_per_node: int) -> float:
    """Return the seconds of a collective's hops in a tree; see [Note: hops]."""
    nodes = ranks // ranks_per_node
    return (ranks_per_node - 1).bit_length() * LINK_HOP_S + (nodes - 1).bit_length() * NODE_HOP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal GPUs spread evenly over equal nodes, one process a GPU.

    ``device_memory`` is each GPU's, ``host_memory`` and ``disk`` a node's. ``device_memory`` 0 means no accelerator:
    the CPU computes, and ``gpus`` counts processes. ``host_memory`` 0 and ``disk`` 0 mean that there is no such tier.
    """

    gpus: int = 1
    nodes: int = 1
    copies: int = 1
    """Copies of the model, each divided over equally many GPUs."""
    device_memory: int
    host_memory: int
    disk: int = 0
    device_reserve: int | None = None
    """Bytes of each GPU; None: `DEVICE_RESERVE_BYTES`, with several GPUs `DEVICE_RESERVE_NCCL_BYTES`."""
    host_reserve: int = HOST_RESERVE_BYTES
    host_reserve_per_rank: int = HOST_RESERVE_PER_RANK_BYTES
    nonmodel_overhead: float = FRAGMENTATION

    def __post_init__(self) -> None:
        for key in ("gpus", "nodes", "copies"):
            check_whole(key, getattr(self, key), 1)
        if self.gpus % self.nodes:
            raise InvalidInput(f"{self.gpus} GPUs cannot be spread evenly over {self.nodes} nodes")
        if self.gpus % self.copies:
            raise InvalidInput(f"{self.gpus} GPUs cannot have {self.copies} copies of a model, of equally many each")
        for key in ("device_memory", "host_memory", "disk", "host_reserve", "host_reserve_per_rank"):
            check_whole(key, getattr(self, key))
        if self.device_reserve is not None:
            check_whole("device_reserve", self.device_reserve)
        check_number("nonmodel_overhead", self.nonmodel_overhead, 0, 10)
        if not self.device_memory and not self.host_memory:
            raise InvalidInput("a machine needs device memory or host memory, found neither")
        if self.disk and not self.host_memory:
            raise InvalidInput("a disk is reached through host memory, found none")

    @property
    def ranks_per_node(self) -> int:
        """Return how many processes share a node's host memory and disk."""
        return self.gpus // self.nodes

    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers of one process, fastest first."""
        found = []
        if self.device_memory:
            reserve = self.device_reserve
            if reserve is None:
                reserve = DEVICE_RESERVE_NCCL_BYTES if self.gpus > 1 else DEVICE_RESERVE_BYTES
            found.append(_tier("device", self.device_memory, reserve, 1))
        if self.host_memory:
            reserve = self.host_reserve + self.host_reserve_per_rank * self.ranks_per_node
            found.append(_tier("host", self.host_memory, reserve, self.ranks_per_node))
        if self.disk:
            found.append(_tier("disk", self.disk, 0, self.ranks_per_node))
        return tuple(found)


def _tier(name: str, memory: int, reserve: int, sharers: int) -> Tier:
    """Return a rank's part of what the reserve leaves; at least nothing."""
    return Tier(name, max(0, memory - reserve) // sharers // ALIGNMENT_BYTES * ALIGNMENT_BYTES)

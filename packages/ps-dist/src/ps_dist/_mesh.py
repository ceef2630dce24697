"""Which processes share one copy of the model, and which hold the same part of it.

[Note: the mesh]
``torchrun`` numbers processes node by node. With ``replicate=r`` the ranks are cut into ``r`` equal runs. Each run has
a whole copy of the model, one shard a process. Ranks at the same place of each run hold the same shard. So gathers stay
within a run (a node, or a few), and only sums of gradients go between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core._errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Mesh:
    """One process among all."""

    rank: int
    """The rank of this process."""
    size: int
    """The number of processes."""
    copies: int
    """The number of copies of the model."""

    def __post_init__(self) -> None:
        if isinstance(self.copies, bool) or not isinstance(self.copies, int) or self.copies < 1:
            raise InvalidInput(f"replicate: expected a whole number of at least 1, found {self.copies!r}")
        if self.size % self.copies:
            raise InvalidInput(f"replicate={self.copies} does not divide the {self.size} processes")

    @property
    def shards(self) -> int:
        """Return the number of processes that share a copy."""
        return self.size // self.copies

    @property
    def shard(self) -> int:
        """Return the index of this process's shard."""
        return self.rank % self.shards

    @property
    def shard_peers(self) -> tuple[int, ...]:
        """Return the ranks that share this process's copy, in the order of their shards."""
        first = self.rank - self.shard
        return tuple(range(first, first + self.shards))

    @property
    def replica_peers(self) -> tuple[int, ...]:
        """Return the ranks that hold the same shard, one a copy."""
        return tuple(range(self.shard, self.size, self.shards))

    @property
    def everyone(self) -> tuple[int, ...]:
        """Return all ranks."""
        return tuple(range(self.size))

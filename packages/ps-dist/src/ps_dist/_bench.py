"""What a job works with, in the thread that talks to the other processes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ps_dist._direct import CardWire, Direct
from ps_dist._journal import Journal
from ps_dist._lane import Lane
from ps_dist._mesh import Mesh
from ps_dist._staging import Carrier, Staged
from ps_dist._wire import Sum, Wire


class Bench:
    """Collectives that are over when they return, on buffers that nobody else touches meanwhile.

    What a job does next may depend on what came before: `exchange` is there for that.
    """

    def __init__(
        self, lane: Lane, journal: Journal, wire: Wire, total: Sum, mesh: Mesh, cards: CardWire | None = None
    ) -> None:
        """``cards``: what a device's memory travels by; None: the host's memory."""
        self._lane, self._journal, self._wire, self._sum, self._mesh = lane, journal, wire, total, mesh
        self._cards = cards

    def exchange(self, mine: bytes, what: str = "") -> list[bytes]:
        """Everybody's bytes, in rank order; every process gives as many."""
        peers, size = self._mesh.everyone, len(mine)
        memory = bytearray(len(peers) * size)
        everyone = torch.frombuffer(memory, dtype=torch.uint8)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        tag = self._enter("exchange", what, size, torch.uint8)
        self._wire.gather("agreement", tag, peers, everyone, own)
        text = bytes(memory)
        return [text[place : place + size] for place in range(0, len(text), size)]

    def all_gather(self, into: Tensor | None, shard: Tensor, what: str, takers: Collection[int]) -> None:
        """Put every process's ``shard`` into ``into``, for the ranks that take it; ``into`` is None on the others.

        ``shard`` may lie in its place of ``into`` already.
        """
        peers = self._mesh.shard_peers
        tag = self._enter("all_gather", what, shard.numel() * len(peers), shard.dtype)
        self._wire.gather("all_gather", tag, peers, into, shard, takers)

    def reduce_scatter(
        self,
        into: Tensor,
        source: Tensor | None,
        scratch: Tensor,
        what: str,
        *,
        kind: torch.dtype,
        givers: Collection[int],
    ) -> None:
        """Sum this process's shard of the givers' ``source`` into ``into``; ``source`` is None on the others.

        ``kind``: of what is given. In single precision and rank order, as ever; ``scratch`` are bytes.
        """
        tag = self._enter("reduce_scatter", what, into.numel() * self._mesh.shards, kind)
        self._sum("reduce_scatter", tag, into, source, scratch, kind=kind, givers=givers)

    def by_way_of(self, carrier: Carrier) -> Staged | Direct:
        """Collectives of buffers in a device's memory."""
        if self._cards is not None:
            return Direct(self._cards, self._mesh, carrier, self._enter)
        return Staged(self._wire, self._sum, self._mesh, carrier, self._enter)

    @property
    def hopeless(self) -> str:
        """Why nothing will come of this job any more, if so."""
        return "" if self._lane.error is None else str(self._lane.error)

    def enter(self, what: str) -> int:
        """Say what is done from now on; the tag of its messages."""
        entry = self._journal.add(what)
        self._lane.enter(entry)
        return entry.tag

    def _enter(self, operation: str, what: str, numel: int, kind: torch.dtype) -> int:
        return self.enter(named(operation, what, numel, kind))


def named(operation: str, what: str, numel: int, dtype: torch.dtype) -> str:
    """A collective, for the journal."""
    kind = str(dtype).removeprefix("torch.")
    return f"{operation} of {numel} {kind}{f' ({what})' if what else ''}"

"""The collectives of a job, in the thread of collectives."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_dist._collective_history import CollectiveHistory, describe
from ps_dist._comm_thread import CommThread
from ps_dist._host_staging import HostStagedCollectives, StagingCopier
from ps_dist._mesh import Mesh
from ps_dist._messages import PeerMessages
from ps_dist._nccl import DeviceCollectives, NcclMessages
from ps_dist._reduce import OrderedReduceScatter


class CollectiveSession:
    """Collectives that are complete when they return, on buffers that nothing else uses meanwhile.

    What a job does next may depend on the result of `exchange`, which is the same on every rank.
    """

    def __init__(
        self,
        thread: CommThread,
        history: CollectiveHistory,
        messages: PeerMessages,
        reduce_scatter: OrderedReduceScatter,
        mesh: Mesh,
        nccl: NcclMessages | None = None,
    ) -> None:
        """``nccl``: what a device's memory travels by; None: through the host's memory."""
        self._thread, self._history, self._messages = thread, history, messages
        self._reduce_scatter, self._mesh, self._nccl = reduce_scatter, mesh, nccl

    def exchange(self, mine: bytes, what: str = "") -> list[bytes]:
        """Return every rank's bytes, in rank order; every rank gives as many."""
        peers, size = self._mesh.everyone, len(mine)
        memory = bytearray(len(peers) * size)
        everyone = torch.frombuffer(memory, dtype=torch.uint8)
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        tag = self._enter("exchange", what, size, torch.uint8)
        self._messages.gather("agreement", tag, peers, everyone, own)
        text = bytes(memory)
        return [text[place : place + size] for place in range(0, len(text), size)]

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        """Put every rank's ``shard`` into ``into``; it may lie in its place there already."""
        peers = self._mesh.shard_peers
        tag = self._enter("all_gather", what, shard.numel() * len(peers), shard.dtype)
        self._messages.gather("all_gather", tag, peers, into, shard)

    def reduce_scatter(
        self,
        into: Tensor,
        source: Tensor,
        scratch: Tensor,
        what: str,
        *,
        kind: torch.dtype,
    ) -> None:
        """Sum this rank's shard of every rank's ``source`` into ``into``.

        ``kind``: the type of the sources. Sums are in single precision and rank order; ``scratch`` is uint8 memory.
        """
        tag = self._enter("reduce_scatter", what, into.numel() * self._mesh.shards, kind)
        self._reduce_scatter("reduce_scatter", tag, into, source, scratch, kind=kind)

    def on_device(self, copier: StagingCopier) -> HostStagedCollectives | DeviceCollectives:
        """Return the collectives of a device's memory, in an order that every rank knows beforehand."""
        if self._nccl is not None:
            return DeviceCollectives(self._nccl, self._mesh, copier, self._enter, self._thread.note_launch)
        return HostStagedCollectives(self._messages, self._reduce_scatter, self._mesh, copier, self._enter)

    @property
    def error(self) -> str:
        """Why every collective has failed; empty while none has."""
        return "" if self._thread.error is None else str(self._thread.error)

    def enter(self, what: str) -> int:
        """Add an entry for what runs from now on to the history; return the tag of its messages."""
        entry = self._history.add(what)
        self._thread.enter(entry)
        return entry.tag

    def _enter(self, operation: str, what: str, numel: int, kind: torch.dtype) -> int:
        return self.enter(describe(operation, what, numel, kind))

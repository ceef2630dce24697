"""The collectives of a job, in the thread of collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps_core._collectives import StagingCopier
from ps_dist._collective_history import CollectiveHistory
from ps_dist._comm_thread import CommThread
from ps_dist._host_staging import HostStagedCollectives
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
        host_sum: OrderedReduceScatter,
        mesh: Mesh,
    ) -> None:
        """Use what one connection has."""
        self._history = history
        self.thread, self.messages, self.host_sum, self.mesh = thread, messages, host_sum, mesh
        self.nccl: NcclMessages | None = None
        """Sends device memory over NCCL, once the ranks have decided for it; None: it goes through host memory."""

    def exchange(self, mine: bytes, what: str = "") -> list[bytes]:
        """Return every rank's bytes, in rank order; every rank gives as many."""
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self.gather_rows("exchange", what, own, self.mesh.everyone)
        return [row.numpy().tobytes() for row in rows]

    def gather_rows(self, operation: str, what: str, mine: Tensor, peers: Sequence[int]) -> Tensor:
        """Return a row for each of ``peers``: its few numbers, of which each gives as many."""
        everyone = torch.empty(mine.numel() * len(peers), dtype=mine.dtype, device="cpu")
        tag = self.enter_buffer(operation, what, mine)
        self.messages.gather("agreement", tag, peers, everyone, mine)
        return everyone.view(len(peers), -1)

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        """Put every rank's ``shard`` into ``into``; it may lie in its place there already."""
        tag = self.enter_buffer("all_gather", what, into)
        self.messages.gather("all_gather", tag, self.mesh.shard_peers, into, shard)

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        """Sum this rank's shard of every rank's ``source`` into ``into``.

        Sums are in single precision and rank order; ``scratch`` is uint8 memory.
        """
        tag = self.enter_buffer("reduce_scatter", what, source)
        self.host_sum(tag, into, source, scratch)

    def on_device(self, copier: StagingCopier[Tensor]) -> HostStagedCollectives | DeviceCollectives:
        """Return the collectives of a device's memory, in an order that every rank knows beforehand."""
        if self.nccl is not None:
            return DeviceCollectives(self.nccl, self, copier)
        return HostStagedCollectives(self, copier)

    @property
    def error(self) -> str:
        """Why every collective has failed; empty while none has."""
        return "" if self.thread.error is None else str(self.thread.error)

    def enter(self, what: str) -> int:
        """Add an entry for what runs from now on to the history; return the tag of its messages."""
        entry = self._history.add(what)
        self.thread.enter(entry)
        return entry.tag

    def enter_buffer(self, operation: str, what: str, buffer: Tensor) -> int:
        """Add the entry of a collective of this buffer; ``what``: the caller's words for what it is for."""
        kind = str(buffer.dtype).removeprefix("torch.")
        return self.enter(f"{operation} of {buffer.numel()} {kind}{f' ({what})' if what else ''}")

"""Collectives between cards, without the host's memory: NCCL's messages.

[Note: meeting first]
NCCL has no tags, and a call that another process does not answer occupies the card. So before each collective all
processes exchange a byte in the host's memory, under the tag that says what is to be done (see [Note: fingerprints]):
those that have parted, ended or are late are found there, as ever. And the thread that does collectives waits until the
card has done one before it says so: nobody else ever waits for a call that is not answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_dist._mesh import Mesh
from ps_dist._staging import Carrier
from ps_dist._wire import Sum, Wire

_PIECE_NUMEL = 1 << 20
"""Elements summed at a time: 4 MiB of the card's memory beside every budget."""
_MOST_GREETED = 250
"""Bytes that tell ranks apart; beyond so many they come again."""
_gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of old, by another name


class CardWire(Wire):
    """Messages between cards, in the order of PyTorch's current stream."""

    def __init__(self, group: Any, control: Wire, mesh: Mesh, where: torch.device) -> None:
        """``group``: torch's, of all processes (any: its type has no public name); ``control``: of host memory.

        None where there is but one process: nothing is sent. What it takes of the card is taken now.
        """
        super().__init__(group, mesh.rank)
        self._work = torch.empty(_PIECE_NUMEL, dtype=torch.float32, device=where)
        self._control, self._mesh = control, mesh
        self.received_bytes = control.received_bytes
        self.where = where
        self.name = "none" if group is None else "nccl"
        """For `Statistics`."""
        self.sum = Sum(self, mesh.shard_peers, mesh.replica_peers, mesh.rank)

    def swap(
        self, operation: str, tag: int, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Send and receive these, as one call."""
        calls = []
        for peer, buffer in receives:
            if buffer.numel():
                calls.append(_call(dist.irecv, buffer, peer, self._group, tag))
                self.received_bytes[operation] += buffer.nbytes
        calls += [_call(dist.isend, buffer, peer, self._group, tag) for peer, buffer in sends if buffer.numel()]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()  # which lets the current stream wait

    def gather(
        self,
        operation: str,
        tag: int,
        peers: Sequence[int],
        into: Tensor | None,
        shard: Tensor,
        takers: Collection[int] | None = None,
    ) -> None:
        """As `Wire.gather`; where all processes take from all, it is a collective that knows how they are connected."""
        all_take = takers is None or set(takers) >= set(peers)
        if self._group is None or into is None or len(peers) < self._mesh.size or not all_take:
            super().gather(operation, tag, peers, into, shard, takers)
            return
        _gather_all(into.view(torch.uint8), shard.view(torch.uint8), group=self._group)
        self.received_bytes[operation] += shard.nbytes * (len(peers) - 1)

    def meet(self, tag: int) -> None:
        """Return when all processes are about to do the same; see [Note: meeting first]."""
        everyone = self._mesh.everyone
        whole = torch.empty(len(everyone), dtype=torch.uint8, device="cpu")
        self._control.gather("agreement", tag, everyone, whole, _byte())

    def greet(self, tag: int) -> None:
        """Have connections, and the memory that they take at first; `RuntimeError` if they deliver anything else."""
        everyone = self._mesh.everyone
        wanted = [rank % _MOST_GREETED + 1 for rank in everyone]
        mine = torch.full((1,), wanted[self._me], dtype=torch.uint8, device=self.where)
        gathered, sent = (torch.zeros(len(everyone), dtype=torch.uint8, device=self.where) for _ in range(2))
        self.gather("agreement", tag, everyone, gathered, mine)
        super().gather("agreement", tag, everyone, sent, mine)
        found = (gathered.tolist(), sent.tolist())  # it waits, too
        if found != (wanted, wanted):
            raise RuntimeError(f"a gather delivered {found[0]} and messages {found[1]}, expected {wanted} twice")


class Direct:
    """Collectives of a device's memory that are over when they return."""

    def __init__(self, wire: CardWire, mesh: Mesh, carrier: Carrier, enter: Callable[..., int]) -> None:
        """``enter``: says what is done now, and gives the tag of its messages."""
        self._wire, self._mesh, self._carrier, self._enter = wire, mesh, carrier, enter

    def all_gather(self, into: Tensor | None, shard: Tensor, what: str, takers: Collection[int]) -> None:
        """As `Bench.all_gather`."""
        peers = self._mesh.shard_peers
        tag = self._enter("all_gather", what, shard.numel() * len(peers), shard.dtype)
        with self._together(tag, what, (shard,), () if into is None else (into,)):
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
        """As `Bench.reduce_scatter`."""
        tag = self._enter("reduce_scatter", what, into.numel() * self._mesh.shards, kind)
        with self._together(tag, what, () if source is None else (source,), (into, scratch)):
            self._wire.sum("reduce_scatter", tag, into, source, scratch, kind=kind, givers=givers)

    @contextmanager
    def _together(self, tag: int, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Iterator[None]:
        self._wire.meet(tag)
        with self._carrier.working(what, reads, writes):
            yield
        self._carrier.settle()


def _call(operation: Any, buffer: Tensor, peer: int, group: Any, tag: int) -> dist.P2POp:
    return dist.P2POp(operation, buffer.view(torch.uint8), peer, group, tag)


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")

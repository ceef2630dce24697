"""Messages between ranks of several computers, where the ranks of each computer share its host memory.

[Note: once a computer]
A shard that is gathered crosses the network once for each other computer. One rank of that computer *fetches* it; its
ranks fetch the same number of shards, within one. The others read it in that rank's memory. A sum is of contributions
in rank order. To add those of one computer first would change its bits. So each contribution of another computer
crosses by itself, to the shard's owner alone. Those of the own computer are read where they are. Small messages go
directly, for the time of one message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from ps_dist._messages import Buffers, PeerMessages, Read
from ps_dist._peer_connections import MOST_BYTES_HERE
from ps_dist._shared_messages import SharedMessages


@dataclass(frozen=True, slots=True)
class _Route:
    """How one rank takes part in a gather among some ranks."""

    others: tuple[int, ...]
    """The other ranks of this computer."""
    receivers: tuple[int, ...]
    """The ranks of other computers that fetch this rank's shard."""
    fetched_by: dict[int, int]
    """For each rank of other computers, the rank of this computer that fetches its shard."""

    @staticmethod
    def find(rank: int, peers: Sequence[int], computers: Sequence[Collection[int]]) -> _Route:
        """Find the same routes on every rank."""
        others: tuple[int, ...] = ()
        receivers, fetched_by = [], dict[int, int]()
        for computer in computers:
            here = [peer for peer in peers if peer in computer]
            if not here:
                continue
            foreign = [peer for peer in peers if peer not in computer]
            fetchers = {peer: here[place % len(here)] for place, peer in enumerate(foreign)}
            if rank in here:
                others, fetched_by = tuple(peer for peer in here if peer != rank), fetchers
            else:
                receivers.append(fetchers[rank])
        return _Route(others, tuple(receivers), fetched_by)


class ComputersMessages(PeerMessages):
    """One process's messages: through shared memory to ranks of its computer, else by gloo.

    See [Note: once a computer].
    """

    name = "shared+gloo"

    def __init__(
        self, rank: int, computers: Sequence[Collection[int]], shared: SharedMessages, between: PeerMessages
    ) -> None:
        """``computers``: the ranks of each. ``shared``: to the ranks of this one. ``between``: to all others."""
        super().__init__(None, rank)
        self.heap = shared.heap
        self._shared, self._between = shared, between
        self._here = next(computer for computer in computers if rank in computer)
        self.received_bytes, self.network_bytes = between.received_bytes, between.network_bytes
        shared.received_bytes = between.received_bytes
        self._route = cache(lambda peers: _Route.find(rank, peers, computers))

    def rooms(self, peers: Collection[int]) -> int:
        """Return how many of these ranks run on other computers."""
        return len(set(peers).difference(self._here))

    def gather(self, operation: str, tag: int, peers: Sequence[int], into: Tensor, shard: Tensor) -> None:
        """Gather as `PeerMessages.gather`; what all ranks take crosses the network once a computer."""
        if shard.nbytes <= MOST_BYTES_HERE:
            super().gather(operation, tag, peers, into, shard)
            return
        route = self._route(tuple(peers))
        rows = dict(zip(peers, self._place_own(peers, into, shard), strict=True))
        fetched = [(peer, rows[peer]) for peer, by in route.fetched_by.items() if by == self._rank]
        waits = self._between.begin(operation, tag, [(peer, shard) for peer in route.receivers], fetched)
        own = [(peer, shard) for peer in route.others]
        self._shared.exchange(operation, tag, own, [(peer, rows[peer]) for peer in route.others])
        self._between.finish(waits)
        shown = [(peer, row) for peer in route.others for _, row in fetched]
        read = [(by, rows[peer]) for peer, by in route.fetched_by.items() if by != self._rank]
        self._shared.exchange(operation, tag, shown, read)

    def exchange(self, operation: str, tag: int, sends: Buffers, receives: Buffers) -> None:
        """Send and receive pairs of a rank and a buffer."""
        (near, far), (near_receives, far_receives) = self._split(sends), self._split(receives)
        waits = self._between.begin(operation, tag, far, far_receives)
        self._shared.exchange(operation, tag, near, near_receives)
        self._between.finish(waits)

    def exchange_and_read(
        self, operation: str, tag: int, sends: Buffers, peers: Sequence[int], room: Tensor, read: Read
    ) -> None:
        """Receive what comes from other computers, then read the rest in place; see `PeerMessages`."""
        near_peers = [peer for peer in peers if peer in self._here]
        far_peers = [peer for peer in peers if peer not in self._here]
        received = dict(zip(far_peers, room, strict=True))
        near, far = self._split(sends)
        self._between.finish(self._between.begin(operation, tag, far, list(received.items())))

        def read_all(piece: slice, parts: Sequence[Tensor]) -> None:
            found = dict(zip(near_peers, parts, strict=True))
            read(piece, [received[peer][piece] if peer in received else found[peer] for peer in peers])

        self._shared.exchange_and_read(operation, tag, near, near_peers, room, read_all)

    def close(self) -> None:
        """Close the connections to the ranks of this computer; the process group is taken down by its owner."""
        self._shared.close()

    def cut(self, everyone: Sequence[int]) -> None:
        """Break all connections, so that a thread which waits for another process ends; none works afterwards."""
        self._shared.cut(everyone)
        self._between.cut(everyone)

    def _split(self, pairs: Buffers) -> tuple[Buffers, Buffers]:
        """Return the pairs of this computer's ranks, and those of the others."""
        near = [pair for pair in pairs if pair[0] in self._here]
        return near, [pair for pair in pairs if pair[0] not in self._here]

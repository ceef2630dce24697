"""Messages between processes over gloo, and gathers made of them.

[Note: why messages]
Buffers need no packing. Every shard is sent from where it lies, and received where it is wanted. A process sends
nothing to itself, so the scratch of a sum is one shard smaller than what is summed. Each message carries a tag of our
own, see [Note: fingerprints]. As many bytes are sent as by gloo's own collectives: every shard once to each rank.

[Note: sends first]
If the receiver waits already, a send writes to the connection at once. It holds gloo's lock of the connection
meanwhile. If this rank's own receive were begun before it, the other rank's bytes would come just then. Gloo's thread
would be told of them again and again, and could not take the lock. It would spin on a processor that training needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ps_dist._error_text import first_line
from ps_dist._shared_memory import SharedHeap

Buffers: TypeAlias = Sequence[tuple[int, Tensor]]
"""Pairs of a rank and a buffer."""
Read: TypeAlias = Callable[[slice, Sequence[Tensor]], None]
"""Reads a piece of what came: which elements they are, and those of every sender."""
_NO_TAG = 0
"""A tag that no message has."""


class ConnectionBroken(RuntimeError):
    """The transport lost its connection to a rank."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class PeerMessages:
    """One process's messages; counts the bytes that it receives."""

    name = "gloo"
    """The transport's name in `Statistics`."""
    heap: SharedHeap | None = None
    """Memory that other ranks of this computer read without a copy; None: there is none."""

    def __init__(self, group: Any, rank: int) -> None:
        """``group``: a process group of all ranks (any: torch's stubs do not name its type)."""
        self._group, self._rank = group, rank
        self.received_bytes: Counter[str] = Counter()
        """By operation."""
        self.network_bytes: Counter[str] = Counter()
        """Those that came over sockets."""

    def rooms(self, peers: Collection[int]) -> int:
        """Return from how many of these ranks what comes needs memory of this process, also to be read once."""
        return len(peers)

    def exchange(self, operation: str, tag: int, sends: Buffers, receives: Buffers) -> None:
        """Send and receive pairs of a rank and a buffer."""
        self.finish(self.begin(operation, tag, sends, receives))

    def begin(self, operation: str, tag: int, sends: Buffers, receives: Buffers) -> list[tuple[int, Any]]:
        """Begin to send and to receive; return what `finish` waits for. See [Note: sends first]."""
        pending: list[tuple[int, Any]] = []
        for peer, buffer in sends:
            if buffer.numel():
                with _naming(peer):
                    pending.append((peer, dist.isend(buffer.view(torch.uint8), peer, self._group, tag)))
        for peer, buffer in receives:
            if buffer.numel():
                with _naming(peer):
                    pending.append((peer, dist.irecv(buffer.view(torch.uint8), peer, self._group, tag)))
                self.received_bytes[operation] += buffer.nbytes
                self.network_bytes[operation] += buffer.nbytes
        return pending

    def finish(self, pending: Sequence[tuple[int, Any]]) -> None:
        """Wait until everything that `begin` began is complete."""
        for peer, work in pending:
            assert work is not None, "this process is one of the group"
            with _naming(peer):
                work.wait()

    def exchange_and_read(
        self, operation: str, tag: int, sends: Buffers, peers: Sequence[int], room: Tensor, read: Read
    ) -> None:
        """Send; receive a row of elements from each peer, and call ``read`` with each piece of the rows, in order.

        ``room``: memory of the elements' type, with such a row for each of as many ranks as `rooms` returns.
        """
        self.exchange(operation, tag, sends, list(zip(peers, room, strict=True)))
        read(slice(0, room.shape[1]), list(room))

    def close(self) -> None:
        """Do nothing: the process group is taken down by its owner."""

    def cut(self, everyone: Sequence[int]) -> None:
        """Break all connections, so that a thread which waits for another process ends; none works afterwards.

        The interpreter cannot end properly while a thread waits. In gloo a receive that times out breaks a connection.
        A receive from a process that has ended fails at once. So one from each rank is tried.
        """
        for peer in [peer for peer in everyone if peer != self._rank]:
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, self._group, _NO_TAG)
                assert work is not None, "this process is one of the group"
                work.wait(timedelta(milliseconds=1))

    def gather(self, operation: str, tag: int, peers: Sequence[int], into: Tensor, shard: Tensor) -> None:
        """Put every peer's ``shard`` into ``into``, in the order of ``peers``."""
        others = [(place, peer) for place, peer in enumerate(peers) if peer != self._rank]
        rows = self._place_own(peers, into, shard)
        receives = [(peer, rows[place]) for place, peer in others]
        self.exchange(operation, tag, [(peer, shard) for _, peer in others], receives)

    def _place_own(self, peers: Sequence[int], into: Tensor, shard: Tensor) -> Tensor:
        """Copy this rank's shard to its place in ``into``; return a row for each of ``peers``."""
        rows = into.view(len(peers), -1)
        mine = rows[peers.index(self._rank)]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        return rows


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Raise the transport's errors as `ConnectionBroken`, which names the rank."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken(peer, first_line(error)) from error

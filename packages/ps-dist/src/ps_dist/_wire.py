"""Bytes between processes: gathers and sums made of messages from one process to another.

[Note: why messages]
Buffers need no packing: every shard is sent from where it lies, and received where it is wanted. Nothing is sent to
oneself, so the scratch of a sum is a shard smaller than what is summed. Each message carries a tag of our own, see
[Note: fingerprints]. What is sent is what a collective of the transport would send: every shard once to each process.

[Note: sends first]
Who begins a send that the other process already waits for writes to the connection itself, and holds gloo's lock of it
meanwhile. Were its own receive begun before, the other's bytes would come just then, and gloo's thread, which is told
of them again and again but cannot have the lock, would spin on a processor that training needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ps_core._errors import InvalidInput

_PIECE_NUMEL = 1 << 15
"""Elements summed at a time: in the cache, and too few for torch to start threads, which training needs."""
_NO_TAG = 0
"""Of what nobody sends."""
_CUT_NUMEL = 64
"""A sum that does not fit into its scratch is cut at multiples of this."""


class ConnectionBroken(RuntimeError):
    """The transport lost its connection to a rank."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Wire:
    """One process's messages; counts what it receives."""

    def __init__(self, group: Any, me: int) -> None:
        """``group``: a process group (any: torch's stubs do not name its type) that has all processes."""
        self._group, self._me = group, me
        self._work = torch.empty(_PIECE_NUMEL, dtype=torch.float32, device="cpu")
        self.received_bytes: Counter[str] = Counter()
        """By operation."""

    def swap(
        self, operation: str, tag: int, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Send and receive these, each to or from a process; see [Note: sends first]."""
        on_way = []
        for peer, buffer in sends:
            if buffer.numel():
                with _naming(peer):
                    on_way.append((peer, dist.isend(_as_bytes(buffer), peer, self._group, tag)))
        for peer, buffer in receives:
            if buffer.numel():
                with _naming(peer):
                    on_way.append((peer, dist.irecv(_as_bytes(buffer), peer, self._group, tag)))
                self.received_bytes[operation] += buffer.nbytes
        for peer, work in on_way:
            assert work is not None, "this process is one of the group"
            with _naming(peer):
                work.wait()

    def cut(self, everyone: Sequence[int]) -> None:
        """Break all connections, so that a thread which waits for another process ends; nothing works from then on.

        With one that waits the interpreter could not end in peace. In gloo a receive that times out does it; one from a
        process that has ended fails at once, so it is tried with each.
        """
        for peer in [peer for peer in everyone if peer != self._me]:
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, self._group, _NO_TAG)
                assert work is not None, "this process is one of the group"
                work.wait(timedelta(milliseconds=1))

    def gather(
        self,
        operation: str,
        tag: int,
        peers: Sequence[int],
        into: Tensor | None,
        shard: Tensor,
        takers: Collection[int] | None = None,
    ) -> None:
        """Every peer's shard, in the order of ``peers``; ``takers``: who gets them, if not all of them."""
        others = [(place, peer) for place, peer in enumerate(peers) if peer != self._me]
        sends = [(peer, shard) for _, peer in others if takers is None or peer in takers]
        receives: list[tuple[int, Tensor]] = []
        if into is not None:
            rows = into.view(len(peers), -1)
            mine = rows[peers.index(self._me)]
            if mine.data_ptr() != shard.data_ptr():
                mine.copy_(shard)
            receives = [(peer, rows[place]) for place, peer in others]
        self.swap(operation, tag, sends, receives)

    def exchange_sum(
        self,
        operation: str,
        tag: int,
        peers: Sequence[int],
        into: Tensor,
        rows: Sequence[Tensor] | None,
        scratch: Tensor,
        givers: Collection[int],
    ) -> None:
        """Send each peer its row; sum what comes for us, in single precision and the order of ``peers``.

        Peers that are no ``givers`` have no rows, and count for nothing. ``scratch`` is of the rows' type.
        """
        numel = into.numel()
        givers = [peer for peer in peers if peer in givers]
        others = [peer for peer in givers if peer != self._me]
        came = scratch[: len(others) * numel].view(len(others), numel)
        sends = []
        if rows is not None:
            sends = [(peer, row) for peer, row in zip(peers, rows, strict=True) if peer != self._me]
        self.swap(operation, tag, sends, list(zip(others, came, strict=True)))
        parts = list(came)
        if rows is not None:
            parts.insert(givers.index(self._me), rows[peers.index(self._me)])
        if parts:
            self._sum(parts, into)
        else:
            into.zero_()

    def _sum(self, parts: Sequence[Tensor], into: Tensor) -> None:
        """In single precision and this order, rounded once at the end; which one addition of two does by itself."""
        two, single = len(parts) == 2, into.dtype is torch.float32
        fused = len(parts) > 1 and parts[0].dtype is into.dtype and (two or single)
        direct = fused or single
        most = self._work.numel()
        if fused and two and torch.get_num_threads() == 1:
            most = max(into.numel(), 1)  # nothing is read twice, and no threads can be started
        for start in range(0, into.numel(), most):
            piece = slice(start, min(start + most, into.numel()))
            total = into[piece] if direct else self._work[: piece.stop - piece.start]
            if fused:
                torch.add(parts[0][piece], parts[1][piece], out=total)
            else:
                total.copy_(parts[0][piece])
            for part in parts[2 if fused else 1 :]:
                total.add_(part[piece])
            if not direct:
                into[piece].copy_(total)


@contextmanager
def _naming(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionBroken(peer, str(error).splitlines()[0]) from error


def _as_bytes(buffer: Tensor) -> Tensor:
    """What only moves travels as bytes: no transport need know its type, and none may touch it."""
    return buffer.view(torch.uint8)


def _as(kind: torch.dtype, scratch: Tensor) -> Tensor:
    return scratch[: scratch.numel() // kind.itemsize * kind.itemsize].view(kind)


class Sum:
    """Reduce-scatter over a mesh: within a node in the type of what is summed, across nodes in single precision."""

    def __init__(self, wire: Wire, shards: Sequence[int], replicas: Sequence[int], me: int) -> None:
        """``shards`` share one copy of the model; ``replicas`` hold the same shard as this process."""
        self._wire, self._shards, self._replicas, self._me = wire, shards, replicas, me

    def scratch_bytes(self, numel: int, kind: torch.dtype) -> int:
        """What a shard of ``numel`` elements takes in one piece."""
        copies = len(self._replicas)
        across = 4 * numel + 4 * (copies - 1) * -(-numel // copies) if copies > 1 else 0
        return (len(self._shards) - 1) * numel * kind.itemsize + across

    def piece_numel(self, numel: int, kind: torch.dtype, scratch: Tensor) -> int:
        """How many elements of a shard fit into the scratch at a time."""
        if self.scratch_bytes(numel, kind) <= scratch.nbytes:
            return max(numel, 1)
        per_cut = self.scratch_bytes(_CUT_NUMEL, kind)
        cuts = scratch.nbytes // per_cut
        if not cuts:
            raise InvalidInput(f"reduce_scatter: scratch of {scratch.nbytes} bytes, expected at least {per_cut}")
        return cuts * _CUT_NUMEL

    def __call__(
        self,
        operation: str,
        tag: int,
        into: Tensor,
        source: Tensor | None,
        scratch: Tensor,
        *,
        kind: torch.dtype,
        givers: Collection[int],
    ) -> None:
        """Sum the givers' parts for this shard into ``into``, piece by piece; ``kind``: of what they give."""
        rows = None if source is None else source.view(len(self._shards), -1)
        numel = into.numel()
        step = self.piece_numel(numel, kind, scratch)
        for start in range(0, numel, step):
            piece = slice(start, min(start + step, numel))
            parts = None if rows is None else [row[piece] for row in rows]
            one, rest = into[piece], scratch
            if len(self._replicas) > 1:
                width = piece.stop - piece.start
                one, rest = scratch[: 4 * width].view(torch.float32), scratch[4 * width :]
            self._wire.exchange_sum(operation, tag, self._shards, one, parts, _as(kind, rest), givers)
            if len(self._replicas) > 1:
                self._across(tag, into[piece], one, rest)

    def _across(self, tag: int, into: Tensor, partial: Tensor, scratch: Tensor) -> None:
        """Each replica sums a part for all, then sends it on: every replica has the same bits."""
        copies, numel, operation = len(self._replicas), into.numel(), "replicate"
        cuts = [numel * place // copies for place in range(copies + 1)]
        parts = [slice(cuts[place], cuts[place + 1]) for place in range(copies)]
        mine = parts[self._replicas.index(self._me)]
        rows = [partial[part] for part in parts]
        room = _as(torch.float32, scratch)
        self._wire.exchange_sum(operation, tag, self._replicas, into[mine], rows, room, self._replicas)
        others = [(peer, part) for peer, part in zip(self._replicas, parts, strict=True) if peer != self._me]
        self._wire.swap(
            operation, tag, [(peer, into[mine]) for peer, _ in others], [(peer, into[part]) for peer, part in others]
        )

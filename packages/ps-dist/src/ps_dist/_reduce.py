"""Reduce-scatter made of messages: sums in single precision and rank order, whatever comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import ps_kernels
from ps_core._errors import InvalidInput
from ps_dist._mesh import Mesh
from ps_dist._messages import PeerMessages

_CUT_NUMEL = 64
"""What does not fit into its memory is cut at multiples of so many elements."""


class OrderedReduceScatter:
    """Reduce-scatter over a mesh: within a copy of the model in the type of the gradients, across copies in fp32."""

    def __init__(self, messages: PeerMessages, mesh: Mesh, work: Tensor | None = None) -> None:
        """``work``: fp32 memory for partial sums on an accelerator; None: buffers are in host memory."""
        self._messages, self._work = messages, work
        self._shards, self._replicas, self._rank = mesh.shard_peers, mesh.replica_peers, mesh.rank

    def scratch_bytes(self, numel: int, kind: torch.dtype) -> int:
        """Return the scratch with which shards of ``numel`` elements are summed in one piece."""
        copies, rooms = len(self._replicas), self._messages.rooms
        others, elsewhere = ({*peers} - {self._rank} for peers in (self._shards, self._replicas))
        across = 4 * numel + 4 * rooms(elsewhere) * -(-numel // copies) if copies > 1 else 0
        return rooms(others) * numel * kind.itemsize + across

    def piece_numel(self, numel: int, kind: torch.dtype, scratch: Tensor) -> int:
        """Return how many elements of a shard fit into the scratch at a time."""
        found = largest_piece(numel, scratch.nbytes, lambda piece: self.scratch_bytes(piece, kind))
        if not found:
            least = self.scratch_bytes(_CUT_NUMEL, kind)
            raise InvalidInput(f"reduce_scatter: scratch of {scratch.nbytes} bytes, expected at least {least}")
        return found

    def __call__(self, tag: int, into: Tensor, source: Tensor, scratch: Tensor) -> None:
        """Sum this rank's shard of every rank's ``source`` into ``into``, piece by piece."""
        rows, kind = source.view(len(self._shards), -1), source.dtype
        for piece in pieces(into.numel(), self.piece_numel(into.numel(), kind, scratch)):
            parts = [row[piece] for row in rows]
            within, rest = into[piece], scratch
            if len(self._replicas) > 1:
                width = piece.stop - piece.start
                within, rest = scratch[: 4 * width].view(torch.float32), scratch[4 * width :]
            self.exchange_sum("reduce_scatter", tag, self._shards, within, parts, _view_as(kind, rest))
            if len(self._replicas) > 1:
                self._sum_across_copies(tag, into[piece], within, rest)

    def _sum_across_copies(self, tag: int, into: Tensor, partial: Tensor, scratch: Tensor) -> None:
        """Sum one part on each replica, then send it to the others: every replica gets the same bits."""
        copies, numel, operation = len(self._replicas), into.numel(), "replicate"
        cuts = [numel * place // copies for place in range(copies + 1)]
        parts = [slice(cuts[place], cuts[place + 1]) for place in range(copies)]
        mine = parts[self._replicas.index(self._rank)]
        rows, room = [partial[part] for part in parts], _view_as(torch.float32, scratch)
        self.exchange_sum(operation, tag, self._replicas, into[mine], rows, room)
        others = [(peer, part) for peer, part in zip(self._replicas, parts, strict=True) if peer != self._rank]
        sends = [(peer, into[mine]) for peer, _ in others]
        self._messages.exchange(operation, tag, sends, [(peer, into[part]) for peer, part in others])

    def exchange_sum(
        self, operation: str, tag: int, peers: Sequence[int], into: Tensor, rows: Sequence[Tensor], scratch: Tensor
    ) -> None:
        """Send each peer its row; sum the rows that come for this rank, in the order of ``peers``.

        ``scratch`` is of the rows' type.
        """
        sends = [(peer, row) for peer, row in zip(peers, rows, strict=True) if peer != self._rank]
        place = peers.index(self._rank)

        def add(piece: slice, received: Sequence[Tensor]) -> None:
            ordered_sum([*received[:place], rows[place][piece], *received[place:]], into[piece], self._work)

        others, numel = [peer for peer, _ in sends], into.numel()
        count = self._messages.rooms(others)
        room = scratch[: count * numel].view(count, numel)
        self._messages.exchange_and_read(operation, tag, sends, others, room, add)


def largest_piece(numel: int, room_bytes: int, needed_bytes: Callable[[int], int]) -> int:
    """Return how many elements of a shard can be exchanged at a time in this memory; 0: none."""
    if needed_bytes(numel) <= room_bytes:
        return max(numel, 1)
    return room_bytes // needed_bytes(_CUT_NUMEL) * _CUT_NUMEL


def pieces(numel: int, step: int) -> Iterator[slice]:
    """Yield slices of at most ``step`` elements, in order, which cover ``numel`` elements."""
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


def ordered_sum(parts: Sequence[Tensor], into: Tensor, work: Tensor | None = None) -> None:
    """Sum the parts in their order and in fp32, and round once into ``into``.

    ``work``: fp32 memory for a piece, where the accelerator has the parts. Two of them are added by one operation where
    it gives the same bits: it computes in fp32 and rounds once.
    """
    if work is None:
        ps_kernels.sum_in_order(parts, into)
        return
    two, single = len(parts) == 2, into.dtype is torch.float32
    fused = len(parts) > 1 and parts[0].dtype is into.dtype and (two or single)
    direct = fused or single
    most = max(into.numel(), 1) if fused and two else work.numel()  # two parts need no memory for partial sums
    for piece in pieces(into.numel(), most):
        total = into[piece] if direct else work[: piece.stop - piece.start]
        if fused:
            torch.add(parts[0][piece], parts[1][piece], out=total)
        else:
            total.copy_(parts[0][piece])
        for part in parts[2 if fused else 1 :]:
            total.add_(part[piece])
        if not direct:
            into[piece].copy_(total)


def _view_as(kind: torch.dtype, scratch: Tensor) -> Tensor:
    return scratch[: scratch.numel() // kind.itemsize * kind.itemsize].view(kind)

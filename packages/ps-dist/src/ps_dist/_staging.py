"""Collectives of a device's memory, by way of the host's.

What a process gives is copied down, travels between processes like any host memory, and what comes is copied up: in
pieces, where the staging memory is too small for all. Sums are taken on the way, by the processor, so their bits are
those of collectives in host memory. Which card a process has does not matter: several may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ps_dist._mesh import Mesh
from ps_dist._wire import Sum, Wire

_ALIGNED = 128
_CUT_NUMEL = 64
"""Pieces end at multiples of this many elements."""


class Carrier(Protocol):
    """Work on a device's memory, in the order of a stream."""

    @property
    def staging(self) -> Tensor:
        """Host memory, for whatever is on its way: bytes."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy of bytes from or to the staging memory."""

    def working(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> AbstractContextManager[object]:
        """What PyTorch launches meanwhile goes on the stream; this is what it touches."""

    def settle(self) -> None:
        """Block until everything launched is done."""


def staging_bytes(numel: int, kind: torch.dtype, mesh: Mesh, total: Sum) -> int:
    """What a gather or a sum of shards of so many elements takes in one piece."""
    given = _aligned(mesh.shards * numel * kind.itemsize)
    return given + _aligned(numel * torch.float32.itemsize) + total.scratch_bytes(numel, kind)


class Staged:
    """Collectives that are under way on the carrier's stream when they return."""

    def __init__(self, wire: Wire, total: Sum, mesh: Mesh, carrier: Carrier, enter: Callable[..., int]) -> None:
        """``enter``: says what is done now, and gives the tag of its messages."""
        self._wire, self._sum, self._mesh, self._carrier, self._enter = wire, total, mesh, carrier, enter

    def all_gather(self, into: Tensor | None, shard: Tensor, what: str, takers: Collection[int]) -> None:
        """As `Bench.all_gather`; ``shard`` may lie in either memory."""
        peers, place, carrier = self._mesh.shard_peers, self._mesh.shard, self._carrier
        tag = self._enter("all_gather", what, shard.numel() * len(peers), shard.dtype)
        own = shard.view(torch.uint8)
        rows = None if into is None else into.view(torch.uint8).view(len(peers), -1)
        in_place = rows is not None and rows[place].data_ptr() == own.data_ptr()
        for piece in self._pieces(shard.numel(), shard.dtype):
            cut = slice(piece.start * shard.dtype.itemsize, piece.stop * shard.dtype.itemsize)
            width = cut.stop - cut.start
            staged = carrier.staging[: len(peers) * width].view(len(peers), width)
            carrier.settle()  # nobody reads the staging memory any more, and what is in the host's memory is there
            carrier.copy(staged[place], own[cut])
            carrier.settle()
            whole = None if rows is None else staged.view(-1)
            self._wire.gather("all_gather", tag, peers, whole, staged[place], takers)
            for index in range(len(peers)):
                if rows is not None and not (in_place and index == place):
                    carrier.copy(rows[index][cut], staged[index])

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
        """As `Bench.reduce_scatter`; of ``scratch`` nothing is used."""
        shards, numel, carrier = self._mesh.shards, into.numel(), self._carrier
        tag = self._enter("reduce_scatter", what, numel * shards, kind)
        rows = None if source is None else source.view(shards, -1)
        for piece in self._pieces(numel, kind):
            width = piece.stop - piece.start
            end = shards * width * kind.itemsize
            staged = carrier.staging[:end].view(kind).view(shards, width)
            start, end = _aligned(end), _aligned(end) + width * into.dtype.itemsize
            total, rest = carrier.staging[start:end].view(into.dtype), carrier.staging[_aligned(end) :]
            carrier.settle()
            if rows is not None:
                for index in range(shards):
                    carrier.copy(_bytes(staged[index]), _bytes(rows[index][piece]))
                carrier.settle()
            given = None if rows is None else staged.view(-1)
            self._sum("reduce_scatter", tag, total, given, rest, kind=kind, givers=givers)
            carrier.copy(_bytes(into[piece]), _bytes(total))

    def _pieces(self, numel: int, kind: torch.dtype) -> Iterator[slice]:
        """As large as the staging memory lets them be."""
        room = self._carrier.staging.numel()
        step = numel
        if staging_bytes(numel, kind, self._mesh, self._sum) > room:
            step = room // staging_bytes(_CUT_NUMEL, kind, self._mesh, self._sum) * _CUT_NUMEL
            assert step, "the engine has memory for a piece at least"
        for start in range(0, numel, step or 1):
            yield slice(start, min(start + step, numel))


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED

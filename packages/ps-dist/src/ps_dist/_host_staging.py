"""Collectives of a device's memory through the host's memory.

What a rank sends is copied to the host, and travels between processes like any host memory. What arrives is copied to
the device. Both go in pieces, where the staging memory is too small for all. The processor takes the sums on the way,
so their bits are those of collectives in host memory. It does not matter which device a process has; several may share
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ps_core._collectives import StagingCopier
from ps_dist._mesh import Mesh
from ps_dist._reduce import OrderedReduceScatter, largest_piece, pieces

if TYPE_CHECKING:
    from ps_dist._session import CollectiveSession

_ALIGNED = 128


def staging_bytes(numel: int, kind: torch.dtype, mesh: Mesh, reduce_scatter: OrderedReduceScatter) -> int:
    """Return the staging memory with which shards of ``numel`` elements are gathered or summed in one piece."""
    sent = _aligned(mesh.shards * numel * kind.itemsize)
    return sent + _aligned(numel * torch.float32.itemsize) + reduce_scatter.scratch_bytes(numel, kind)


class HostStagedCollectives:
    """Collectives whose last copies are still in progress on the copier's stream when they return."""

    def __init__(self, session: CollectiveSession, copier: StagingCopier[Tensor]) -> None:
        """Copy from and to the device by the copier."""
        self._session, self._mesh, self._copier = session, session.mesh, copier

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        """Gather shards as `CollectiveSession.all_gather`; ``shard`` may lie on the device or on the host."""
        peers, place, copier = self._mesh.shard_peers, self._mesh.shard, self._copier
        tag = self._session.enter_buffer("all_gather", what, into)
        own = shard.view(torch.uint8)
        rows = into.view(torch.uint8).view(len(peers), -1)
        in_place = rows[place].data_ptr() == own.data_ptr()
        for piece in self._pieces(shard.numel(), shard.dtype):
            cut = slice(piece.start * shard.dtype.itemsize, piece.stop * shard.dtype.itemsize)
            width = cut.stop - cut.start
            staged = copier.staging[: len(peers) * width].view(len(peers), width)
            copier.synchronize()  # the copies of the piece before still read the staging memory
            copier.copy(staged[place], own[cut])
            copier.synchronize()
            self._session.messages.gather("all_gather", tag, peers, staged.view(-1), staged[place])
            for index in range(len(peers)):
                if not (in_place and index == place):
                    copier.copy(rows[index][cut], staged[index])

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        """Sum shards as `CollectiveSession.reduce_scatter`; ``scratch`` is not used."""
        shards, numel, kind, copier = self._mesh.shards, into.numel(), source.dtype, self._copier
        tag = self._session.enter_buffer("reduce_scatter", what, source)
        rows = source.view(shards, -1)
        for piece in self._pieces(numel, kind):
            width = piece.stop - piece.start
            end = shards * width * kind.itemsize
            staged = copier.staging[:end].view(kind).view(shards, width)
            start, end = _aligned(end), _aligned(end) + width * into.dtype.itemsize
            total, rest = copier.staging[start:end].view(into.dtype), copier.staging[_aligned(end) :]
            copier.synchronize()
            for index in range(shards):
                copier.copy(staged[index].view(torch.uint8), rows[index][piece].view(torch.uint8))
            copier.synchronize()
            self._session.host_sum(tag, total, staged.view(-1), rest)
            copier.copy(into[piece].view(torch.uint8), total.view(torch.uint8))

    def _pieces(self, numel: int, kind: torch.dtype) -> Iterator[slice]:
        """Return pieces of a shard, as large as the staging memory allows."""
        step = largest_piece(
            numel,
            self._copier.staging.numel(),
            lambda piece: staging_bytes(piece, kind, self._mesh, self._session.host_sum),
        )
        assert step, "the engine has memory for a piece at least"
        return pieces(numel, step)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED) * _ALIGNED

"""The `Collectives` protocol of ps_core, over torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ps_core._errors import InvalidInput, RanksDiverged

_PIECE_NUMEL = 1 << 17
"""Elements summed at a time, so that the work space stays in the cache."""


class TorchCollectives:
    """One process's place in the group; made by `ps_dist.connect`.

    A failure of any process shows in every other as `RanksDiverged`, at the latest after the timeout.
    """

    def __init__(self, *, timeout_s: float, owned: bool) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._owned = owned
        self._open = True
        self.rank = dist.get_rank()
        """This process, from 0."""
        self.ranks = dist.get_world_size()
        """How many processes there are."""

    def all_gather(self, into: Tensor, shard: Tensor) -> None:
        """Put every process's equal ``shard`` into ``into``, in rank order."""
        self._check("all_gather", whole=into, shard=shard)
        if into.dtype != shard.dtype:
            raise InvalidInput(f"all_gather: into is {into.dtype} but shard is {shard.dtype}; expected one type")
        with self._named("all_gather"):
            _gather(_as_wire(into), _as_wire(shard))

    def reduce_scatter(self, into: Tensor, source: Tensor) -> None:
        """Sum this process's shard of every process's ``source`` into ``into``.

        Each process sends the others their shards as they are and adds what it receives in single precision, in rank
        order, rounding once to the type of ``into``: the bits depend neither on who came first nor on the transport.
        The received shards take as many bytes as ``source``.
        """
        self._check("reduce_scatter", whole=source, shard=into)
        received = torch.empty_like(source)
        with self._named("reduce_scatter"):
            dist.all_to_all_single(_as_wire(received), _as_wire(source))
        _sum_rows(received.view(self.ranks, -1), into)

    def all_reduce_sum(self, value: float) -> float:
        """The sum of every process's value in double precision and rank order, the same bits on each."""
        return sum(self._all_values("all_reduce_sum", value))

    def all_reduce_max(self, value: float) -> float:
        """The largest of every process's values; nan if any is nan."""
        values = self._all_values("all_reduce_max", value)
        return next((each for each in values if each != each), max(values))  # noqa: PLR0124 - only nan differs from itself

    def barrier(self) -> None:
        """Return when every process has come here."""
        self._all_values("barrier", 0.0)

    def close(self) -> None:
        """Leave the group, if `connect` made it; safe to call twice."""
        if self._open and self._owned:
            dist.destroy_process_group()
        self._open = False

    def _all_values(self, operation: str, value: float) -> list[float]:
        # On the CPU: the group that connect makes has a CPU transport beside any other.
        mine, everyone = torch.tensor([value], dtype=torch.float64), torch.empty(self.ranks, dtype=torch.float64)
        with self._named(operation):
            _gather(everyone, mine)
        values: list[float] = everyone.tolist()
        return values

    def _check(self, operation: str, *, whole: Tensor, shard: Tensor) -> None:
        for buffer in (whole, shard):
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise InvalidInput(f"{operation}: buffers must be one-dimensional and contiguous")
        if whole.numel() != shard.numel() * self.ranks:
            raise InvalidInput(
                f"{operation}: expected {self.ranks} shards of {shard.numel()} elements, found {whole.numel()} elements"
            )
        if whole.device != shard.device:
            raise InvalidInput(f"{operation}: buffers on {whole.device} and {shard.device}; expected one device")

    @contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        """Turn the transport's error into one that says where and who."""
        if not self._open:
            raise InvalidInput(f"{operation}: rank {self.rank} has left the group")
        try:
            yield
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RanksDiverged(
                f"rank {self.rank} of {self.ranks}: {operation} failed, so another process has ended or does "
                f"something else; look for the first error in its output ({reason})"
            ) from error


def _gather(into: Tensor, shard: Tensor) -> None:
    # torch 2.13 deprecates the name by which older ones know this.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, shard)


def _as_wire(buffer: Tensor) -> Tensor:
    """What only moves travels as bytes: no transport need know its type, and none may touch it."""
    return buffer.view(torch.uint8)


def _sum_rows(rows: Tensor, into: Tensor) -> None:
    numel = into.numel()
    total = torch.empty(min(numel, _PIECE_NUMEL), dtype=torch.float32, device=into.device)
    for start in range(0, numel, _PIECE_NUMEL):
        piece = slice(start, min(start + _PIECE_NUMEL, numel))
        work = total[: piece.stop - piece.start]
        work.copy_(rows[0, piece])
        for row in rows[1:]:
            work.add_(row[piece].to(torch.float32))
        into[piece].copy_(work)

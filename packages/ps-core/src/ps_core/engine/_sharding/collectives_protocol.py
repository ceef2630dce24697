"""Protocols of the collectives that the engine calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ps_core._collectives import Collectives, StagingCopier
from ps_core.engine._execution.build_components import Ranks


class Pending(Protocol):
    """A collective that has been submitted."""

    @property
    def done(self) -> bool:
        """Return True if `wait` returns, or raises, at once."""

    # Any: see `AsyncCollectives.start`.
    def wait(self) -> Any:
        """Wait until its buffers may be read and reused; return what its job returned."""


class BufferCollectives(Protocol):
    """Collectives of large buffers."""

    def all_gather(self, into: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        """Gather the shards of all ranks on each of them."""

    def reduce_scatter(self, into: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor, what: str) -> None:
        """Sum the sources of all ranks, which are of one type, into shards."""


class CollectiveSession(BufferCollectives, Protocol):
    """Collectives for a job that runs at the same place in the order on every rank."""

    def exchange(self, mine: bytes, what: str) -> list[bytes]:
        """Return the bytes of all ranks, in order of rank; every rank gives equally many."""

    def on_device(self, copier: StagingCopier[torch.Tensor]) -> BufferCollectives:
        """Return the collectives of a device's memory, in an order that every rank knows beforehand.

        They may end on the copier's stream after they return.
        """


class AsyncCollectives(Ranks, Collectives[torch.Tensor], Protocol):
    """Collectives that run beside the computation; see `ps_dist.TorchCollectives`."""

    @property
    def local_ranks(self) -> int:
        """Return the number of processes on this computer."""

    def start(self, job: Callable[[CollectiveSession], object]) -> Pending:
        """Run a job on the communication thread, after all jobs started before."""

    def serve(self, answer: Callable[[int, int], torch.Tensor | None]) -> Callable[[int, int], list[torch.Tensor]]:
        """Answer other ranks' questions for shards of a model, by group and steps, on another thread, as bytes.

        ``answer`` returns None where it cannot answer yet, and is called again. Return what asks all ranks, and gives
        their answers in order of rank; no rank's collectives wait for it.
        """

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the scratch bytes with which a reduce-scatter is done in one piece."""

    def staging_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the staging bytes with which a device's collectives go in one piece; 0 if they need none."""

    def reach(self, where: torch.device, why_by_host: str = "") -> str | None:
        """Decide, all ranks at once, what memory of this CUDA device travels by. Return a message, or None.

        ``why_by_host``: why shared host memory is faster here; empty if it is not. The decision holds for every model
        from then on.
        """

    @property
    def host_memory(self) -> Callable[[int], torch.Tensor] | None:
        """Allocates host memory, as bytes, that the other ranks read without a copy; None: there is none."""

    @property
    def common_file(self) -> Callable[[], int | None] | None:
        """Makes an empty file in memory, and returns each rank's descriptor, if all ranks ask; None: they share none.

        It returns None on all ranks if it fails.
        """

    @property
    def why_not_shared(self) -> str:
        """Why ranks of one computer do not share host memory; empty if they do, or if they were not to."""

    @property
    def card(self) -> int | None:
        """Return the only CUDA device whose memory this process can have collectives of; None: any."""

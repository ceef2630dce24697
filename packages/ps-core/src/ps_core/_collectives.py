"""Define what the engine asks of a group of processes; ps_dist implements it, and tests may too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, runtime_checkable

Buffer = TypeVar("Buffer")
Buffer_contra = TypeVar("Buffer_contra", contravariant=True)
"""A one-dimensional, contiguous array of any library; the pure core never reads its contents."""


@runtime_checkable
class Collectives(Protocol[Buffer_contra]):
    """Protocol of collectives: every process calls the same methods in the same order.

    A method returns when its result may be read.
    """

    @property
    def rank(self) -> int:
        """Return this process's number, from 0."""

    @property
    def ranks(self) -> int:
        """Return how many processes there are."""

    def all_gather(self, into: Buffer_contra, shard: Buffer_contra) -> None:
        """Copy every process's equal ``shard`` into ``into``, in rank order."""

    def reduce_scatter(self, into: Buffer_contra, source: Buffer_contra) -> None:
        """Sum this process's shard of every process's ``source`` into ``into``.

        ``source`` is sent in its own type. The sum is taken in single precision, in rank order. It is rounded once to
        the type of ``into``.
        """

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum of every process's value, the same bits on each."""

    def all_reduce_max(self, value: float) -> float:
        """Return the largest of every process's values; nan if any is nan."""

    def barrier(self) -> None:
        """Return when every process has called this."""

    def close(self) -> None:
        """Leave the group; safe to call twice."""


class StagingCopier(Protocol[Buffer]):
    """Copies and other work on a device's memory, in the order of one stream."""

    @property
    def staging(self) -> Buffer:
        """Host memory that data passes through, as bytes."""

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Launch a copy of bytes from or to the staging memory."""

    def on_stream(self, what: str, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> AbstractContextManager[object]:
        """Run PyTorch's launches within the block on the stream; ``reads`` and ``writes``: the memory they use."""

    def synchronize(self) -> None:
        """Block this thread until everything launched on the stream is complete."""

"""Collectives of ranks as threads, launched on the streams of CUDA devices that the CPU plays."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from _threads import Session, Together


class OnStream:
    """The collectives of a session, launched on a stream."""

    def __init__(self, session: Session, carrier: Any) -> None:
        self._session, self._carrier = session, carrier

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> None:
        with self._carrier.on_stream(what, (shard,), (into,)):
            self._session.all_gather(into, shard, what)

    def reduce_scatter(self, into: Tensor, source: Tensor, scratch: Tensor, what: str) -> None:
        with self._carrier.on_stream(what, (source,), (into, scratch)):
            self._session.reduce_scatter(into, source, scratch, what)


def launch_on_stream(each: Together) -> None:
    """Launch this rank's collectives of a device's memory on its stream, as NCCL's are."""
    card: Any = each
    card.staging_bytes = lambda *_: 0
    card._session.on_device = lambda carrier: OnStream(card._session, carrier)

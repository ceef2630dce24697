"""Tell the collectives of several models of the same processes apart.

Each collective comes with words that say what it is for. Ranks that do different things are found by these words, which
are the same for two models of one class. So the words of each model but the first begin with the model's number. Models
are numbered in the order of the calls of `chunked`, which all ranks make alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from ps_core._collectives import StagingCopier
from ps_core.engine._sharding.collectives_protocol import (
    AsyncCollectives,
    BufferCollectives,
    CollectiveSession,
    Pending,
)

_MODELS: dict[int, int] = {}
"""The number of models that were made with each connection so far, by the connection's `id`."""


def for_next_model(together: AsyncCollectives) -> AsyncCollectives:
    """Return the collectives for one more model; those that cannot be weakly referenced are not counted."""
    own = id(together)
    if own not in _MODELS:
        try:
            weakref.finalize(together, _MODELS.pop, own).atexit = False
        except TypeError:
            return together
    number = _MODELS[own] = _MODELS.get(own, 0) + 1
    return together if number == 1 else cast(AsyncCollectives, _OfModel(together, f"model {number}"))


class _WithWords:
    """Has all that another object has; what its collectives are for begins with ``words``."""

    def __init__(self, of: Any, words: str) -> None:
        self._of, self._words = of, words

    def _said(self, what: str) -> str:
        return f"{self._words}: {what}"

    # Any: whatever the other object has.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class _OfModel(_WithWords):
    """The collectives of one model. (Agreements have no number: errors quote them, and other collectives follow.)"""

    def start(self, job: Callable[[CollectiveSession], object]) -> Pending:
        started: Pending = self._of.start(lambda session: job(cast(CollectiveSession, _Session(session, self._words))))
        return started

    def all_values(self, values: Sequence[float], what: str = "", **which: bool) -> list[list[float]]:
        rows: list[list[float]] = self._of.all_values(values, self._said(what), **which)
        return rows


class _Buffers(_WithWords):
    """Collectives of large buffers."""

    def all_gather(self, into: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        self._of.all_gather(into, shard, self._said(what))

    def reduce_scatter(self, into: torch.Tensor, source: torch.Tensor, scratch: torch.Tensor, what: str) -> None:
        self._of.reduce_scatter(into, source, scratch, self._said(what))


class _Session(_Buffers):
    """Those of a job."""

    def exchange(self, mine: bytes, what: str) -> list[bytes]:
        rows: list[bytes] = self._of.exchange(mine, self._said(what))
        return rows

    def on_device(self, copier: StagingCopier[torch.Tensor]) -> BufferCollectives:
        return cast(BufferCollectives, _Buffers(self._of.on_device(copier), self._words))

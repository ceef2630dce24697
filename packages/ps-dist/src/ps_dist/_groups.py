"""Torch's groups of one connection: who makes them, and who takes down what."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ps_dist._attempt import Attempt
from ps_dist._timeouts import Timeouts

_OPEN: dict[Any, bool] = {}
"""This process's connections that were not left, and which has to take down what the first of them initialised."""
_DROP_S = 10.0
"""In which NCCL lets go of a card."""
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""A group whose watchdog writes down what was under way ends the process then, also for the errors of other groups."""
_HANDLED_HERE = NO_DUMP | {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it ends no process by itself: `Watchdog` says who failed
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else the watchdog waits a minute after an error, and we for it
}


class Groups:
    """One connection's; any: torch's stubs do not name the type of a group."""

    def __init__(self, timeouts: Timeouts, *, owned: bool) -> None:
        """``owned``: the default group has to be taken down by whoever leaves last."""
        self._timeout = timedelta(seconds=2 * timeouts.hopeless_s)  # the watchdog finds out sooner who is to blame
        self._timeout_s = timeouts.timeout_s
        self.control = dist.new_group(backend="gloo", timeout=self._timeout)
        """For the host's memory."""
        self._cards: Any = None
        self._stuck = False
        _OPEN[self.control] = owned

    def connect_cards(self) -> Any:
        """A group of NCCL's, which connects them with its first message."""
        with in_environment(_HANDLED_HERE):
            self._cards = dist.new_group(backend="nccl", timeout=self._timeout)
        return self._cards

    def drop_cards(self) -> None:
        """Let go of the card, whatever is under way: nothing works there from then on.

        NCCL may wait for the others in that, too.
        """
        group, self._cards = self._cards, None
        if group is not None:
            self._stuck = bool(Attempt(lambda: _abort(group)).within(_DROP_S))

    def leave(self) -> None:
        """Take down what was made."""
        group = self._cards
        if group is not None:  # which waits for the others of this computer
            self._stuck = bool(Attempt(lambda: _destroy(group)).within(self._timeout_s))
        _destroy(self.control)
        if not _OPEN.pop(self.control):
            return
        if _OPEN:
            _OPEN[next(iter(_OPEN))] = True  # who goes last takes down what the first began
        elif dist.is_initialized() and not self._stuck:  # it would wait for that group again
            dist.destroy_process_group()


def _abort(group: Any) -> None:
    group.abort()
    _destroy(group)


def _destroy(group: Any) -> None:
    with suppress(ValueError):  # the program took everything down itself
        dist.destroy_process_group(group)


@contextmanager
def in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """With these variables; PyTorch's NCCL groups read them when they are made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

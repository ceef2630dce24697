"""Torch's process groups of one connection: which are made, and which are taken down when."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ps_dist._abandonable_call import AbandonableCall
from ps_dist._timeouts import Timeouts

_DROP_S = 10.0
"""Seconds in which NCCL releases a device."""
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""With a dump, the group's watchdog ends the process, also for the errors of other groups."""
_HANDLED_HERE = NO_DUMP | {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # it must not end the process: our `Watchdog` says which rank failed
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else NCCL's watchdog waits a minute after an error, and we for it
}


class DefaultGroup:
    """Decides who takes down torch's default process group, which all connections of a process use.

    The last connection to close does, if a connection made the group and not the program.
    """

    def __init__(self) -> None:
        self._open: set[Any] = set()
        """The host groups of open connections (any: torch's stubs do not name the type of a group)."""
        self._made_here = False

    def add(self, group: Any, *, made_here: bool) -> None:
        """Note an open connection; ``made_here``: it has initialised the default group."""
        self._open.add(group)
        self._made_here |= made_here

    def remove(self, group: Any) -> bool:
        """Note that a connection closes; True if it has to take down the default group."""
        self._open.discard(group)
        if self._open or not self._made_here:
            return False
        self._made_here = False
        return True


class ProcessGroups:
    """The groups of one connection."""

    def __init__(self, timeouts: Timeouts, default: DefaultGroup, *, made_default: bool) -> None:
        """Make the host group. ``made_default``: this connection has initialised the default group."""
        self._timeout = timedelta(seconds=2 * timeouts.hopeless_s)  # our `Watchdog` finds the cause sooner
        self.timeout_s = timeouts.timeout_s
        """Seconds after which a process is no longer waited for."""
        self._default = default
        self.host = dist.new_group(backend="gloo", timeout=self._timeout)
        """For the host's memory (any: torch's stubs do not name the type of a group)."""
        self._nccl: Any = None
        self._stuck = False
        default.add(self.host, made_here=made_default)

    def connect_nccl(self) -> Any:
        """Make a group of NCCL's, which connects the devices with its first message; this may never return."""
        with in_environment(_HANDLED_HERE):
            self._nccl = dist.new_group(backend="nccl", timeout=self._timeout)
        return self._nccl

    def abort_nccl(self) -> None:
        """Release the device at once, whatever is in progress; NCCL may wait for other ranks, so not for long."""
        group, self._nccl = self._nccl, None
        if group is not None:
            self._stuck = bool(AbandonableCall(lambda: _abort(group)).wait(_DROP_S))

    def destroy(self) -> None:
        """Take down the groups of this connection, and torch's default group if it falls to this connection."""
        group = self._nccl
        if group is not None:  # it waits for the other ranks of this computer
            self._stuck = bool(AbandonableCall(lambda: _destroy(group)).wait(self.timeout_s))
        _destroy(self.host)
        if self._default.remove(self.host) and dist.is_initialized() and not self._stuck:  # or it would wait again
            dist.destroy_process_group()


def _abort(group: Any) -> None:
    group.abort()
    _destroy(group)


def _destroy(group: Any) -> None:
    with suppress(ValueError):  # the program took everything down itself
        dist.destroy_process_group(group)


@contextmanager
def in_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables within the block; PyTorch's NCCL groups read them when they are made."""
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

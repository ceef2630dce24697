"""Ask the kernel which ranks on this computer have ended."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass(frozen=True, slots=True)
class Location:
    """Says where a rank runs."""

    host: str
    process: int
    machine: str = ""
    """The same for processes that know each other's process ids; empty: not known."""
    started: str = ""
    """Time of the process's start, in the kernel's ticks."""

    @staticmethod
    def own() -> Location:
        """Return where this process runs."""
        host, process = socket.gethostname(), os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
            namespace = os.readlink("/proc/self/ns/pid")
            return Location(host, process, f"{host} {boot} {namespace}", _started(process))
        except OSError:
            return Location(host, process)


class LocalRanks:
    """Handles of the other ranks' processes; a handle tells of the end of one process, never of another's."""

    def __init__(self, locations: Mapping[int, Location]) -> None:
        """Open a handle for each rank of this computer, where the kernel has them."""
        self._ranks: dict[int, int] = {}
        self._poll, self._polling = select.poll(), Lock()
        own = Location.own()
        for rank, location in locations.items():
            if own.machine and location.machine == own.machine and location.process != own.process:
                self._open(rank, location)

    def _open(self, rank: int, location: Location) -> None:
        """Open a handle; without one, connections that break tell of the rank's end, as between computers."""
        with suppress(AttributeError, OSError):
            handle = os.pidfd_open(location.process)
            if _started(location.process) != location.started:  # computers that are copies may pass for one
                os.close(handle)
                return
            self._ranks[handle] = rank
            self._poll.register(handle, select.POLLIN)

    def ended(self) -> frozenset[int]:
        """Return the ranks whose processes are gone."""
        with self._polling:  # a poll object refuses two threads at once
            return frozenset(self._ranks[handle] for handle, _ in self._poll.poll(0))

    def close(self) -> None:
        """Close the handles."""
        with self._polling:
            for handle in self._ranks:
                self._poll.unregister(handle)
                os.close(handle)
            self._ranks.clear()


def _started(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[19]

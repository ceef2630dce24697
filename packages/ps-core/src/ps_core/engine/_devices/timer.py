"""Note the times at which queues reach places in their work, for a profile."""

from __future__ import annotations

import math
import time

from ps_core._plan import Queue
from ps_core.engine._devices.device import Mark, Worker
from ps_core.engine._devices.disk.queues import DiskQueues


class NotedTime:
    """A time of the host's clock."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = math.nan

    def note(self) -> None:
        """Store the current time."""
        self.seconds = time.perf_counter()

    def read(self) -> float:
        """Return the time."""
        return self.seconds


class HostTimer:
    """Note times of work that threads of this process do."""

    def __init__(self, disk: DiskQueues, worker: Worker | None) -> None:
        self._disk, self._worker = disk, worker

    def mark(self, queue: Queue) -> Mark:
        """Note the time now, or on the thread of the disk's queue."""
        noted = NotedTime()
        if self._disk.serve(queue):
            self._disk.streams.wait_for(queue, noted.note)
            self._disk.streams.record(queue)  # launches an empty piece of work behind the wait
        else:
            noted.note()
        return noted.read

    def mark_worker(self) -> Mark:
        """Note the time on the worker's thread, by an empty piece of work."""
        noted = NotedTime()
        assert self._worker is not None, "only what was launched on a worker is measured there"
        self._worker.launch("a time", (), (), noted.note)
        return noted.read

    def finish(self) -> None:
        """Do nothing: all times were noted."""

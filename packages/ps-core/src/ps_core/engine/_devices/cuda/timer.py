"""Note times on CUDA streams, with events that are read once all work is done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ps_core._plan import Queue
from ps_core.engine._devices.cuda.runtime import CudaRuntime, RawEvent, Stream
from ps_core.engine._devices.device import Mark, Worker
from ps_core.engine._devices.disk.queues import DISK_QUEUES, DiskQueues
from ps_core.engine._devices.timer import HostTimer


class CudaTimer(HostTimer):
    """Note times on streams and threads. Nothing waits for an event before `finish`."""

    def __init__(
        self,
        runtime: CudaRuntime,
        stream: Callable[[Queue], Stream],
        pool: list[RawEvent],
        disk: DiskQueues,
        worker: Worker,
    ) -> None:
        """Make a timer; ``pool``: timing events to use again, to which the new ones are added in the end."""
        super().__init__(disk, worker)
        self._runtime, self._stream, self._pool = runtime, stream, pool
        self._used: list[RawEvent] = []
        self._seconds: dict[int, float] = {}
        """The time of each event that has been read, by the event's id."""

    def mark(self, queue: Queue) -> Mark:
        """Record a timing event on the queue's stream."""
        if queue is Queue.CPU or queue in DISK_QUEUES:
            return super().mark(queue)
        event = self._pool.pop() if self._pool else self._runtime.timing_event()
        event.record(self._stream(queue))
        self._used.append(event)
        return partial(self._seconds.__getitem__, id(event))

    def finish(self) -> None:
        """Read every event against one that is recorded now, whose time on the host's clock is known."""
        self.mark(Queue.COMPUTE)
        last = self._used[-1]
        last.synchronize()
        now = self._runtime.now_s
        self._seconds.update((id(event), now - self._runtime.elapsed_s(event, last)) for event in self._used)
        self._pool += self._used
        self._used = []

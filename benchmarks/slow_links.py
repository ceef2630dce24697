"""Transfers held to the rate of a link, for benchmarks on machines that have none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ps_core._plan import Queue
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.device import Event


@dataclass(frozen=True, slots=True)
class LateEvent:
    """An event that is over at some time."""

    queue: Queue
    ready_s: float


class ThrottledLinks:
    """Copies up and down take as long as they would at some rate, each direction on its own.

    Bytes move at once; it is the event behind them that is ready late, and the host thread, which computes too, that
    sleeps for it.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected a rate above 0, found {bytes_per_s!r}")
        self._bytes_per_s = bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._free_s = [0.0 for _ in Queue]  # when what was launched on a queue is done

    def copy(self, queue: Queue, numbytes: int) -> None:
        """A copy is about to be made."""
        if queue in (Queue.H2D, Queue.D2H):
            self._free_s[queue] = max(self._free_s[queue], self._clock()) + numbytes / self._bytes_per_s

    def ready_s(self, queue: Queue) -> float:
        """When what was launched so far is done."""
        return self._free_s[queue]

    def wait(self, queue: Queue, ready_s: float) -> None:
        """What follows is not done before that time."""
        self._free_s[queue] = max(self._free_s[queue], ready_s)
        if queue in (Queue.COMPUTE, Queue.CPU):
            self._sleep_until(ready_s)

    def synchronize(self) -> None:
        """Sleep until everything is done."""
        self._sleep_until(max(self._free_s))

    def _sleep_until(self, ready_s: float) -> None:
        remaining_s = ready_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)


class SlowDevice(CpuDevice):
    """A CPU that plays an accelerator behind slow links. It has no disk."""

    def __init__(self, links: ThrottledLinks) -> None:
        super().__init__(name="emulated", keeps_host_memory=True)
        self.synchronous = False
        self._links = links
        self.copied_s: list[float] = []
        """Seconds of each copy so far, which the thread that computes makes here, and a link elsewhere."""

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        self._links.copy(queue, target.nbytes)
        begin = time.perf_counter()
        super().copy(queue, target, source)
        self.copied_s.append(time.perf_counter() - begin)

    def record(self, queue: Queue) -> Event:
        return LateEvent(queue, self._links.ready_s(queue))

    def wait(self, queue: Queue, event: Event) -> None:
        if isinstance(event, LateEvent):
            self._links.wait(queue, event.ready_s)

    def synchronize(self) -> None:
        super().synchronize()
        self._links.synchronize()

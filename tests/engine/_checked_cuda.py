"""A CUDA device that the CPU plays, and that checks all order: see `ps_core.engine._devices.cpu.race_check`.

Two threads launch here, the training's and that of collectives, and what the one has waited for the other knows
nothing of; only events order their work. Nothing is raised, or other ranks would wait: what is not ordered is kept, for
the test to look at.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from torch import Tensor

from _fake_cuda import FakeRuntime
from checked_device.addresses import AddressNames
from checked_device.race_check import QUEUES_AND_WORKER, START, History, QueueOrWorker, RaceDetector, Range
from ps_core._errors import PlanMismatch
from ps_core._plan import Queue
from ps_core.engine._devices.cuda.device import CudaDevice

COMM_THREAD = "ps_dist collectives"


class OtherStream(IntEnum):
    """Streams that compute besides the first: each has a clock of its own."""

    SECOND = len(QUEUES_AND_WORKER)
    THIRD = SECOND + 1


COMPUTE_STREAMS: tuple[Any, ...] = (Queue.COMPUTE, *OtherStream)


class TwoHosts(RaceDetector):
    """Each thread has a clock of its own."""

    def __init__(self, places: AddressNames, history: History) -> None:
        super().__init__(places.name, history)
        start = [*START, *(0 for _ in OtherStream)]
        self._clocks = [list(start) for _ in start]
        self._hosts = {True: list(start), False: list(start)}

    def mine(self) -> None:
        """From here on this thread is the host."""
        self._clocks[Queue.CPU] = self._hosts[threading.current_thread().name == COMM_THREAD]


class Mark:
    """What an event is for the checker."""

    def __init__(self, event: Any, clock: tuple[int, ...]) -> None:
        self.event, self.clock = event, clock

    @property
    def queue(self) -> Queue:
        found: Queue = self.event.queue
        return found

    def block(self) -> None:
        self.event.block()


class CheckedCuda(CudaDevice):
    """Of computation and of the host's work it knows what is declared; of copies everything."""

    def __init__(self, runtime: FakeRuntime) -> None:
        history = History()
        self._places = AddressNames(history.forget)
        self._ordering = TwoHosts(self._places, history)
        self._check = threading.RLock()
        self.unordered: set[str] = set()
        """What may meet: ``COLL reads what COMPUTE writes``, the later one first."""
        self._computes: dict[Any, Any] = {}
        """The checker's queue for each compute stream."""
        super().__init__(runtime)

    def arena(self, size_bytes: int) -> Tensor:
        return self._seen("arena", super().arena(size_bytes))

    def host(self, size_bytes: int) -> Tensor:
        return self._seen("host", super().host(size_bytes))

    def _seen(self, kind: str, memory: Tensor) -> Tensor:
        with self._check:
            self._places.add(memory, kind, weakref.ref(memory))
        return memory

    def copy(self, queue: Queue, target: Tensor, source: Tensor) -> None:
        self._launch(queue, "copy", (source,), (target,))
        super().copy(queue, target, source)

    def declare_access(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if (
            queue is not Queue.COLL or threading.current_thread().name == COMM_THREAD
        ):  # else it only tells what is to come
            self._launch(queue, what, reads, writes)
        super().declare_access(queue, what, reads, writes)

    def _checked(self, queue: Queue) -> QueueOrWorker:
        """Return the checker's queue for a queue of the device; each compute stream has its own."""
        if queue is not Queue.COMPUTE:
            return queue
        found: QueueOrWorker = self._computes[self._stream(queue)]
        return found

    def _stream(self, queue: Queue) -> Any:
        """Tell the checker whether a new compute stream waits for the one before."""
        last = self._compute
        end = self._runtime.current().end  # type: ignore[attr-defined]
        stream: Any = super()._stream(queue)
        if queue is Queue.COMPUTE and stream is not last:
            self._computes.setdefault(stream, COMPUTE_STREAMS[len(self._computes) % len(COMPUTE_STREAMS)])
            if last is not None and stream.end > end:
                self._ordering.wait(self._computes[stream], self._ordering.record(self._computes[last]))
        return stream

    def _launch(self, queue: Queue, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        with self._check:
            self._ordering.mine()
            self._places.tidy()
            ranges: list[list[Range]] = [self._places.ranges(each) for each in (reads, writes)]
            try:
                self._ordering.launch(self._checked(queue), what, *ranges)
            except PlanMismatch as error:
                self.unordered.add(_short(str(error)))

    def record(self, queue: Queue) -> Any:
        with self._check:
            self._ordering.mine()
            return Mark(super().record(queue), self._ordering.record(self._checked(queue)))

    def wait(self, queue: Queue, event: Any) -> None:
        if isinstance(event, Mark):
            with self._check:
                self._ordering.mine()
                self._ordering.wait(self._checked(queue), event.clock)
            event = event.event
        super().wait(queue, event)

    def synchronize(self) -> None:
        with self._check:
            self._ordering.mine()
            self._ordering.synchronize()
        super().synchronize()


def _short(message: str) -> str:
    found = re.match(
        r"unordered: '.*?' \(.*? on (\w+)\) (\w+) .* while '.*' \(.*? on (\w+)\), .* still (\w+) ", message
    )
    assert found is not None, message
    return f"{found[1]} {found[2]} what {found[3]} {found[4]}"

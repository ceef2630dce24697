"""The worker's thread of a `CheckedDevice`: its work is checked like a stream's, and done at a random later call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from checked_device.race_check import WORKER, Clock
from ps_core._plan import Queue
from ps_core.engine._devices.device import Event

if TYPE_CHECKING:
    from checked_device.device import CheckedDevice


class WorkMark:
    """A place among the worker's work. Without delays it counts as over once the host thread has waited for it."""

    queue = Queue.CPU

    def __init__(self, device: CheckedDevice, clock: Clock, position: int) -> None:
        self._device, self.clock, self.position = device, clock, position
        self.waited_for = False

    @property
    def done(self) -> bool:
        delays = self._device.delays
        return self.waited_for if delays is None else delays.begun(WORKER) >= self.position

    def block(self) -> None:
        self._device.host_waits_for(self)
        self.waited_for = True


class CheckedWorker:
    """A `Worker` without a thread."""

    def __init__(self, device: CheckedDevice) -> None:
        self._device = device
        self._last: WorkMark | None = None
        self.count = 0
        """How much work was launched."""

    @property
    def busy(self) -> bool:
        if self._last is None or not self._last.done:
            return self._last is not None
        self._last.block()  # what the host thread does from here on comes behind work that it saw to be over
        return False

    def wait(self, event: Event) -> None:
        self._device.worker_waits_for(event)

    def wait_for_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self.wait(event)

    def launch(
        self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], work: Callable[[], object]
    ) -> WorkMark:
        self.count += 1
        self._last = WorkMark(self._device, *self._device.worker_works(what, reads, writes, work))
        return self._last

    def close(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.block()

    def forget_failure(self) -> BaseException | None:
        """Wait until everything launched is over, and return None: work that fails raises where it is launched."""
        self.synchronize()
        return None

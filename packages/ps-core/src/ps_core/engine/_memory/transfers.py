"""Copy chunks between tiers, one at a time, in an order that is always safe.

Every copy waits for all queues, and every queue that computes waits for the copy. Residency uses this on demand, and
between passes. A plan's own moves are launched in `_execution.instruction_executor`. Both keep the same versions of
chunks. So either can take over from the other between two moments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ps_core._plan import Queue
from ps_core.engine._devices.device import Event
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfer_observer import TransferObserver

_UNBUDGETED_BYTES = 2**16
"""Bytes of the buffer between a file and the device, or another file, if the host tier is full."""


class Transfers:
    """Copy chunks between the slots of one store."""

    def __init__(self, store: TierStore, watcher: TransferObserver) -> None:
        self._store, self._device = store, store.device
        self.watcher = watcher
        self._before_use: Callable[[], None] | None = None
        """Undoes early steps before host memory is used outside of a plan; None: there are none to undo."""

    # Chunks.

    def copy_to(self, chunk: Chunk, slot: Slot) -> Slot:
        """Copy the chunk's current bytes into ``slot``; work launched later, on any queue, may read them."""
        source, queue = self.source(chunk), None
        apart = abs(source.tier - slot.tier)
        if apart > 1 or (source.place is not None and slot.place is not None):
            self.copy_via_host(source, slot, chunk.bytes)
        elif apart:
            queue = self.launch(source, slot, chunk.bytes)
        else:
            self._copy_within_tier(source, slot, chunk.bytes)
        chunk.fill(slot)
        if queue is not None:
            self.finish(queue)  # if the disk fails, that makes the slot stale again
        return slot

    def write_home(self, chunk: Chunk) -> None:
        """Copy the current bytes to the home slot if that is stale; do nothing on a disk that failed."""
        if chunk.home_is_stale and not (chunk.home.place is not None and self.broken):
            self.copy_to(chunk, chunk.home)

    def at_home(self, chunk: Chunk) -> Slot:
        """Return the home slot with the current bytes, ready for the host thread to work on."""
        self.write_home(chunk)
        self.wait_for_other_queues(Queue.CPU)
        return chunk.home

    def source(self, chunk: Chunk) -> Slot:
        """Return a slot with the current bytes; raise `TierFailure` again if only a failed disk had them."""
        if not chunk.has_current_copy:
            self.check_disk()
        return chunk.source()

    def near(self, chunk: Chunk) -> Slot:
        """Return a slot with a chunk's current bytes, below an accelerator's memory; the chunk's home is the disk."""
        source = self.source(chunk)
        if source.place is None and source.tier == 0 and self._store.tiers[0].name != "host":
            self.write_home(chunk)
            return chunk.home if not chunk.home_is_stale else source
        return source

    # Slots.

    def release_slot(self, slot: Slot) -> None:
        """Release a slot once everything that was launched is done with it."""
        self.wait_for_other_queues(Queue.COMPUTE)
        self._store.release(slot, Queue.COMPUTE)
        if slot.offset >= 0:
            self._store.arena.return_pages(slot.offset)

    def launch(self, source: Slot, target: Slot, size: int, *, begin: int = 0, to: int = 0) -> Queue:
        """Launch a copy to a neighbouring tier, and return its queue: call `finish` with it next."""
        queue = self._store.link(source, target)
        self.wait_for_other_queues(queue)
        recorder = self.watcher.recorder
        if recorder is None:
            self._store.copy(queue, target, source, size, begin=begin, to=to)
        else:
            what, copy = source.extent or target.extent or "a copy", partial(self._store.copy, queue, target, source)
            recorder.record(queue, what, partial(copy, size, begin=begin, to=to), size)
        self.watcher.moved(source.tier, target.tier, size)
        return queue

    def finish(self, queue: Queue) -> None:
        """Make the compute and CPU queues wait for everything launched on a queue."""
        device, started = self._device, time.perf_counter()
        event = device.record(queue)
        for other in (Queue.COMPUTE, Queue.CPU):
            device.wait(other, event)
        self.watcher.waited(time.perf_counter() - started)

    def do_now(
        self,
        queue: Queue,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        work: Callable[[], object],
    ) -> None:
        """Do work on the compute or CPU queue, behind everything that was launched on the others."""
        self.wait_for_other_queues(queue)
        if not self._store.synchronous:
            self._device.declare_access(queue, what, reads, writes)
        if self.watcher.recorder is None:
            work()
        else:
            self.watcher.recorder.record(queue, what, work)

    def call_before_use(self, undo: Callable[[], None] | None) -> None:
        """Call this before host memory is used outside of a plan; None: call nothing."""
        self._before_use = undo

    def prepare_use(self) -> None:
        """Undo what has to be undone before host memory is used outside of a plan."""
        if self._before_use is not None:
            self._before_use()

    def wait_for_other_queues(self, queue: Queue) -> None:
        """Make all work launched next on a queue wait for everything launched on the others; undo undecided steps."""
        self.prepare_use()
        self.wait_for_others(queue)

    def wait_for_others(self, queue: Queue) -> None:
        """Make all work launched next on a queue wait for everything launched on the others."""
        if self._store.synchronous:
            return
        device, started = self._device, time.perf_counter()
        if device.worker is not None and device.worker.busy:
            device.worker.synchronize()
        for other in self._store.queues:
            if other is not queue:
                device.wait(queue, device.record(other))
        self.watcher.waited(time.perf_counter() - started)

    def join_queues(self) -> None:
        """Make all work launched next on any queue wait for everything launched on every queue."""
        device = self._device
        if device.worker is not None:
            device.worker.synchronize()
        started = time.perf_counter()
        for event in self._join_streams():
            device.wait(Queue.CPU, event)
        self.watcher.waited(time.perf_counter() - started)

    def wait_for_streams(self) -> None:
        """Block until everything launched on streams is done; the worker's thread may go on."""
        started = time.perf_counter()
        for queue in self._store.queues:
            self._device.wait(Queue.CPU, self._device.record(queue))
        self.watcher.waited(time.perf_counter() - started)

    def begin_segment(self) -> None:
        """Join all queues, except the worker's if there is one: its work is waited for slot by slot."""
        worker = self._device.worker
        if worker is None:
            self.join_queues()
            return
        worker.wait_for_all(self._join_streams())

    def _join_streams(self) -> list[Event]:
        """Make all work launched next on any stream wait for everything launched on every stream."""
        device, queues = self._device, self._store.queues
        events = [device.record(queue) for queue in queues]
        for queue in queues:
            for other, event in zip(queues, events, strict=True):
                if other is not queue:
                    device.wait(queue, event)
        return events

    def _copy_within_tier(self, source: Slot, target: Slot, size: int) -> None:
        queue = Queue.CPU if target.tier else Queue.COMPUTE
        self.wait_for_other_queues(queue)
        self._device.declare_access(queue, "a copy within a tier", (source.memory,), (target.memory,))
        target.memory[:size].copy_(source.memory[:size])

    def copy_via_host(self, source: Slot, target: Slot, size: int) -> None:
        """Copy through the tier above the disk, in pieces as large as that tier has room for."""
        tier = len(self._store.tiers) - 2
        piece = min(size, self._store.free_bytes(tier) & -128)
        if piece > 0:
            via = self._store.reserve(tier, piece)
        else:  # a little outside the budget, as the disk's own buffers are
            via = Slot(tier, -1, min(size, _UNBUDGETED_BYTES), self._device.host(min(size, _UNBUDGETED_BYTES)))
        for start in range(0, size, via.bytes):
            count = min(via.bytes, size - start)
            self.finish(self.launch(source, via, count, begin=start))
            self.finish(self.launch(via, target, count, to=start))
        if piece > 0:
            self.release_slot(via)

    # The disk, for the host thread.

    def read(self, slot: Slot, start: int, size: int) -> torch.Tensor:
        """Read bytes of a slot on the disk into new host memory, outside the budget."""
        assert slot.place is not None, "slots on the disk have a place there"
        memory = self._device.host(max(1, size))[:size]
        self.wait_for_other_queues(Queue.DISK_R)
        self._device.read(memory, slot.place, start, _do_nothing)
        self.finish(Queue.DISK_R)
        self.watcher.moved(slot.tier, slot.tier - 1, size)
        return memory

    def write(self, slot: Slot, start: int, source: torch.Tensor) -> None:
        """Write bytes from host memory into a slot on the disk, from byte ``start`` on."""
        assert slot.place is not None, "slots on the disk have a place there"
        self.wait_for_other_queues(Queue.DISK_W)
        self._device.write(slot.place, start, source)
        self.finish(Queue.DISK_W)
        self.watcher.moved(slot.tier - 1, slot.tier, source.numel())

    @property
    def broken(self) -> bool:
        """Return True if the disk tier failed: nothing can be written there any more."""
        return self._store.file is not None and self._store.file.failure is not None

    def check_disk(self) -> None:
        """Raise the disk tier's `TierFailure` again if it has failed."""
        if self._store.file is not None and self._store.file.failure is not None:
            raise self._store.file.failure


def _do_nothing() -> None:
    """Do nothing when a read fails: its caller waits at once, and `finish` raises."""

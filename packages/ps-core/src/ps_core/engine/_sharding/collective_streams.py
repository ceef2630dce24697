"""Order collectives with the rest of a device's work.

[Note: two threads]
Collectives are done by a thread of their own. Where the processor computes (`BlockingCollectives`), that thread reads
and writes memory as the host thread does. All that was launched must be over before a collective is begun. On an
accelerator (`StreamCollectives`) it launches on a stream of its own, `Queue.COLL`. A step comes with events of other
queues (of all, or by a plan of those that it needs), which the stream waits for. Behind a collective the thread records
an event. The other queues wait for it when the step is taken in, or by a plan when they use its memory. So the host
thread waits for neither. Memory of a step is released, or used for something else, only after it was taken in. The
other queues must not wait for what *may* be under way on the stream. Else they would wait for collectives that were
begun ahead of need.

[Note: collectives of a plan on a stream]
Only the thread of collectives launches on that stream, in its own time. So what the plan has the collective queue wait
for goes with the next collective. And a queue waits for a collective once it uses one of its slots, or memory that was
released behind it. Nothing else waits: no copy for a collective that does not use its memory, and no collective for
work that it does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

from ps_core._plan import Instr, Queue
from ps_core._units import align_up
from ps_core.engine._devices.device import Device, Event
from ps_core.engine._memory.chunk import Slot
from ps_core.engine._memory.tier_store import TierStore
from ps_core.engine._memory.transfers import Transfers
from ps_core.engine._parameters.param_state import ParamGroup
from ps_core.engine._sharding.collectives_protocol import AsyncCollectives, BufferCollectives, CollectiveSession

MOST_STAGING_BYTES = 32 * 2**20
"""Most bytes of host memory that a rank uses for staging; larger collectives go in pieces."""
_PART_OF_FREE = 8
"""Staging memory is at most this fraction of the host tier's free bytes."""
_CUT_NUMEL = 64
"""Elements of a shard that go at once at least."""
ORDERED_QUEUES = (Queue.COMPUTE, Queue.H2D, Queue.D2H)
"""The queues of an accelerator that collectives are ordered with."""


class BlockingCollectives:
    """The processor computes, and does collectives too."""

    by_stream = False
    """True: collectives are ordered by events alone, so that no thread waits for one; else everything waits."""

    def __init__(self, device: Device, transfers: Transfers, together: AsyncCollectives) -> None:
        self._device, self._transfers, self._together = device, transfers, together

    def ready(self) -> Sequence[Event]:
        """Wait for every queue's work; return no events."""
        self._transfers.wait_for_other_queues(Queue.COLL)
        self._transfers.wait_for_other_queues(Queue.CPU)
        return ()

    def begin(self, session: CollectiveSession, ready: Sequence[Event]) -> BufferCollectives:
        """Return the session itself."""
        return session

    def end(self) -> Event | None:
        """Return None: a blocking collective is over by now."""
        return None

    def after(self, event: Event | None, queues: Sequence[Queue] = ORDERED_QUEUES) -> None:
        """Make every queue wait for the collective, which is over."""
        event = self._device.record(Queue.COLL)
        for queue in (*ORDERED_QUEUES, Queue.CPU):
            self._device.wait(queue, event)

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the scratch bytes of a sum: room for what all other ranks send."""
        return self._together.scratch_bytes(shard_numel, kind)

    def reaches(self, slot: Slot) -> bool:
        """Return True unless the slot is on the disk."""
        return slot.place is None


class StreamCollectives:
    """An accelerator computes; collectives go by way of the host's memory, unless cards can do them by themselves."""

    by_stream = True

    def __init__(self, store: TierStore, groups: list[ParamGroup], together: AsyncCollectives) -> None:
        self._device, self._together = store.device, together
        least = max((together.staging_bytes(_CUT_NUMEL, group.dtype) for group in groups), default=1)
        whole = max((together.staging_bytes(group.shard_numel, group.dtype) for group in groups), default=1)
        room = min(MOST_STAGING_BYTES, store.free_bytes(1) // _PART_OF_FREE & -128)
        self.staging = store.reserve(1, align_up(max(least, min(whole, room)))) if whole else None
        """Staging memory on the host tier, for as long as the engine lives; None: no collective is staged."""
        memory = torch.empty(0, dtype=torch.uint8, device="cpu") if self.staging is None else self.staging.memory
        self._copier = DeviceStaging(store.device, memory)

    def ready(self) -> Sequence[Event]:
        """Return an event of each queue, behind everything launched so far."""
        return [self._device.record(queue) for queue in (*ORDERED_QUEUES, Queue.CPU)]

    def begin(self, session: CollectiveSession, ready: Sequence[Event]) -> BufferCollectives:
        """Make the collective stream wait for the events; return the session's collectives on the device."""
        self._device.bind_thread()
        for event in ready:
            self._device.wait(Queue.COLL, event)
        return session.on_device(self._copier)

    def end(self) -> Event | None:
        """Return an event behind everything launched on the collective stream."""
        return self._device.record(Queue.COLL)

    def after(self, event: Event | None, queues: Sequence[Queue] = ORDERED_QUEUES) -> None:
        """Make these queues wait for the collective; the host thread waits for one of them before it reads."""
        assert event is not None, "the other thread recorded one"
        for queue in queues:
            self._device.wait(queue, event)

    def scratch_bytes(self, shard_numel: int, kind: torch.dtype) -> int:
        """Return the scratch bytes of a sum on the compute tier; 0 where it is taken in the host's memory."""
        return 0 if self.staging is not None else self._together.scratch_bytes(shard_numel, kind)

    def reaches(self, slot: Slot) -> bool:
        """Return True for device memory, and for host memory if every collective is staged there."""
        return slot.place is None and (self.staging is not None or slot.tier == 0)


class DeviceStaging:
    """Launches copies on the collective stream; used by the communication thread alone."""

    def __init__(self, device: Device, staging: torch.Tensor) -> None:
        self._device = device
        self.staging = staging
        """Host memory, for whatever is on its way."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of bytes from or to the staging memory."""
        self._device.copy(Queue.COLL, target, source)

    @contextmanager
    def on_stream(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run PyTorch's launches within the block on the stream; ``reads`` and ``writes``: the memory they use."""
        self._device.declare_access(Queue.COLL, what, reads, writes)
        with self._device.on(Queue.COLL):
            yield

    def synchronize(self) -> None:
        """Block this thread until everything launched here, and all that it waits for, is complete."""
        self._device.wait(Queue.CPU, self._device.record(Queue.COLL))


CollectiveOrdering: TypeAlias = BlockingCollectives | StreamCollectives
"""The order of one process's collectives and its other work. See [Note: two threads]."""


class CollectiveWaits:
    """Orders the collectives of one segment of a plan with its other queues.

    See [Note: collectives of a plan on a stream].
    """

    def __init__(self, device: Device, ordering: CollectiveOrdering, *, poison: bool) -> None:
        """``poison``: the host thread fills released slots, also on the stream of collectives."""
        self._device, self._ordering, self._poison = device, ordering, poison
        self._before_next: list[Event] = []
        """Events that the next collective waits for."""
        self._ended: list[Event | None] = []
        """The ends of the collectives that the other thread is done with, in order, without their memory."""
        self._last_user: dict[int, int] = {}
        """For each slot, how many collectives had ended with the last one that uses it."""
        self._behind: dict[int, tuple[int, tuple[Event, ...]]] = {}
        """For each reservation and release on the collective queue: how many had ended, and what else comes before."""
        self._reached = dict.fromkeys(ORDERED_QUEUES, 0)
        """Number of the first collectives that each queue waits for already."""

    def before_next(self, events: Iterable[Event]) -> None:
        """Make the next collective wait for these events."""
        for event in events:
            self._before_next.append(event)
            if self._poison:
                self._device.wait(Queue.COLL, event)

    def take_ready(self) -> Sequence[Event]:
        """Return what the collective that is submitted now waits for."""
        events, self._before_next = self._before_next, []
        return events

    def note_carried_out(self, instr: Instr) -> None:
        """Note a reservation or release on the collective queue."""
        filled = (self._device.record(Queue.COLL),) if self._poison else ()
        self._behind[instr.id] = len(self._ended), (*self._before_next, *filled)

    def note_ended(self, over: Event | None, slots: Iterable[int]) -> None:
        """Note that the other thread is done with a collective that uses these slots."""
        self._ended.append(over)
        self._last_user.update(dict.fromkeys(slots, len(self._ended)))

    def delay_user(self, slots: Iterable[int], queue: Queue) -> None:
        """Make a queue wait for the ended collectives that use any of these slots."""
        self._delay(max([self._last_user.get(slot, 0) for slot in slots], default=0), queue)

    def delay_behind(self, instr: Instr, queue: Queue) -> None:
        """Make a queue wait for a reservation or release on the collective queue."""
        count, events = self._behind[instr.id]
        self._delay(count, queue)
        for event in events:
            self._device.wait(queue, event)

    def delay_all(self) -> None:
        """Make every queue wait for all ended collectives."""
        for queue in ORDERED_QUEUES:
            self._delay(len(self._ended), queue)

    def _delay(self, count: int, queue: Queue) -> None:
        """Make a queue of the accelerator wait for the first ``count`` collectives; other queues use none of them."""
        if queue in self._reached and self._reached[queue] < count:
            self._reached[queue] = count
            self._ordering.after(self._ended[count - 1], (queue,))

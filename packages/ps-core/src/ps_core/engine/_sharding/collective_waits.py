"""Order a plan's collectives with the other queues, where collectives have a stream.

Only the thread of collectives launches on that stream, in its own time. So what the plan has the collective queue wait
for goes with the next collective. And a queue waits for a collective once it uses one of its slots, or memory that was
released behind it. Nothing else waits: no copy for a collective that does not use its memory, and no collective for
work that it does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ps_core._plan import Instr, Queue
from ps_core.engine._devices.device import Device, Event
from ps_core.engine._sharding.collective_streams import ORDERED_QUEUES, CollectiveOrdering


class CollectiveWaits:
    """What the collectives of one segment wait for, and what waits for them."""

    def __init__(self, device: Device, ordering: CollectiveOrdering, *, poison: bool) -> None:
        """``poison``: the host thread fills released slots, also on the stream of collectives."""
        self._device, self._ordering, self._poison = device, ordering, poison
        self._before_next: list[Event] = []
        """What the next collective waits for."""
        self._ended: list[Event | None] = []
        """The ends of the collectives that the other thread is done with, in order, without their memory."""
        self._last_user: dict[int, int] = {}
        """For each slot, how many collectives had ended with the last one that uses it."""
        self._behind: dict[int, tuple[int, tuple[Event, ...]]] = {}
        """For each reservation and release on the collective queue: how many had ended, and what else comes before."""
        self._reached = dict.fromkeys(ORDERED_QUEUES, 0)
        """How many collectives each queue waits for."""

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

"""Write instructions with the waits that they need, and no others."""

from __future__ import annotations

from collections.abc import Iterable

from ps_core._plan import Instr, Op, Queue

_NOTHING = (-1,) * len(Queue)


class Emitter:
    """Collect one segment's instructions.

    Each instruction says which slots it reads and writes. It then waits for the writes that it must see and the readers
    that it must not disturb. A vector clock holds, for each instruction and queue, the last one known to be complete
    before it. The clocks remove waits that others imply.
    """

    def __init__(self) -> None:
        self.instrs: list[Instr] = []
        self._clocks: list[tuple[int, ...]] = []
        self._tail = [-1] * len(Queue)
        self._written: dict[int, int] = {}
        self._read: dict[int, dict[Queue, int]] = {}

    def emit(
        self,
        queue: Queue,
        op: Op,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        also: Iterable[int] = (),
        visit: int = -1,
    ) -> int:
        """Append an instruction that waits for all uses of slots it writes, and for writes of slots it reads."""
        number = len(self.instrs)
        waits = {wait for wait in also if wait >= 0}
        for slot in reads:
            waits.add(self._written.get(slot, -1))
            self._read.setdefault(slot, {})[queue] = number
        for slot in writes:
            waits.add(self._written.get(slot, -1))
            waits.update(self._read.pop(slot, {}).values())
            self._written[slot] = number
        waits.discard(number)
        waits.discard(-1)
        self.instrs.append(Instr(number, queue, op, self._after(queue, waits), visit))
        self._tail[queue] = number
        return number

    def last_access(self, slot: int) -> int:
        """Return the latest instruction that touched the slot."""
        return max(self._written.get(slot, -1), *self._read.get(slot, {}).values(), -1)

    def last_queues(self, slot: int) -> set[Queue]:
        """Return the queues a release of the slot has to wait for."""
        queues = set(self._read.get(slot, {}))
        if slot in self._written:
            queues.add(self.instrs[self._written[slot]].queue)
        return queues

    def _after(self, queue: Queue, waits: set[int]) -> tuple[int, ...]:
        before = self._tail[queue]
        clock = list(self._clocks[before]) if before >= 0 else list(_NOTHING)
        clock[queue] = before
        after = []
        for wait in sorted(waits, reverse=True):
            other = self.instrs[wait].queue
            if clock[other] >= wait:
                continue
            after.append(wait)
            clock = [a if a > b else b for a, b in zip(clock, self._clocks[wait], strict=True)]
            clock[other] = max(clock[other], wait)
        self._clocks.append(tuple(clock))
        return tuple(reversed(after))

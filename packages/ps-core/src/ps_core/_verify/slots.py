"""Track a segment's slots while it is checked: their ranges, contents, and uses.

[Note: races]
Instructions are walked in one allowed order; clocks tell what other orders there are. A read must find the right
content and be ordered after every write so far. A write must be ordered after every read so far. Two writes that no
order settles leave a *torn* slot, which is a fault only if it is read. A write that stores what is already there
changes nothing in any order, so it counts as a read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from ps_core._extents import Extent
from ps_core._plan import Held, Tier
from ps_core._units import ALIGNMENT_BYTES
from ps_core._verify.order import BEGINNING, Clock, Stamp
from ps_core._verify.plan_fault import Fault
from ps_core._verify.ranges import Ranges

Content: TypeAlias = tuple[Extent, int] | None
"""An extent in some version; None: bytes that may not be read."""


def check_range(tiers: tuple[Tier, ...], tier: int, offset: int, size: int) -> None:
    """Raise `Fault` unless a range is aligned, not empty, and inside its tier."""
    if not 0 <= tier < len(tiers):
        raise Fault(f"one of {len(tiers)} tiers", f"tier {tier}")
    if offset < 0 or size <= 0 or offset % ALIGNMENT_BYTES or size % ALIGNMENT_BYTES:
        raise Fault(f"multiples of {ALIGNMENT_BYTES}", f"{size} bytes at {offset}")
    if offset + size > tiers[tier].capacity_bytes:
        end, capacity = offset + size, tiers[tier].capacity_bytes
        raise Fault(f"addresses of {tiers[tier].name} below {capacity}", f"{offset} to {end}")


class Slot:
    """A slot between its reservation and its release."""

    __slots__ = ("bytes", "content", "number", "offset", "readers", "since", "tier", "writers")

    def __init__(self, number: int, held: tuple[int, int, int], content: Content, since: Stamp) -> None:
        self.number = number
        self.tier, self.offset, self.bytes = held
        self.content = content
        self.since = since
        """The instruction that reserved it, or moved it last; all uses must come later."""
        self.writers: list[Stamp] = []
        """The last write; several if the slot is torn."""
        self.readers: dict[int, Stamp] = {}
        """The last read of each queue."""


class Slots:
    """Track all slots of one segment, and the addresses they own."""

    def __init__(self, tiers: tuple[Tier, ...], home: tuple[Held, ...], entry: dict[Extent, int]) -> None:
        self.tiers = tiers
        self.ranges = [Ranges(tier.capacity_bytes) for tier in tiers]
        self.live: dict[int, Slot] = {}
        self._first_number = len(home)
        self._used: set[int] = set()
        for number, held in enumerate(home):
            version = entry.get(held.extent)
            content = None if version is None else (held.extent, version)
            place = (held.tier, held.offset, held.bytes)
            self.live[number] = Slot(number, place, content, BEGINNING)
            self.ranges[held.tier].paint(held.offset, held.offset + held.bytes, number)

    def get(self, number: int, clock: Clock) -> Slot:
        """Return a slot that exists, in every order, when the clock's owner starts."""
        slot = self.live.get(number)
        if slot is None:
            raise Fault(f"slot {number} live", "it is not")
        if not slot.since.before(clock):
            raise Fault(
                f"slot {number} reserved, or in place, in every order",
                f"instruction {slot.since.id} not waited for",
                others=(slot.since.id,),
            )
        return slot

    def reserve(self, number: int, place: tuple[int, int, int], me: Stamp, clock: Clock) -> None:
        """Add a slot with poison in it."""
        if number < self._first_number or number in self._used:
            raise Fault("a slot number of its own", f"slot {number} again")
        tier, offset, size = place
        check_range(self.tiers, tier, offset, size)
        self.ranges[tier].check_free(offset, offset + size, clock)
        self.ranges[tier].paint(offset, offset + size, number)
        self._used.add(number)
        self.live[number] = Slot(number, place, None, me)

    def release(self, number: int, me: Stamp, clock: Clock) -> None:
        """End a slot that nothing uses in any order."""
        slot = self.get(number, clock)
        self._check_idle(slot, clock)
        self.ranges[slot.tier].paint(slot.offset, slot.offset + slot.bytes, me)
        del self.live[number]

    def shift(self, number: int, offset: int, me: Stamp, clock: Clock) -> None:
        """Move a slot within its tier; moving it to where it is counts as a read."""
        slot = self.get(number, clock)
        ranges = self.ranges[slot.tier]
        if offset == slot.offset:
            slot.readers[me.queue] = me
            return
        check_range(self.tiers, slot.tier, offset, slot.bytes)
        self._check_idle(slot, clock)
        ranges.check_free(offset, offset + slot.bytes, clock, but=number)
        ranges.paint(slot.offset, slot.offset + slot.bytes, me)
        ranges.paint(offset, offset + slot.bytes, number)
        slot.offset, slot.since = offset, me

    def read(self, slot: Slot, wanted: Content, me: Stamp, clock: Clock) -> None:
        """Raise `Fault` unless the slot holds ``wanted`` in every order."""
        if slot.content != wanted:
            raise Fault(
                f"{describe(wanted)} in slot {slot.number}",
                describe(slot.content) if len(slot.writers) < 2 else "writes that no order settles",
                others=ids(slot.writers),
            )
        _check_after(slot, slot.writers, clock)
        slot.readers[me.queue] = me

    def write(self, slot: Slot, content: Content, me: Stamp, clock: Clock) -> None:
        """Change what a slot holds. See [Note: races]."""
        racing = [writer for writer in slot.writers if not writer.before(clock)]
        same = content is not None and slot.content == content
        if same and not racing:
            slot.readers[me.queue] = me
            return
        _check_after(slot, slot.readers.values(), clock)
        slot.writers = [*racing, me]
        slot.content = content if same or not racing else None

    def _check_idle(self, slot: Slot, clock: Clock) -> None:
        _check_after(slot, slot.readers.values(), clock)
        _check_after(slot, slot.writers, clock)


def describe(content: Content) -> str:
    """Return what a slot holds, in words."""
    if content is None:
        return "nothing that may be read"
    (kind, index), version = content
    return f"{kind.value} of {index}, version {version}"


def ids(stamps: Iterable[Stamp]) -> tuple[int, ...]:
    """Return the instructions' ids, for messages."""
    return tuple(stamp.id for stamp in stamps)


def _check_after(slot: Slot, stamps: Iterable[Stamp], clock: Clock) -> None:
    for stamp in stamps:
        if clock[stamp.queue] < stamp.place:
            raise Fault(
                f"a wait for instruction {stamp.id}, which uses slot {slot.number}",
                "either may come first",
                others=(stamp.id,),
            )

"""Restore home slots that a plan for tight memory released within a segment.

[Note: leaving a plan that lends home slots]
*Lent* is a home slot that is released while its extent is elsewhere. At the end of the segment every extent is in its
place again. Where the segment is left before, some are not. Other slots may have taken these places by then, so there
may be no memory to move the extents back.

None is needed. A move is a Reserve, a Copy and a Release in this order on one queue. So at any time every extent with a
home slot has a slot with its newest bytes. An accumulator before its first gradient has a slot of its size. That slot
becomes its home slot: no memory is taken, nothing is copied, and nothing can fail. Chunks then leave the compute tier
where lower tiers have room. Between passes home slots move back to the plan's places; see
`_execution.lower_home_slots`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ps_core._extents import Kind
from ps_core._plan import Held
from ps_core.engine._execution.engine_plan import EnginePlan
from ps_core.engine._memory.chunk import Chunk, Slot
from ps_core.engine._parameters.state_transitions import GradientPlace


def restore_lent_homes(
    plan: EnginePlan,
    slots: Mapping[int, Slot],
    places: Mapping[int, tuple[int, int]],
    staged: Collection[Slot] = (),
    *,
    broken: bool = False,
) -> None:
    """Make the slot that holds each extent its home slot, if possible the one at its address.

    ``slots``: the plan's, by number. ``places``: tier and address of those that it reserved. ``staged``: those that
    hold gradients in transfer. ``broken``: the disk failed, so data that was to be read from there may be lost.
    """
    at = {place: slots[number] for number, place in places.items() if number in slots}
    chunks = {id(plan.chunk(held.extent).home) for held in plan.plan.home}
    taken = {id(slot) for slot in staged} | chunks
    loose = [slot for slot in slots.values() if slot.memory.numel() and id(slot) not in taken]
    for held in plan.plan.home:
        chunk = plan.chunk(held.extent)
        if chunk.bytes and not chunk.home.memory.numel():
            slot = _seat(plan, held, chunk, [*loose, *chunk.copies.values()], at.get((held.tier, held.offset)))
            if slot is None:
                assert broken, "a slot is released once the next is there"
                continue
            loose = [other for other in loose if other is not slot]
            if not chunk.has_current_copy:
                chunk.mark_written(slot)
            chunk.rehome(slot)


def _seat(plan: EnginePlan, held: Held, chunk: Chunk, loose: list[Slot], place: Slot | None) -> Slot | None:
    """Return the slot that holds an extent: the one in its place, or else the one on the lowest tier."""
    rows = plan.order[held.extent.index].tensors
    found = [slot for slot in loose if slot.extent == chunk.extent and slot.version == chunk.version]
    if (
        not found
        and chunk.extent.kind is Kind.ACC
        and GradientPlace.IN_ACCUMULATOR not in {row.gradient for row in rows}
    ):
        found = [slot for slot in loose if slot.extent in (None, chunk.extent) and slot.bytes == chunk.bytes]
    return place if place in found else max(found, key=lambda slot: slot.tier, default=None)

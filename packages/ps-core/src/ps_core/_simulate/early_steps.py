"""Which optimizer steps of a plan may begin while backward goes on.

[Note: steps within backward]
A plan has its steps in a segment of their own, behind the decision that needs the norm. Where nothing is decided (no
clipping, no loss scale, one backward pass a step), a group can be stepped as soon as its gradient is complete. A step
of the processor works on home slots in host memory alone. So it may begin behind the last instruction of the last
pass that touches one of them: nothing of that pass reads or writes them any more. Nothing else of the plan changes.
"""

from __future__ import annotations

from ps_core._plan import Instr, Queue, Release, Reserve, Segment, Step, slots_of


def early_steps(homes: int, last_pass: Segment, step: Segment) -> dict[int, tuple[Instr, ...]]:
    """Map instructions of the last pass to the steps that may begin behind them; ``homes``: number of home slots."""
    last = _last_touches(last_pass)
    found: dict[int, tuple[Instr, ...]] = {}
    touched: set[int] = set()
    for instr in step.instrs:
        slots = slots_of(instr.op)
        movable = isinstance(instr.op, Step) and instr.queue is Queue.CPU and not instr.after
        if movable and max(slots) < homes and touched.isdisjoint(slots):
            behind = max((last.get(slot, -1) for slot in slots), default=-1)
            if behind >= 0:
                found[behind] = (*found.get(behind, ()), instr)
                continue
        touched.update(slots)
    return found


def _last_touches(segment: Segment) -> dict[int, int]:
    """Map slots to the last instruction that names them; those that are lent have none."""
    last: dict[int, int] = {}
    lent: set[int] = set()
    for place, instr in enumerate(segment.instrs):
        for slot in slots_of(instr.op):
            last[slot] = place
            if isinstance(instr.op, Reserve | Release):
                lent.add(slot)
    return {slot: place for slot, place in last.items() if slot not in lent}

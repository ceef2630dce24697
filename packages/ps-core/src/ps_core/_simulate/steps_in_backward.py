"""Find the optimizer steps of a plan that may begin while backward goes on.

[Note: steps within backward]
A plan's steps are in a segment of their own, behind the decision about the norm. Sometimes nothing is decided: no
clipping, no loss scale, one backward pass a step. Then a group can be stepped as soon as its gradient is complete. A
step of the processor works on home slots in host memory alone. So it may begin behind the last instruction of the last
pass that touches one of them. Nothing else of the plan changes. A group whose weight is read after its gradient stays
in the step segment: that read would come too late.

[Note: the newest first]
Backward ends with the groups that the next forward pass needs first. If the processor cannot step as fast as gradients
come, it takes the newest whenever it is free. The others stay in the step segment. There they are stepped in the order
of the forward pass, beside it. With all steps in order of arrival, the next forward pass would begin by waiting for the
whole queue.

[Note: steps that can be undone]
Where all gradients decide (clipping, a loss scale), a step may still begin early, as if the decision were known. The
processor first copies what the step overwrites into other host memory. If the decision is another one, it copies that
back, and the group is stepped with the others. As many steps begin early as host memory has room for, and as pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ps_core._errors import InvalidInput
from ps_core._extents import Kind, Precision
from ps_core._plan import Copy, Held, Instr, Queue, Release, Reserve, Run, Segment, Step, slots_of

EarlySteps: TypeAlias = Mapping[int, tuple[Instr, ...]]
"""Steps that begin within a pass, by the place of the instruction that they begin behind."""


def check_steps_in_backward(
    precision: Precision, accumulate: int, processes: int, *, in_backward: bool, undoable: bool
) -> None:
    """Raise `InvalidInput` for a training whose steps cannot begin within backward."""
    if undoable and not in_backward:
        raise InvalidInput("speculative is for steps within backward: give step_in_backward=True too")
    if in_backward and (accumulate > 1 or processes > 1):
        raise InvalidInput(
            "step_in_backward needs one process and one micro-batch a step, because a group is stepped before all "
            f"gradients are known; found {processes} processes and accumulate={accumulate}"
        )
    if in_backward and precision is Precision.FP16 and not undoable:
        raise InvalidInput("step_in_backward with fp16, whose loss scale may skip a step, needs speculative=True")


def early_steps(homes: int, last_pass: Segment, step: Segment) -> EarlySteps:
    """Return the steps that may begin within the last pass; ``homes``: the number of home slots."""
    last, lent = _last_touches(last_pass)
    read_later = _read_after_gradients(last_pass)
    found: dict[int, tuple[Instr, ...]] = {}
    touched: set[int] = set()
    for instr in step.instrs:
        op, slots = instr.op, slots_of(instr.op)
        movable = isinstance(op, Step) and instr.queue is Queue.CPU and not instr.after and op.group not in read_later
        if movable and max(slots) < homes and touched.isdisjoint(slots) and lent.isdisjoint(slots):
            behind = max((last.get(slot, -1) for slot in slots), default=-1)
            if behind >= 0:
                found[behind] = (*found.get(behind, ()), instr)
                continue
        touched.update(slots)
    return found


def newest_first(steps: EarlySteps, ends: Sequence[float], seconds: Sequence[float]) -> EarlySteps:
    """Return the steps that the processor takes; ``ends``: of the pass's instructions, ``seconds``: of all steps."""
    arrivals = sorted((ends[behind], behind, row.id, row) for behind, rows in steps.items() for row in rows)
    taken: dict[int, tuple[Instr, ...]] = {}
    free, place = 0.0, 0
    while place < len(arrivals):
        free = max(free, arrivals[place][0])
        while place + 1 < len(arrivals) and arrivals[place + 1][0] <= free:
            place += 1
        _, behind, _, row = arrivals[place]
        taken[behind] = (*taken.get(behind, ()), row)
        free += seconds[row.id]
        place += 1
    return taken


def overwritten_bytes(home: Sequence[Held], step: Segment) -> dict[int, int]:
    """Return the bytes that each early step would overwrite, by the instruction's number; see [Note: steps that can be
    undone].
    """
    return {
        instr.id: sum(home[slot].bytes for slot in slots_of(instr.op) if home[slot].extent.kind is not Kind.ACC)
        for instr in step.instrs
        if isinstance(instr.op, Step) and max(slots_of(instr.op)) < len(home)
    }


def with_room(steps: EarlySteps, ends: Sequence[float], sizes: Mapping[int, int], room: int) -> EarlySteps:
    """Return the steps for whose old values there is room, the first ones first."""
    found: dict[int, tuple[Instr, ...]] = {}
    for behind in sorted(steps, key=lambda place: (ends[place], place)):
        for row in steps[behind]:
            if sizes[row.id] <= room:
                room -= sizes[row.id]
                found[behind] = (*found.get(behind, ()), row)
    return found


def _last_touches(segment: Segment) -> tuple[dict[int, int], set[int]]:
    """Map slots to the last instruction that names them; return those that are lent, too."""
    last: dict[int, int] = {}
    lent: set[int] = set()
    for place, instr in enumerate(segment.instrs):
        for slot in slots_of(instr.op):
            last[slot] = place
            if isinstance(instr.op, Reserve | Release):
                lent.add(slot)
    return last, lent


def _read_after_gradients(segment: Segment) -> set[int]:
    """Return the groups whose weight a moment reads after their last gradient was made."""
    weights, gradients = dict[int, int](), dict[int, int]()
    for instr in segment.instrs:
        if isinstance(instr.op, Copy) and instr.op.extent.kind is not Kind.ACT:
            if instr.queue is Queue.H2D:
                weights[instr.op.target] = instr.op.extent.index
            elif instr.queue is Queue.D2H:
                gradients[instr.op.source] = instr.op.extent.index
    read, made = dict[int, int](), dict[int, int]()
    for place, instr in enumerate(segment.instrs):
        if isinstance(instr.op, Run):
            read.update({weights[slot]: place for slot in instr.op.slots if slot in weights})
            made.update({gradients[slot]: place for slot in instr.op.slots if slot in gradients})
    return {group for group, place in read.items() if place > made.get(group, -1)}

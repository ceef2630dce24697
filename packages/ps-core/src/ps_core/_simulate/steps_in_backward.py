"""Find the optimizer steps of a plan that may begin while backward goes on.

[Note: steps within backward]
A plan's steps are in a segment of their own, behind the decision about the norm. Sometimes nothing is decided: no
clipping, no loss scale, one backward pass a step. Then a group can be stepped as soon as its gradient is complete. A
step of the processor works on home slots in host memory alone. So it may begin behind the last instruction of the last
pass that touches one of them. Nothing else of the plan changes. A group whose weight is read after its gradient stays
in the step segment: that read would come too late.

[Note: the newest first]
Backward ends with the groups that the next forward pass needs first. If the processor cannot step as fast as gradients
come, it takes the newest whenever it is free. If none has come since, it may go back to the newest of those that wait.
The others stay in the step segment. There they are stepped in the order of the forward pass, beside it. With all steps
in order of arrival, the next forward pass would begin by waiting for the whole queue.

[Note: steps that can be undone]
Where all gradients decide (clipping, a loss scale), a step may still begin early, as if the decision were known. The
processor first copies what the step overwrites into other host memory. If the decision is another one, it copies that
back, and the group is stepped with the others. As many steps begin early as host memory has room for, and as pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

from ps_core._errors import InvalidInput
from ps_core._extents import Kind, Precision
from ps_core._plan import Copy, Held, Instr, Queue, Release, Reserve, Run, Segment, Step, slots_of

SHARES = (0.0, 1.0, inf)
"""Values to try for ``share`` of `newest_first`: which is best depends on the sizes of groups."""
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


def newest_first(
    steps: EarlySteps, last_pass: Segment, ends: Sequence[float], seconds: Sequence[float], share: float
) -> EarlySteps:
    """Return the steps that the processor takes; ``ends``: of the pass's instructions, ``seconds``: of all steps.

    If no newer gradient has come, it takes the newest step of which this share is over when the next one comes.
    That step begins behind the instruction of the newest gradient so far, which is on the same queue.
    """
    arrivals = sorted((ends[behind], behind, row.id, row) for behind, rows in steps.items() for row in rows)
    queues = [instr.queue for instr in last_pass.instrs]
    over = max(ends, default=0.0)
    taken: dict[int, tuple[Instr, ...]] = {}
    waiting: list[tuple[int, Instr]] = []
    free, newest, place = 0.0, -1, 0
    while waiting or place < len(arrivals):
        if not waiting:
            free = max(free, arrivals[place][0])
        known = place
        while place < len(arrivals) and arrivals[place][0] <= free:
            _, newest, _, row = arrivals[place]
            waiting.append((newest, row))
            place += 1
        until = over if place == len(arrivals) else arrivals[place][0]
        for back, (behind, row) in enumerate(reversed(waiting), start=1):
            took = seconds[row.id]
            if place > known or (share * took <= until - free and queues[behind] is queues[newest]):
                taken[newest] = (*taken.get(newest, ()), row)
                free += took
                del waiting[-back]
                break
        else:
            if place == len(arrivals):
                break
            free = until
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

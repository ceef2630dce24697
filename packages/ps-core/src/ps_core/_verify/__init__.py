"""Check plans independently of the planner.

`verify` shares the vocabulary (`_extents`, `_program`, `_plan`) with the planner and nothing else. It walks through
each segment once, in one allowed order, and the result holds for all. See [Note: happens-before] in `order` and
[Note: races] in `slots`. What is checked is in [Note: what a plan means] in `_plan`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ps_core._errors import InvalidInput
from ps_core._extents import Extent
from ps_core._plan import Plan, Segment, check_tiers
from ps_core._program import Program
from ps_core._verify.order import START, arrange
from ps_core._verify.plan_fault import Fault
from ps_core._verify.ranges import Ranges
from ps_core._verify.slot_contents import Contents, sizes
from ps_core._verify.slots import check_range


def verify(program: Program, plan: Plan) -> None:
    """Raise `PlanMismatch` at the first rule that the plan breaks in any order its queues and waits allow."""
    for fault in _faults(program, plan):
        raise fault


def faults(program: Program, plan: Plan, limit: int = 20) -> tuple[Fault, ...]:
    """Return the first broken rule of the plan's frame; if there is none, that of each segment."""
    return tuple(fault for fault, _ in zip(_faults(program, plan), range(limit), strict=False))


def _faults(program: Program, plan: Plan) -> Iterator[Fault]:
    known = sizes(program)
    try:
        _check_frame(program, plan, known)
    except Fault as fault:
        yield fault
        return
    except (TypeError, AttributeError, ValueError, LookupError) as error:
        yield Fault("a frame of the right types", f"{type(error).__name__}: {error}")
        return
    for segment in plan.segments:
        try:
            _check_segment(program, plan, segment, known)
        except Fault as fault:
            yield fault.at(segment.name.value)
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            yield Fault("instructions of the right types", f"{type(error).__name__}: {error}").at(str(segment.name))


def _check_frame(program: Program, plan: Plan, known: dict[Extent, int]) -> None:
    """Check tiers, home slots, and the list of segments."""
    try:
        check_tiers(plan.tiers)
    except InvalidInput as error:
        raise Fault("a stack of tiers", str(error)) from None
    names = tuple(segment.name for segment in plan.segments)
    if names != program.segments:
        raise Fault(f"segments {', '.join(program.segments)}", ", ".join(names))
    groups = range(len(program.layout.groups))
    if plan.step_tiers and len(plan.step_tiers) != len(groups):
        raise Fault(f"{len(groups)} step tiers", f"{len(plan.step_tiers)}")
    missing = {Extent(kind, group): None for group in groups for kind in program.home_kinds(group)}
    wanted = frozenset(missing)
    ranges = [Ranges(tier.capacity_bytes) for tier in plan.tiers]
    for number, held in enumerate(plan.home):
        if held.extent not in wanted:
            raise Fault("extents that have a home", f"{held.extent.kind.value} of {held.extent.index}")
        check_range(plan.tiers, held.tier, held.offset, held.bytes)
        if held.bytes < known[held.extent]:
            raise Fault(f"{known[held.extent]} bytes for home slot {number}", f"{held.bytes}")
        ranges[held.tier].check_free(held.offset, held.offset + held.bytes, START)
        ranges[held.tier].paint(held.offset, held.offset + held.bytes, number)
        missing.pop(held.extent, None)
    for kind, group in missing:
        raise Fault(f"a home for {kind.value} of {group}", "none")


def _check_segment(program: Program, plan: Plan, segment: Segment, known: dict[Extent, int]) -> None:
    contents = Contents(program, plan, segment, known)
    for instr, stamp, clock in arrange(segment.instrs):
        try:
            contents.apply(instr, stamp, clock)
        except Fault as fault:
            raise fault.at(segment.name.value, instr.id, type(instr.op).__name__) from None
    contents.finish()

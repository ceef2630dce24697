"""Ever larger planning problems, to see how planning cost grows with what there is to plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from ps_core._extents import Extent
from ps_core._layout import lay_out
from ps_core._plan import Copy, Gather, Plan, ReduceScatter, Tier
from ps_core._planner.make_plan import make_plan
from ps_core._planner.placement import filled
from ps_core._planner.tier_division import make_frame
from ps_core._program import WIRE_BYTES, Program
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

SIZES = ("gpt-1b", "gpt-4b", "gpt-10b", "gpt-30b", "gpt-68b", "gpt-175b", "gpt-1t")
"""At a group a layer, from 22 groups to 129."""
CUTS = (("gpt-1b", 3.0), ("gpt-175b", 0.34), ("gpt-1t", 0.5), ("gpt-1t", 0.2))
"""Other sizes of group, in layers: from 8 groups to 769."""
CASES = (*((name, 1.0) for name in SIZES), *CUTS)
WIDEST = 20
"""Work in the largest case is at least so many times that in the smallest."""
STEEPEST = 1.3
"""The largest exponent allowed."""


@dataclass(frozen=True)
class Problem:
    """A program to be planned on tiers, everything at home on the lower one."""

    program: Program
    tiers: tuple[Tier, ...]

    def plan(self) -> Plan:
        """Plan it from the beginning: nothing that was derived from the program before is used."""
        program = replace(self.program)
        return make_plan(make_frame(program, self.tiers, filled(program, self.tiers, resident=0)))


def streaming(name: str, layers: float, *, ranks: int = 1) -> Problem:
    """A model with groups of so many layers, all of it at home on the host, half of its weights fitting on the device.

    The chunked loss keeps non-model data at much the same part of memory for every size.
    """
    found = shape(name)
    trace = analytic_trace(found, Workload(batch=1, seq=1024, chunked_loss=True))
    numel = int(1.02 * layers * 12 * found.hidden**2)
    program = Program(trace=trace, layout=lay_out(trace, group_numel=numel, ranks=ranks))
    sizes = [program.bytes_of(Extent(program.weight, group.index)) for group in program.layout.groups]
    peak = max(visit.nonmodel_bytes for visit in program.visits)
    gathered = 12 * ranks * max(sizes) + WIRE_BYTES if ranks > 1 else 0
    device = peak + max(sum(sizes) // 2, 4 * max(sizes)) + gathered
    return Problem(program, (Tier("device", device), Tier("host", 10 * sum(sizes) + 2**30)))


def work(program: Program, plan: Plan) -> int:
    """Accesses and transfers: what a plan is for, and what it costs to carry out."""
    accesses = sum(
        len(program.uses(segment.name, visit))
        for segment in plan.segments
        for visit in program.segment_visits(segment.name)
    )
    transfers = (isinstance(instr.op, Copy | Gather | ReduceScatter) for row in plan.segments for instr in row.instrs)
    return accesses + sum(transfers)


def exponent(points: Iterable[tuple[float, float]]) -> float:
    """The slope of log y over log x by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    middle, height = fmean(x for x, _ in logs), fmean(y for _, y in logs)
    return sum((x - middle) * (y - height) for x, y in logs) / sum((x - middle) ** 2 for x, _ in logs)

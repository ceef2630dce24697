"""Where a disk is next to the tier that computes: weights stay above it first, and little more moves than must."""

from __future__ import annotations

import pytest

from ps_core._extents import Extent, Kind, Precision
from ps_core._layout import lay_out
from ps_core._plan import Tier
from ps_core._planner.bounds import home_bytes
from ps_core._planner.placement import above_disk, halves
from ps_core._planner.search import Setup, find_plan
from ps_core._program import Program
from ps_core._simulate.machine import machine
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

TRACE = analytic_trace(shape("gpt-50m"), Workload(batch=1, seq=256))
NUMEL = 500_000
DISK = Tier("disk", 2**40)


def program(precision: Precision, accumulate: int = 1) -> Program:
    layout = lay_out(TRACE, group_numel=NUMEL, ranks=1)
    return Program(trace=TRACE, layout=layout, precision=precision, accumulate=accumulate)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
def test_halves_are_all_there_is_weights_first(precision: Precision) -> None:
    made = program(precision)
    rows, groups = halves(made), len(made.layout.groups)
    assert [row[:2] for row in rows] == [(group, weight) for weight in (True, False) for group in range(groups)]
    assert sum(row[2] for row in rows) == home_bytes(made)
    weights = sum(made.bytes_of(Extent(made.weight, group)) for group in range(groups))
    assert sum(row[2] for row in rows[:groups]) == weights
    placed = above_disk(made, groups + 2)
    assert {placed.home_tier(made.weight, group) for group in range(groups)} == {0}
    assert [placed.home_tier(Kind.M, group) for group in range(4)] == [0, 0, 1, 1]
    assert {placed.home_tier(Kind.P32, group) for group in range(2, groups)} == {int(precision is Precision.BF16)}


@pytest.mark.parametrize("part", [0.2, 0.4, 0.7])
def test_little_more_moves_than_must(part: float) -> None:
    """Every byte of model data changes once a step; what is not above the disk at the peak of non-model bytes is
    written there and read again.
    """
    made = program(Precision.BF16)
    peak = max(visit.nonmodel_bytes for visit in made.visits)
    data = home_bytes(made)
    room = int(part * data)
    planned = find_plan(TRACE, (Tier("host", peak + room), DISK), machine("a100-40"), setup=Setup(), layout=made.layout)
    moved = planned.prediction.moved_bytes
    least = 2 * (data - room)
    assert least * 0.98 <= moved["disk->host"] + moved["host->disk"]  # a table of places is not wanted after the peak
    most = 2 * 12 * max(group.shard_numel for group in made.layout.groups)
    assert moved["disk->host"] + moved["host->disk"] <= least + 2 * most

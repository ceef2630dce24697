"""What planning costs, piece by piece, and how it grows with what there is to plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from _growth import CASES, STEEPEST, WIDEST, exponent, streaming, work
from ps_core._plan import Tier
from ps_core._planner.search import Planned, Setup, find_plan
from ps_core._simulate.clock import simulate
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import machine
from ps_core._trace import Trace
from ps_core._units import parse_bytes
from ps_core._verify import verify
from ps_core._workloads.named_shapes import shape
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload

A100 = machine("a100-40")
SEARCHES = (
    ("gpt2-xl", 1, 1, "8GiB", "64GiB"),
    ("gpt-18b", 1, 1, "40GiB", "1000GiB"),
    ("gpt-175b", 32, 4, "40GiB", "1000GiB"),
)


def named(case: Any) -> str:
    return f"{case[0]} on {case[1]}"


@pytest.fixture(scope="module", params=SEARCHES, ids=named)
def problem(request: pytest.FixtureRequest) -> tuple[Trace, tuple[Tier, ...], Setup]:
    """A model, the tiers of one process, and how it is trained there."""
    name, gpus, nodes, device, host = request.param
    cluster = Cluster(gpus=gpus, nodes=nodes, device_memory=parse_bytes(device), host_memory=parse_bytes(host))
    setup = Setup(ranks=gpus, ranks_per_node=cluster.ranks_per_node, nonmodel_overhead=cluster.nonmodel_overhead)
    return analytic_trace(shape(name), Workload(batch=4, seq=1024)), cluster.tiers(), setup


@pytest.fixture(scope="module")
def planned(problem: tuple[Trace, tuple[Tier, ...], Setup]) -> Planned:
    trace, tiers, setup = problem
    return find_plan(trace, tiers, A100, setup=setup)


@pytest.mark.benchmark(group="find_plan", min_rounds=3)
def test_find_plan(benchmark: Any, problem: tuple[Trace, tuple[Tier, ...], Setup]) -> None:
    trace, tiers, setup = problem
    benchmark(find_plan, trace, tiers, A100, setup=setup)


@pytest.mark.benchmark(group="verify what find_plan found")
def test_verify(benchmark: Any, planned: Planned) -> None:
    benchmark.extra_info["instructions"] = sum(len(segment.instrs) for segment in planned.plan.segments)
    benchmark(verify, planned.program, planned.plan)


@pytest.mark.benchmark(group="simulate what find_plan found")
def test_simulate(benchmark: Any, problem: tuple[Trace, tuple[Tier, ...], Setup], planned: Planned) -> None:
    benchmark(simulate, planned.program, planned.plan, A100, ranks_per_node=problem[2].ranks_per_node)


@pytest.mark.parametrize(
    "case", [("gpt-1b", 1.0), ("gpt-175b", 1.0), ("gpt-1t", 0.2)], ids=lambda case: f"{case[0]}/{case[1]}"
)
@pytest.mark.benchmark(group="one plan")
def test_plan(benchmark: Any, case: tuple[str, float]) -> None:
    problem = streaming(*case)
    benchmark.extra_info["accesses + transfers"] = work(problem.program, benchmark(problem.plan))


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Processor time of a call, the median of some rounds."""
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return median(found)


@pytest.mark.benchmark(group="growth from 1B to 1T")
def test_growth(benchmark: Any) -> None:
    """Processor time over accesses + transfers; `tests/pure/test_planning_growth.py` counts instead of timing."""
    problems = [streaming(*case) for case in CASES]
    efforts = [work(problem.program, problem.plan()) for problem in problems]
    assert max(efforts) >= WIDEST * min(efforts)
    costs = [seconds(problem.plan, 1 if benchmark.disabled else 5) for problem in problems]
    steepness = exponent(zip(efforts, costs, strict=True))
    benchmark.extra_info["exponent"] = round(steepness, 3)
    benchmark.extra_info["microseconds each"] = [
        round(1e6 * cost / effort, 1) for cost, effort in zip(costs, efforts, strict=True)
    ]
    assert benchmark.disabled or steepness <= STEEPEST
    benchmark.pedantic(problems[-1].plan)

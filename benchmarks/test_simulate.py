"""Simulating and drawing a plan of 175B for 32 processes, some thousands of instructions a step."""

from __future__ import annotations

from typing import Any

import pytest

from ps_core._command.forecast import Forecast, Training, forecast
from ps_core._simulate.clock import simulate
from ps_core._simulate.cluster import Cluster
from ps_core._simulate.machine import MACHINES
from ps_core._workloads.named_shapes import shape
from ps_core.report import tide, tide_svg

GIB = 2**30


@pytest.fixture(scope="module")
def found() -> Forecast:
    cluster = Cluster(gpus=32, nodes=4, device_memory=40 * GIB, host_memory=1000 * GIB)
    return forecast(shape("gpt-175b"), Training(cluster=cluster, machine=MACHINES["a100-40"], quick=True))


def test_simulate(benchmark: Any, found: Forecast) -> None:
    told = benchmark(simulate, found.planned.program, found.planned.plan, MACHINES["a100-40"], ranks_per_node=8)
    names = found.planned.program.iteration()
    benchmark.extra_info["instructions"] = sum(len(found.planned.plan.segment(name).instrs) for name in names)
    assert told == found.planned.prediction


def test_draw(benchmark: Any, found: Forecast) -> None:
    assert benchmark(lambda: tide_svg(tide(found.planned.program, found.planned.plan))).startswith("<svg")

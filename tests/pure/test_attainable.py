"""Compare predicted steps with the least time for the same work in any order; docs/verification.md derives it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import Machine, machine
from ps_core._command.forecast import Forecast, Training, forecast
from ps_core._simulate.cluster import Cluster
from ps_core._trace import Phase
from ps_core._workloads.named_shapes import shape

GIB = 1 << 30
SIZES = {"gpt-24x2048": 12, "gpt-32x2560": 16, "gpt-32x4096": 24}
"""GiB of an H200, batch 8 x 1,024, 16 bits."""
LIVES_THERE, STEPPED_BY_CPU, STATES = 14, 28, 12
"""Bytes for each parameter: on the device with its states; that a step on the CPU reads and writes; of states."""
PARTS = 40
ROOMY = Cluster(device_memory=40 * GIB, host_memory=100 * GIB)


def training(name: str, *, within: bool, dram: float | None, cores: float | None = None) -> Training:
    rates = machine("h200")
    if dram is not None:
        rates = replace(rates, host_dram_bandwidth=dram, host_bandwidth=cores or rates.host_bandwidth)
    cluster = Cluster(device_memory=SIZES[name] * GIB, host_memory=rates.host_memory_bytes)
    return Training(machine=rates, cluster=cluster, batch=8, seq=1024, step_in_backward=within)


def attainable_s(told: Forecast) -> float:
    """The least seconds of a step, by the best division of parameters among device, CPU, and states that travel."""
    rates = told.training.machine
    room = (told.tiers[0].capacity_bytes - told.trace.peak_nonmodel_bytes) / told.parameters
    most = min(1.0, room / LIVES_THERE)
    shares = [
        (most * i / PARTS, (1 - most * i / PARTS) * j / PARTS) for i in range(PARTS + 1) for j in range(PARTS + 1)
    ]
    return min(least_s(told, rates, on_device, travels, room) for on_device, travels in shares)


def least_s(told: Forecast, rates: Machine, on_device: float, travels: float, room: float) -> float:
    """Return the least seconds of a step for these shares of the parameters; ``room``: device bytes a parameter."""
    numel, stepped = told.parameters, 1 - on_device - travels
    kept = min(stepped + travels, (room - LIVES_THERE * on_device) / 2)
    step, states = STEPPED_BY_CPU * stepped * numel, STATES * travels * numel
    down = 2 * stepped * numel + states
    up = down + 2 * max(0.0, stepped + travels - kept) * numel
    own_s = STEPPED_BY_CPU * (1 - stepped) * numel / rates.device_bandwidth
    phases_s = dict.fromkeys(Phase, 0.0)
    for moment in told.trace.moments:
        phases_s[moment.phase] += rates.computing_s(moment, fp32=False) + rates.moment_overhead_s
    links_s = max(up / rates.h2d_bandwidth, down / rates.d2h_bandwidth)
    memory_s = (step + up + down) / rates.host_memory_bandwidth
    step_s, compute_s = step / rates.host_bandwidth, sum(phases_s.values()) + own_s
    if told.training.step_in_backward:
        return max(compute_s, links_s, memory_s, step_s)
    late_s = max(step_s, down / rates.h2d_bandwidth, (step + down + states) / rates.host_memory_bandwidth)
    return max(compute_s, compute_s - phases_s[Phase.FORWARD] - own_s + late_s, links_s, memory_s)


def predicted(name: str, *, within: bool, dram: float | None, cores: float | None = None) -> Forecast:
    return forecast(shape(name), training(name, within=within, dram=dram, cores=cores))


@pytest.mark.parametrize("dram", [None, 300e9], ids=["one rate", "memory of 300 GB/s"])
@pytest.mark.parametrize("name", SIZES)
def test_steps_behind_backward_take_little_more_than_the_least(name: str, dram: float | None) -> None:
    told = predicted(name, within=False, dram=dram)
    assert 0.85 < attainable_s(told) / told.step_time_s < 1


@pytest.mark.parametrize(
    ("name", "dram", "share"),
    [
        ("gpt-24x2048", None, 0.97),
        ("gpt-24x2048", 300e9, 0.97),
        ("gpt-32x2560", None, 0.96),
        ("gpt-32x2560", 300e9, 0.97),
        ("gpt-32x4096", None, 0.86),
        ("gpt-32x4096", 300e9, 0.975),
    ],
)
def test_steps_within_backward_take_little_more_than_that(name: str, dram: float | None, share: float) -> None:
    told = predicted(name, within=True, dram=dram)
    assert share < attainable_s(told) / told.step_time_s < 1


@pytest.mark.parametrize(
    ("name", "cores", "dram", "share"),
    [
        ("gpt-32x4096", 60e9, 200e9, 0.765),
        ("gpt-32x4096", 100e9, 300e9, 0.79),
        ("gpt-32x4096", 110e9, 110e9, 0.86),
        ("gpt-32x4096", 150e9, 300e9, 0.96),
        ("gpt-24x2048", 60e9, 200e9, 0.91),
    ],
)
def test_where_cores_are_slow_states_go_up_within_backward(name: str, cores: float, dram: float, share: float) -> None:
    told = predicted(name, within=True, dram=dram, cores=cores)
    assert told.planned.plan.stepped_in_backward
    assert share < attainable_s(told) / told.step_time_s < 1


@pytest.mark.parametrize("name", SIZES)
def test_steps_within_backward_hide_where_memory_serves_cores_and_links(name: str) -> None:
    told = predicted(name, within=True, dram=300e9)
    assert max(told.prediction.busy_s.values()) / told.step_time_s > 0.95


def test_where_all_fits_a_step_takes_its_computing_alone() -> None:
    told = forecast(shape("gpt-24x2048"), replace(training("gpt-24x2048", within=False, dram=None), cluster=ROOMY))
    assert told.prediction.stalled_s == 0
    assert attainable_s(told) / told.step_time_s > 0.98

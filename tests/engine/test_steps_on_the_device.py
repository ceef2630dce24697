"""Groups stepped on the device within backward, their states fetched meanwhile: the same bits, as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from _cases import next_token, tokens
from _early_steps import DEVICES, SIZES, check_bits, keep_plans, managed, stream_states
from _fake_cuda import FakeRuntime
from _runs import let_go
from ps_core._plan import Held
from ps_core._simulate.engine_timing import Issuing, Priced
from ps_core._simulate.steps_in_backward import EarlySteps, early_steps
from ps_core.engine._execution.find_hooks import hooks_of
from ps_core.engine._memory.transfers import Transfers
from test_host_worker import late_device
from test_virtual_clock import MACHINE, check_times, train


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "size"), [("bf16", "110KiB"), ("bf16", "96KiB"), ("fp32", "200KiB")])
def test_the_same_bits_where_states_go_up_within_backward(
    precision: str, size: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = stream_states(monkeypatch)
    check_bits(device, precision, size)
    assert planned[-1].plan.stepped_in_backward


@pytest.mark.parametrize(("precision", "budget_kib"), [("bf16", 112), ("bf16", 128), ("fp32", 128), ("fp32", 192)])
def test_a_step_takes_what_was_predicted(
    precision: str, budget_kib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = keep_plans(monkeypatch)
    slow = replace(MACHINE, host_bandwidth=MACHINE.host_bandwidth / 8, host_dram_bandwidth=MACHINE.host_bandwidth)
    got = train(tmp_path, f"{budget_kib}KiB", precision=precision, clip=None, step="in_backward", machine=slow)
    assert planned[-1].plan.stepped_in_backward
    check_times(got)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_step_waits_for_the_worker_only_if_that_measures_gradients(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some groups are left to the step; fp32 gradients are measured on the host."""

    def first(self: Issuing, home: tuple[Held, ...], step: Sequence[Priced]) -> EarlySteps:
        every = early_steps(len(home), step[-2].segment, step[-1].segment)
        return {min(every): every[min(every)]}

    waits = []
    wait = Transfers.wait_for_streams

    def noted(self: Transfers) -> None:
        waits.append("for streams alone")
        wait(self)

    monkeypatch.setattr(Issuing, "early_steps", first)
    runtime = FakeRuntime(1)
    with runtime:
        model, optimizer = managed(late_device(runtime, 2), precision, SIZES[precision][0])
        for index in range(4):
            next_token(model, *tokens(index)).backward()
            if index == 3:
                assert hooks_of(model).engine.stepping.groups
                monkeypatch.setattr(Transfers, "wait_for_streams", noted)
            optimizer.step()
            optimizer.zero_grad()
        let_go(model)
    assert bool(waits) is (precision == "bf16")

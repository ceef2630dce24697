"""A planned pass drains no queue: sums are a worker's, behind their own copies, and norms are one call a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import _models as models
import ps_kernels
from _cases import rows, square
from _fake_cuda import FakeRuntime
from _runs import HOST
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.host_worker import HostWorker
from ps_core.engine._memory.transfers import Transfers

DRAINS = ("wait_for_other_queues", "join_queues", "wait_for_streams")


class Counted:
    """Counts waits for whole queues, what the worker is given, and calls that measure gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        launch = HostWorker.launch

        def launched(worker: HostWorker, what: str, *arguments: Any) -> Any:
            self.counts[what.partition(" of ")[0]] += 1
            return launch(worker, what, *arguments)

        monkeypatch.setattr(HostWorker, "launch", launched)
        for owner, name in [*((Transfers, name) for name in DRAINS), (FakeRuntime, "synchronize")]:
            monkeypatch.setattr(owner, name, self._counting("drains", getattr(owner, name)))
        monkeypatch.setattr(ps_kernels, "sumsq_finite", self._counting("measures", ps_kernels.sumsq_finite))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.counts[name] += 1
            return function(*arguments, **named)

        return call


@pytest.mark.parametrize(("precision", "passes"), [("fp32", 1), ("bf16", 2), ("fp32", 2)])
def test_sums_and_norms_of_a_planned_step(precision: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with FakeRuntime(1) as runtime:
        model, optimizer = chunked(
            models.stack(6),
            AdamW(lr=1e-2),
            device=CudaDevice(runtime),
            precision=precision,
            max_grad_norm=1.0,
            accumulation_steps=passes,
            budget=Budget(device="160KiB" if precision == "bf16" else "320KiB", host=HOST),
            options=Options(group_bytes=8192),
        )

        def step(index: int) -> None:
            for _ in range(passes):
                square(model, *rows(index)).backward()

        for index in range(3):
            step(index)
            optimizer.step()
            optimizer.zero_grad()
        before, counted = statistics(model), Counted(monkeypatch)
        step(3)
        counts = Counter(counted.counts)
        optimizer.step()
        after = statistics(model)
        release(model)
    assert after.planned_passes == before.planned_passes + passes
    assert after.moved_bytes["device->host"] > before.moved_bytes["device->host"], "gradients go down"
    below = counts["sum"] / passes
    assert 0 < below <= after.groups, "one sum a group and pass, however many tensors it has"
    assert counts["drains"] == 0
    assert counts["norms"] == below, "by one call"
    assert counted.counts["measures"] == after.groups < len(list(model.parameters()))

"""Ranks that follow a plan on CUDA devices which the CPU plays: all is ordered, and a wait that is left out is found.

Collectives are launched on each rank's stream of collectives, as NCCL's are, by the thread of collectives.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _checked_cuda import COMM_THREAD, CheckedCuda
from _fake_cuda import FakeRuntime
from _played_cards import launch_on_stream
from _threads import Together, run
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._sharding.collective_streams import CollectiveWaits

WIDTH, LAYERS, STEPS = 40, 6, 4


def train(
    each: Together, precision: str, micro_batches: int, device_kib: int, poison: bool, checked: bool
) -> tuple[list[Tensor], set[str]]:
    """Return the weights, and which kinds of work may meet."""
    runtime = FakeRuntime(each.rank + 1)
    device: Any = "emulated"
    if checked:
        launch_on_stream(each)
        each._thread.submit(lambda: setattr(threading.current_thread(), "name", COMM_THREAD)).result()
        device = CheckedCuda(runtime)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    seeded = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=seeded)
    with runtime:
        managed, optimizer = chunked(
            model, AdamW(lr=1e-2), device=device, precision=precision, accumulation_steps=micro_batches,
            budget=Budget(device=device_kib * 2**10, host=2**24), collectives=each,
            options=Options(group_bytes=WIDTH * (WIDTH + 2) * (4 if precision == "fp32" else 2), poison=poison),
        )  # fmt: skip
        assert optimizer is not None
        for step in range(STEPS):
            for micro in range(micro_batches):
                inputs = torch.Generator().manual_seed(100 * step + 10 * micro + each.rank)
                managed(torch.randn(3, WIDTH, generator=inputs)).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        told = statistics(managed)
        assert told.divergences == 0, told.last_divergence
        assert told.planned_passes >= (STEPS - 1) * micro_batches
        release(managed)
    return [parameter.detach().clone() for parameter in model.parameters()], device.unordered if checked else set()


WAYS = [("bf16", 1, 44), ("bf16", 1, 200), ("bf16", 2, 60), ("fp32", 1, 60), ("fp32", 2, 100)]


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize(("precision", "micro_batches", "device_kib"), WAYS)
def test_planned_collectives_are_ordered(precision: str, micro_batches: int, device_kib: int, poison: bool) -> None:
    found, _ = run(2, train, precision, micro_batches, device_kib, poison, True)
    wanted, _ = run(2, train, precision, micro_batches, device_kib, poison, False)
    for (weights, unordered), (others, _) in zip(found, wanted, strict=True):
        assert not unordered
        assert all(map(torch.equal, weights, others))


@pytest.mark.parametrize(
    ("left_out", "wanted"),
    [("before_next", "COLL reads what H2D writes"), ("delay_user", "COMPUTE reads what COLL writes")],
)
def test_a_wait_that_is_left_out_is_found(left_out: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CollectiveWaits, left_out, lambda *_: None)
    for _, unordered in run(2, train, "bf16", 1, 44, False, True)[0]:
        assert wanted in unordered


class Loss(nn.Sequential):
    """Layers that return their loss: fake tensors foresee the first pass."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().sum()


def train_where_all_fits(each: Together, foreseen: bool) -> list[int]:
    """Return the bytes that are pinned after each step."""
    launch_on_stream(each)
    model = (Loss if foreseen else nn.Sequential)(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    pinned = []
    with FakeRuntime(each.rank + 1) as runtime:
        managed, optimizer = chunked(
            model, AdamW(), device=CudaDevice(runtime), budget=Budget(device=2**24, host=2**24), collectives=each
        )
        assert optimizer is not None
        for _ in range(STEPS):
            managed(torch.ones(3, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            pinned.append(sum(runtime.pinned.values()))
        assert statistics(managed).planned_passes == STEPS - (not foreseen)
        release(managed)
    return pinned


@pytest.mark.parametrize("foreseen", [False, True])
def test_host_memory_that_home_slots_left_is_given_back_once_a_pass_was_planned(foreseen: bool) -> None:
    for pinned in run(2, train_where_all_fits, foreseen)[0]:
        assert not any(pinned[1:]), pinned

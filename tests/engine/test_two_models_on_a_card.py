"""Two models on one CUDA card: neither takes the other's memory for its own activations."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.cuda.memory import AllocatorBytesTracker, EngineAllocations


def made(runtime: FakeRuntime | None, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    return chunked(
        models.Language(tied=True),
        AdamW(lr=0.01),
        device="cpu" if runtime is None else CudaDevice(runtime),
        precision="bf16",
        budget=Budget(host=HOST) if runtime is None else Budget(device="128KiB", host=HOST),
        options=Options(group_bytes=4096),
    )


def step(model: Any, optimizer: Any, index: int, times: int = 1) -> torch.Tensor:
    loss = next_token(model, *(each.repeat(times, 1) for each in tokens(index)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(runtime: FakeRuntime | None) -> list[torch.Tensor]:
    """Train a model, then another beside it, in turns; then with larger batches, for which both are planned anew."""
    logs = []
    first = made(runtime, 0)
    logs += [step(*first, index) for index in range(3)]
    second = made(runtime, 1)
    for index in range(4):
        logs += [step(*second, index), step(*first, 3 + index)]
    for index in range(4):
        logs += [step(*second, index, times=2), step(*first, index, times=2)]
    if runtime is not None:
        for (model, _), planned in ((first, 9), (second, 6)):
            found = statistics(model)
            assert (found.planned_passes, found.replans) == (planned, 1)
    for model, _ in (first, second):
        let_go(model)
    return logs


def test_the_memory_of_one_is_no_activation_of_the_other() -> None:
    right = trained(None)
    runtime = FakeRuntime(1)
    with runtime:
        got = trained(runtime)
    assert all(map(torch.equal, right, got))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x)


@pytest.mark.parametrize("sizes", [(100, 1000), (1000, 4000), (1000, 300)])
def test_an_arena_that_ends_within_a_pass_of_the_other_model(sizes: tuple[int, int]) -> None:
    """A second model leaves its plan while the first one's pass is open: its arena was no activation of that."""
    runtime = FakeRuntime(1, device_thread=False)
    with runtime:
        torch.manual_seed(0)
        budgets = [Budget(device=kib * 1024, host="64MiB") for kib in sizes]
        (first, one), (second, other) = [
            chunked(Layers(), AdamW(lr=1e-3), device=CudaDevice(runtime), budget=budget) for budget in budgets
        ]
        x = torch.randn(8, 64)
        for index in range(4):
            made = first.features(x.bfloat16()) if index else first(x)
            second(made.reshape(2, 4, 64) if index == 1 else made).float().square().mean().backward()
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        for model in (first, second):
            tier = statistics(model).tiers["device"]
            assert tier.peak_bytes <= tier.budget_bytes
            let_go(model)


def test_models_may_come_on_other_threads_while_peaks_are_noted() -> None:
    runtime = FakeRuntime(1)
    owned = EngineAllocations.of(runtime)
    known = [AllocatorBytesTracker(runtime, owned) for _ in range(5)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with runtime, ThreadPoolExecutor(2) as pool:
            coming = [pool.submit(lambda: [AllocatorBytesTracker(runtime, owned) for _ in range(10_000)]) for _ in "12"]
            while not all(each.done() for each in coming):
                known[0].take_peak()
    finally:
        sys.setswitchinterval(before)
    assert all(len(each.result()) == 10_000 for each in coming)

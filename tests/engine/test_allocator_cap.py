"""What PyTorch's allocator takes from a card is capped at the budgets of the models there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import _models as models
from _cases import rows, square
from _fake_cuda import FakeRuntime
from _runs import HOST
from ps_core import AdamW, Budget, DoesNotFit, InvalidInput, Options
from ps_core._simulate.machine import MACHINES
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda import allocator_cap
from ps_core.engine._devices.cuda.allocator_cap import GAPS_PART, ROUNDING_BYTES
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._devices.cuda.runtime import TorchRuntime
from ps_core.engine._execution.plan_request import PlanRequest

SIZE, TIGHT = 112 * 1024, 108 * 1024


@pytest.fixture(autouse=True)
def launches_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time plans as if launching took no time: then they fetch early, and fill the memory."""
    at_once = replace(MACHINES["t4"], launch_s=0.0, tensor_overhead_s=0.0)
    monkeypatch.setattr(CudaDevice, "machine", property(lambda _: at_once))


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    with FakeRuntime(3) as made:
        yield made


def made(runtime: FakeRuntime, size: int | None = SIZE, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return chunked(
        models.stack(),
        AdamW(lr=1e-2),
        device=CudaDevice(runtime),
        budget=Budget(device=size, host=HOST),
        options=Options(group_bytes=4096, **options),
    )


def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
    loss = square(model, *rows(index))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(made: tuple[Any, Any]) -> None:
    """The first pass is recorded; the second one, and an evaluation, have a plan."""
    for index in range(2):
        step(*made, index)
    with torch.no_grad():
        made[0](*rows(0)[:1])


def test_the_cap_is_the_budget_and_what_others_have(runtime: FakeRuntime) -> None:
    others = torch.zeros(5000, dtype=torch.uint8)
    model, optimizer = made(runtime)
    step(model, optimizer, 0)
    assert runtime.cap_bytes is None, "a pass without a plan cannot leave more room"
    train((model, optimizer))
    cap = runtime.cap_bytes
    assert cap is not None
    assert 0 <= cap - (SIZE + SIZE // GAPS_PART + others.nbytes + ROUNDING_BYTES) < 8192, (
        "a batch, and an optimizer's few numbers"
    )
    kept = runtime.released
    for _ in range(3):
        train((model, optimizer))
    assert (runtime.cap_bytes, runtime.released) == (cap, kept), "it is set once"
    with torch.no_grad():
        model(torch.cat([rows(0)[0]] * 8))
    assert runtime.cap_bytes is None
    train((model, optimizer))
    assert runtime.cap_bytes is not None
    release(model)
    assert runtime.cap_bytes is None


def with_gaps(size: int) -> int:
    return size + size // GAPS_PART


def test_the_cap_of_two_models_is_that_of_both_budgets(runtime: FakeRuntime) -> None:
    first = made(runtime)
    train(first)
    alone = runtime.cap_bytes
    assert alone is not None
    second = made(runtime, 2 * SIZE)
    assert runtime.cap_bytes is None, "it has no plan yet"
    train(second)
    assert runtime.cap_bytes is not None
    assert abs(runtime.cap_bytes - alone - with_gaps(2 * SIZE)) < 2**16
    train(first)
    release(first[0])
    assert runtime.cap_bytes is not None
    assert abs(runtime.cap_bytes - with_gaps(2 * SIZE) - ROUNDING_BYTES) < 2**16
    del second
    gc.collect()
    assert runtime.cap_bytes is None, "nor has a model that is dropped"


def test_a_model_that_is_refused_stands_in_no_other_ones_way(runtime: FakeRuntime) -> None:
    first = made(runtime)
    train(first)
    cap = runtime.cap_bytes
    with pytest.raises(DoesNotFit):
        chunked(models.stack(), AdamW(), device=CudaDevice(runtime), budget=Budget(device=1024, host=1024))
    gc.collect()
    train(first)
    assert runtime.cap_bytes == cap is not None
    release(first[0])


def test_a_cap_of_the_users_stays(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture) -> None:
    runtime.allocator.limit_bytes = 1_000_000
    before = runtime.allocated().now
    runtime.set_cap(500_000)
    with caplog.at_level(logging.INFO, "ps_core"):
        model, optimizer = made(runtime, None)
        for _ in range(3):
            train((model, optimizer))
            with torch.no_grad():
                model(torch.cat([rows(0)[0]] * 8))  # on demand
    assert sum("capped at 488.3 KiB of cpu already, and stays so" in each.message for each in caplog.records) == 1
    found = statistics(model).tiers["device"].budget_bytes
    assert 0.9 * (400_000 - before) < found <= 0.9 * 500_000, "what the user allows and is free, less a tenth"
    assert runtime.cap_bytes == 500_000
    release(model)
    assert runtime.cap_bytes == 500_000
    with pytest.raises(InvalidInput, match=r"is 600,000 bytes, but cpu has 500,000"):
        chunked(nn.Linear(2, 2), None, device=CudaDevice(runtime), budget=Budget(device=600_000, host=HOST))


class Loss(nn.Module):
    """A model that returns its loss, so that fake tensors foresee the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.stack()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).float().square().mean()


def test_an_estimate_has_no_cap(runtime: FakeRuntime) -> None:
    """In the first pass a card's libraries allocate memory that fake tensors did not show."""
    budget = Budget(device=SIZE, host=HOST)
    model, optimizer = chunked(Loss(), AdamW(), device=CudaDevice(runtime), budget=budget)
    assert optimizer is not None
    caps, passes = [], []
    for index in range(4):
        loss = model(rows(index)[0])
        caps.append(runtime.cap_bytes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        passes.append(statistics(model).planned_passes)
    assert passes == [1, 2, 3, 4], "by the estimate, and then by what was recorded"
    assert caps[0] is None
    assert caps[-1] is not None
    release(model)


@pytest.mark.parametrize("changed", [None, 900_000])
def test_a_cap_that_the_user_changes_stays(runtime: FakeRuntime, changed: int | None) -> None:
    model, optimizer = made(runtime)
    train((model, optimizer))
    assert runtime.cap_bytes is not None
    runtime.set_cap(changed)
    train((model, optimizer))
    release(model)
    assert runtime.cap_bytes == changed


@pytest.mark.parametrize(("wanted", "limit"), [(False, 1 << 40), (True, SIZE + 100_000)])
def test_no_cap_is_set_where_it_is_not_wanted_or_beyond_the_card(
    runtime: FakeRuntime, wanted: bool, limit: int
) -> None:
    runtime.allocator.limit_bytes = limit
    model, optimizer = made(runtime, cap_allocator=wanted)
    for _ in range(2):
        train((model, optimizer))
        assert runtime.cap_bytes is None
    assert statistics(model).planned_passes > 2
    release(model)


def losses(runtime: FakeRuntime, caplog: pytest.LogCaptureFixture, *, capped: bool) -> list[torch.Tensor]:
    """Train on a card whose allocator leaves gaps; a pass that runs out of memory is made again.

    Afterwards the allocator says what it had reserved at most in the last steps.
    """
    model, optimizer = made(runtime, TIGHT, cap_allocator=capped)
    runtime.allocator.waste = 0.1
    found: list[torch.Tensor] = []
    caplog.set_level("INFO", "ps_core")
    failures = 0
    while len(found) < 8:
        try:
            found.append(step(model, optimizer, len(found)))
            if len(found) == 4:
                runtime.allocator.most_reserved_bytes = 0
        except torch.OutOfMemoryError:
            failures += "Options(cap_allocator=False)" in caplog.text
            caplog.clear()
            assert failures < 4, "passes are planned with more room left free"
            optimizer.zero_grad()
    assert (failures > 0) is capped
    assert statistics(model).planned_passes > 0
    release(model)
    return found


def test_gaps_between_blocks_count_too_and_a_plan_leaves_room_for_them(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocator_cap, "ROUNDING_BYTES", 0)
    monkeypatch.setattr(allocator_cap, "GAPS_PART", SIZE + 1)
    free = losses(runtime, caplog, capped=False)
    assert runtime.allocator.most_reserved_bytes > 1.05 * TIGHT
    with FakeRuntime(3) as other:
        held = losses(other, caplog, capped=True)
        assert 0.8 * TIGHT < other.allocator.most_reserved_bytes < 1.05 * TIGHT
    assert all(map(torch.equal, free, held))


def test_pytorchs_own_cap_is_a_part_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    part, whole = [1.0], 85_017_755_648
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: part[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("_", (), {"total_memory": whole}))

    def set_part(value: float, _: object) -> None:
        part[0] = int(value * whole) / whole  # as the allocator keeps it

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_part)
    runtime = TorchRuntime(0)
    assert runtime.cap_bytes is None
    for size in (1, 2**35 + 1, 12_345_678_901):
        runtime.set_cap(size)
        assert runtime.cap_bytes is not None
        assert size - 1 <= runtime.cap_bytes <= size
    runtime.set_cap(None)
    assert runtime.cap_bytes is None
    runtime.set_cap(2 * whole)
    assert runtime.cap_bytes is None


def steps_in_turn(model: Any, optimizer: Any, count: int) -> int:
    """Make steps, each once; return how many of them ran out of memory."""
    failures = 0
    for index in range(count):
        try:
            step(model, optimizer, index)
        except torch.OutOfMemoryError:
            failures += 1
            optimizer.zero_grad()
    return failures


def test_a_batch_that_cannot_be_made_can_be_made_at_the_next_attempt(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory runs out before the model is called, so that nothing can be planned with more room before."""
    caplog.set_level("INFO", "ps_core")
    monkeypatch.setattr(allocator_cap, "ROUNDING_BYTES", SIZE)
    model, optimizer = made(runtime)
    train((model, optimizer))
    runtime.allocator.waste = 3.0
    with pytest.raises(torch.OutOfMemoryError):
        rows(0)
    assert "or Options(cap_allocator=False)" in caplog.text
    assert runtime.cap_bytes is None
    assert steps_in_turn(model, optimizer, 8) < 4
    assert runtime.cap_bytes is not None
    release(model)


def test_without_a_plan_that_leaves_more_room_there_is_no_cap(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator_cap, "ROUNDING_BYTES", SIZE)
    model, optimizer = made(runtime)
    train((model, optimizer))

    def refuse(*_: object) -> None:
        raise DoesNotFit(tier="device", moment="any", needed_bytes=2, available_bytes=1, proven=True, remedies=())

    monkeypatch.setattr(PlanRequest, "find", refuse)
    runtime.allocator.waste = 3.0
    assert steps_in_turn(model, optimizer, 6) == 1
    assert runtime.cap_bytes is None
    release(model)

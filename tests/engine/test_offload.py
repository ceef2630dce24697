"""Activations that wait in the host's memory: the same bits, fewer bytes on the accelerator, counted and in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _cases import finish
from _fake_cuda import FakeRuntime
from _reference import Loop, Make, Settings, differences, plain
from _runs import HOST, check_same, chunked_model, managed, stand_in, tightest
from ps_core import AdamW, Budget, DoesNotFit, InvalidInput, Options
from ps_core.engine import offloaded, statistics, trace
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._execution.hooks import hooks_of
from ps_core.engine._memory.activation_slots import ActivationSlots

BLOCKS, WIDTH, ROWS = 6, 32, 64
KEPT_BYTES = ROWS * WIDTH * 4
"""What a block keeps for backward in fp32: its input."""
ROOMY = "4MiB"
"""All fits on the device, so that nothing but activations moves."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + shift)


class Net(nn.Module):
    """Blocks whose inputs are kept, here or elsewhere; what all of them get too is never moved."""

    def __init__(self, *, away: bool = True) -> None:
        super().__init__()
        self.away = away
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        x, shift = self.first(rows), torch.ones(WIDTH, dtype=rows.dtype, device=rows.device)
        for block in self.blocks:
            if self.away:
                with offloaded(block, x):
                    x = checkpoint(block, x, shift, use_reentrant=False)
            else:
                x = checkpoint(block, x, shift, use_reentrant=False)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def rows(index: int, count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(index))


def loop(make: Make, *, away: bool = True, steps: int = 4, micro_batches: int = 1) -> list[Tensor]:
    model, optimizer = make(Net(away=away), AdamW(lr=1e-2))
    logs = []
    for index in range(steps):
        for micro in range(micro_batches):
            x = rows(10 * index + micro)
            loss = model(x.to(model.head.weight.dtype))
            optimizer.scale(loss).backward()
            logs.append(loss.detach())
        finish(optimizer)
    return logs


@pytest.mark.parametrize(("precision", "micro_batches"), [("fp32", 2), ("bf16", 1)])
def test_the_same_bits_in_less_memory(precision: str, micro_batches: int) -> None:
    settings = Settings(
        precision=precision, accumulation_steps=micro_batches, options=Options(poison=True, group_bytes=4096)
    )

    def attempt(size: int, *, away: bool) -> Any:
        run = partial(loop, away=away, micro_batches=micro_batches)
        return managed(run, settings, stand_in, Budget(device=size, host=HOST))

    size, got = tightest(partial(attempt, away=True), rounds=1)
    check_same(partial(loop, micro_batches=micro_batches), settings, got)
    assert got.evictions > 0
    with pytest.raises(DoesNotFit):
        attempt(size, away=False)


def test_the_tide_is_lower_by_what_is_away() -> None:
    kept, away = (trace(Net(away=away), (rows(0),)).peak_nonmodel_bytes for away in (False, True))
    assert kept - away == (BLOCKS - 1) * KEPT_BYTES


def step(model: Any, optimizer: Any, index: int) -> None:
    model(rows(index)).backward()
    finish(optimizer)


def test_moves_are_counted_and_slots_used_again() -> None:
    told: dict[str, Any] = {"budget": Budget(device=ROOMY, host=HOST), "precision": "fp32"}
    peaks, moved, held = {}, {}, {}
    for away in (False, True):
        with chunked_model(Net(away=away), **told) as (model, optimizer):
            step(model, optimizer, 0)
            first = statistics(model)
            for index in range(1, 5):
                step(model, optimizer, index)
            last = statistics(model)
            moved[away] = {link: count - first.moved_bytes.get(link, 0) for link, count in last.moved_bytes.items()}
            assert last.planned_passes == last.passes == 5
            assert last.divergences == last.replans == 0, "the tide was as foreseen"
            assert last.tiers["host"].current_bytes == first.tiers["host"].current_bytes
            peaks[away], held[away] = last.tiers["device"].peak_bytes, last.tiers["host"].current_bytes
    for link in ("device->host", "host->device"):
        assert moved[True][link] - moved[False].get(link, 0) == 4 * BLOCKS * KEPT_BYTES
    assert peaks[True] < peaks[False]
    assert held[True] - held[False] == BLOCKS * KEPT_BYTES


def test_only_what_backward_wants_goes() -> None:
    with chunked_model(Net(), budget=Budget(device=ROOMY, host=HOST), precision="fp32") as (model, optimizer):
        step(model, optimizer, 0)
        before = statistics(model).moved_bytes["device->host"]
        with torch.no_grad():
            model(rows(1))
        assert statistics(model).moved_bytes["device->host"] == before
        room = hooks_of(model).engine.activations
        assert room is not None
        assert room.bytes == BLOCKS * KEPT_BYTES
        for index in range(3):
            model(rows(index))  # and no backward pass: what is away is forgotten with its graph
        loss = model(rows(2))
        loss.backward(retain_graph=True)
        loss.backward()
        finish(optimizer)
        assert room.bytes == BLOCKS * KEPT_BYTES


def test_a_larger_batch_gets_larger_slots() -> None:
    def run(make: Make) -> list[Tensor]:
        model, optimizer = make(Net(), AdamW(lr=1e-2))
        logs = []
        for count in (8, ROWS, 8, 2 * ROWS, 8):
            logs.append(model(rows(count, count)))
            logs[-1].backward()
            finish(optimizer)
        return [each.detach() for each in logs]

    settings = Settings(precision="fp32")
    got = managed(run, settings, stand_in, Budget(device=ROOMY, host=HOST))
    assert not differences(plain(run, settings), got)
    (counted,) = got.statistics
    model_data = managed(partial(loop, away=False, steps=1), settings, stand_in, Budget(device=ROOMY, host=HOST))
    (without,) = model_data.statistics
    assert counted.tiers["host"].current_bytes - without.tiers["host"].current_bytes == 2 * BLOCKS * KEPT_BYTES


def test_on_a_played_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wait that is left out shows."""
    settings, run = Settings(precision="fp32"), partial(loop, steps=3)

    def on_cuda(seed: int) -> Any:
        runtime = FakeRuntime(seed)
        with runtime:
            return managed(run, settings, partial(CudaDevice, runtime), Budget(device=ROOMY, host=HOST))

    expected = plain(run, settings)
    for seed in (1, 2):
        got = on_cuda(seed)
        assert not differences(expected, got)
        assert got.statistics[0].moved_bytes["host->device"] >= 3 * BLOCKS * KEPT_BYTES
    monkeypatch.setattr(ActivationSlots, "_make_compute_wait", lambda self, queue, what: None)
    assert any(differences(expected, on_cuda(seed)) for seed in (1, 2))


def test_a_host_that_is_too_small_is_refused_by_name() -> None:
    def run(host: int | str) -> Any:
        budget = Budget(device=ROOMY, host=host)
        return managed(partial(loop, steps=2), Settings(precision="fp32"), "emulated", budget)

    host = run(HOST).statistics[0].tiers["host"].current_bytes - KEPT_BYTES
    refusals = 0
    while refusals < 2 * BLOCKS:
        try:
            got = run(host)
            break
        except DoesNotFit as error:
            refused = error
        refusals += 1
        assert (refused.tier, refused.available_bytes) == ("host", host)
        if refused.moment == "moving activations there":
            assert f", host={refused.needed_bytes}): " in str(refused)
        host = refused.needed_bytes
    assert refusals >= 1
    assert got.statistics[0].tiers["host"].peak_bytes <= host


def test_not_with_a_disk(tmp_path: Any) -> None:
    budget = Budget(device="256KiB", host="64KiB", disk="4MiB", disk_dir=str(tmp_path))
    refused = pytest.raises(InvalidInput, match=r"offloaded\(\.\.\.\) with Budget\.disk")
    with chunked_model(Net(), device="emulated", budget=budget, precision="fp32") as (model, _), refused:
        model(rows(0))


@pytest.mark.parametrize("device", ["cpu", None])
def test_where_nothing_moves_nothing_changes(device: str | None) -> None:
    settings = Settings(precision="fp32")
    run: Loop = partial(loop, steps=2)
    if device is not None:
        got = managed(run, settings, device, Budget(host=HOST))
        assert not got.statistics[0].moved_bytes
        assert not differences(plain(partial(loop, away=False, steps=2), settings), got)
        return
    one, other = Net(), Net(away=False)
    other.load_state_dict(one.state_dict())
    losses: list[Callable[[], Tensor]] = [lambda: one(rows(0)), lambda: other(rows(0))]
    for make in losses:
        make().backward()
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None)

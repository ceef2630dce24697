"""A group that comes to the same place of the arena again is bound to the views that were made there before."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import _models as models
from _cases import case
from _fake_cuda import FakeRuntime
from _reference import Settings
from _runs import HOST, check_same, managed, stand_in
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._parameters import residency

TIGHT = 96 * 1024
STACK = case("stack", models.stack)


class Made:
    """Counts the views that are made, and keeps weak references to their storages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0
        make = residency._view

        def view(record: Any, slot: Any) -> Any:
            made = make(record, slot)
            self.storages.append(weakref.ref(made.storage))
            self.most = max(self.most, len(slot.views))
            return made

        monkeypatch.setattr(residency, "_view", view)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.storages)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


def chunked_stack(device: Any, precision: str = "bf16", size: int = TIGHT) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return chunked(
        models.stack(6),
        AdamW(lr=1e-2),
        device=device,
        precision=precision,
        budget=Budget(device=size, host=HOST),
        options=Options(group_bytes=8192),
    )


def train(model: nn.Module, optimizer: Any, rows: int = 4) -> None:
    for index in range(2):
        x = torch.randn(rows, models.WIDTH, generator=torch.Generator().manual_seed(index))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)


@pytest.mark.parametrize("device", ["emulated", "cuda"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_planned_step_makes_no_views(device: str, precision: str, made: Made) -> None:
    runtime = FakeRuntime(1) if device == "cuda" else nullcontext()
    with runtime as played:
        model, optimizer = chunked_stack(
            device if played is None else CudaDevice(played), precision, TIGHT if played is None else 2 * TIGHT
        )
        for _ in range(3):
            train(model, optimizer)
        known, before = len(made.storages), statistics(model)
        for _ in range(2):
            train(model, optimizer)
        after = statistics(model)
        release(model)
    assert after.planned_passes == before.planned_passes + 8
    assert after.evictions > before.evictions, "groups move"
    assert len(made.storages) == known
    assert made.alive == 0, "they go with the model"


def test_views_go_with_a_model_that_is_dropped(made: Made) -> None:
    model, optimizer = chunked_stack("emulated")
    train(model, optimizer)
    assert made.alive > 0
    del model, optimizer
    assert made.alive == 0


def test_views_of_a_block_go_when_another_takes_its_place(made: Made) -> None:
    """A larger batch leaves less for the arena, which on a card is allocated anew."""
    with FakeRuntime(1) as runtime:
        device = CudaDevice(runtime)
        model, optimizer = chunked_stack(device, size=2 * TIGHT)
        for _ in range(3):
            train(model, optimizer)
        of_old = len(made.storages)
        block = weakref.ref(model[0].wide.weight._owner.store.arena._memory.untyped_storage())
        for _ in range(3):
            train(model, optimizer, rows=24)
        gc.collect()
        assert statistics(model).replans > 0
        assert block() is None, "a view keeps the whole block"
        assert all(each() is None for each in made.storages[:of_old])
        release(model)


def test_few_are_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MOST_VIEWS", 5)
    settings = Settings(precision="bf16")
    got = managed(STACK.run, settings, stand_in, Budget(device=TIGHT, host=HOST))
    check_same(STACK.run, settings, got)
    assert made.most == 5
    assert made.alive == 0


def test_an_alias_keeps_its_memory_and_its_place_is_used_again_afterwards(made: Made) -> None:
    model, optimizer = chunked_stack("emulated")
    for _ in range(3):
        train(model, optimizer)
    weight = model[0].wide.weight
    expected = weight.detach().clone()
    alias = weight.detach()
    x = torch.randn(4, models.WIDTH)
    with torch.no_grad():
        for _ in range(2):
            model(x)  # other groups come to the compute tier, and not to where the alias is
    assert torch.equal(alias, expected)
    del alias
    train(model, optimizer)
    known = len(made.storages)
    train(model, optimizer)
    assert len(made.storages) == known
    release(model)

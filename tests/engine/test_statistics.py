"""What `statistics` says of time and of plans that were left."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import _models as models
import ps_kernels
from _cases import rows, square
from _fake_cuda import FakeRuntime
from _runs import HOST, chunked_model, stand_in
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics
from ps_core.engine._devices.cuda.device import CudaDevice
from ps_core.engine._support import counters
from ps_core.engine._support.counters import PHASES, PhaseTimer


def test_a_clock_counts_each_phase_and_nothing_between(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 12.0, 17.0, 17.5])
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    clock = PhaseTimer()
    clock.enter_phase("forward")
    clock.enter_phase("")
    clock.enter_phase("step")
    clock.enter_phase("step")
    clock.waited(0.25)
    clock.end_step()
    first = clock.last_step
    assert first == {"forward": 2.0, "backward": 0.0, "step": 0.5, "stalled": 0.25}
    assert clock.stalled_s == 0.25
    clock.end_step()
    assert dict(clock.last_step) == dict.fromkeys(PHASES, 0.0)
    assert first["stalled"] == 0.25


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_steps_time_is_told_by_phase(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read: where a phase begins and where it ends."""
    readings = count()
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    budget = Budget(host=HOST, device=None if device == "cpu" else "256KiB")
    where = device if device == "cpu" else stand_in()
    with chunked_model(models.stack(), device=where, budget=budget) as (model, optimizer):
        assert statistics(model).step_time_s == dict.fromkeys(PHASES, 0.0)
        square(model, *rows(0)).backward()
        optimizer.step()
        found = statistics(model)
        assert [found.step_time_s[phase] for phase in ("forward", "backward", "step")] == [1, 1, 1]
        assert next(readings) == 6
        assert found.as_dict()["step_time_s.forward"] == found.step_time_s["forward"]


def test_the_last_divergence_says_why() -> None:
    told = {"device": stand_in(), "budget": Budget(device="256KiB", host=HOST), "options": Options(group_bytes=4096)}
    with chunked_model(models.stack(), **told) as (model, optimizer):
        square(model, *rows(0)).backward()
        optimizer.step()
        assert statistics(model).last_divergence == ""
        x = rows(0)[0]
        square(model, x.repeat(2, *[1] * (x.dim() - 1))).backward()
        assert statistics(model).last_divergence == "a batch larger than the plan's"
        optimizer.step()
        square(model[0], x.bfloat16()).backward()
        assert statistics(model).last_divergence == "a part of the model is called by itself"


def test_a_divergence_names_the_gradients_of_a_moment_that_changed() -> None:
    """A frozen layer below changes what the moment does, and not its name."""
    told = {"device": stand_in(), "budget": Budget(device="256KiB", host=HOST), "options": Options(group_bytes=128)}
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with chunked_model(net, **told) as (model, optimizer):
        for frozen in (False, False, True):
            model[0].requires_grad_(not frozen)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).last_divergence == (
            "backward of 1.weight makes gradients of 1.weight, unlike in the plan"
        )


KERNELS = {"cuda": "available", "avx512": "no such processor", "avx2": "available", "torch": "available"}


@pytest.mark.parametrize(
    ("layers", "budget", "cuda", "expected"),
    [
        (1, "64MiB", "available", "cuda"),
        (1, "64MiB", "cupy is not installed", "torch on CUDA"),
        (8, "128KiB", "available", "avx2"),
        (8, "400KiB", "available", "cuda and avx2"),
    ],
)
def test_what_steps_run_on_with_a_card(
    layers: int, budget: str, cuda: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ps_kernels, "backends", lambda: {**KERNELS, "cuda": cuda})
    told = {"budget": Budget(device=budget, host=HOST), "options": Options(group_bytes=16384)}
    with FakeRuntime() as runtime, chunked_model(models.stack(layers), device=CudaDevice(runtime), **told) as managed:
        model, optimizer = managed
        for index in range(2):
            square(model, *rows(index)).backward()
            optimizer.step()
        assert statistics(model).adam_backend == expected


def test_what_steps_run_on_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_kernels, "backends", lambda: KERNELS)
    with chunked_model(models.stack()) as (model, _):
        assert statistics(model).adam_backend == "avx2", "whatever CUDA there may be"


def test_with_room_for_everything_nothing_moves_on_an_emulated_device() -> None:
    """One thread does everything there, so no move hides behind anything; with less room the rest still moves."""
    for device, moves in (("64MiB", False), ("1MiB", True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        managed, optimizer = chunked(
            model,
            AdamW(lr=1e-3),
            device="emulated",
            budget=Budget(device=device, host="16MiB"),
            options=Options(group_bytes=2**15),
        )
        assert optimizer is not None
        moved = []
        for _ in range(4):
            managed(torch.ones(8, 128)).square().mean().backward()
            optimizer.step()
            moved.append(sum(statistics(managed).moved_bytes.values()))
        release(managed)
        assert (moved[-1] > moved[-2] > moved[-3]) is moves
        assert (moved[-1] == moved[-2]) is not moves


def test_every_link_is_listed_before_anything_moves() -> None:
    both = {"device->host": 0, "host->device": 0}
    for device, budget, links in (("cpu", Budget(), {}), ("emulated", Budget(device="64KiB"), both)):
        model, _ = chunked(nn.Linear(4, 4), AdamW(), device=device, budget=budget)
        assert statistics(model).moved_bytes == links
        assert {key for key in statistics(model).as_dict() if "->" in key} == {f"moved_bytes.{each}" for each in links}
        release(model)

"""Train with steps within backward, on any device; choose where groups are stepped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import next_token, tokens
from _fake_cuda import FakeRuntime
from _runs import HOST, let_go
from checked_device.device import CheckedDevice
from ps_core import AdamW, Budget, Options
from ps_core._planner.placement import Placement
from ps_core._planner.scores import Scorer
from ps_core._planner.search import Planned
from ps_core.engine import chunked, statistics
from ps_core.engine._execution import plan_request
from test_host_worker import late_device

SIZES = {"bf16": ("72KiB", "110KiB"), "fp32": ("144KiB", "200KiB")}
DEVICES: dict[str, Callable[[FakeRuntime], Any]] = {
    "emulated": lambda runtime: "emulated",
    "checked": lambda runtime: CheckedDevice(check=True, seed=3),
    "late": lambda runtime: late_device(runtime, 2),
}


def managed(
    device: Any, precision: str, size: str | None, step: str = "in_backward", *, checkpointing: bool = True
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return chunked(
        models.Language(tied=True, checkpointing=checkpointing),
        AdamW(lr=0.01),
        device=device,
        precision=precision,
        budget=Budget(host=HOST) if size is None else Budget(device=size, host=HOST),
        options=Options(group_bytes=4096, step=step),
    )


def trained(device: Any, precision: str, size: str | None, step: str) -> tuple[list[Tensor], Any]:
    model, optimizer = managed(device, precision, size, step)
    logs = []
    for index in range(6):
        loss = next_token(model, *tokens(index))
        loss.backward()
        logs.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if index == 3:
            optimizer.param_groups[0]["lr"] = 0.005
    logs += [value.clone() for value in model.state_dict().values()]
    states = optimizer.state_dict(masters=True)["state"].values()
    logs += [value for entry in states for value in entry.values() if isinstance(value, Tensor)]
    found = statistics(model)
    let_go(model)
    return logs, found


def check_bits(device: str, precision: str, size: str) -> Any:
    """Compare a training by plans with one behind backward, where everything fits; return its statistics."""
    right, _ = trained("cpu", precision, None, "after_backward")
    runtime = FakeRuntime(1)
    with runtime:
        got, found = trained(DEVICES[device](runtime), precision, size, "in_backward")
    assert all(map(torch.equal, right, got))
    assert (found.divergences, found.planned_passes) == (0, 5)
    return found


def keep_plans(monkeypatch: pytest.MonkeyPatch) -> list[Planned]:
    """Return a list of the plans that are made from now on."""
    planned: list[Planned] = []
    find = plan_request.find_plan

    def kept(*told: Any, **more: Any) -> Planned:
        planned.append(find(*told, **more))
        return planned[-1]

    monkeypatch.setattr(plan_request, "find_plan", kept)
    return planned


def stream_states(monkeypatch: pytest.MonkeyPatch, parts: int = 8) -> list[Planned]:
    """Step so many sixteenths of the groups below the device on it, within backward; return the plans made so."""
    place = Scorer.placement

    def placement(self: Scorer, resident: int, streamed: int, early: bool = False) -> Placement:
        placed = place(self, resident, parts)
        below = range(resident, len(placed.states))
        return replace(placed, stepped_in_backward=tuple(group for group in below if placed.steps[group] == 0))

    monkeypatch.setattr(Scorer, "placement", placement)
    return keep_plans(monkeypatch)

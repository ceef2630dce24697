"""Groups stepped while backward goes on, before the norm is known: undone where gradients are clipped, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
from ps_core.engine import chunked, statistics
from ps_core.engine._execution.hooks import hooks_of
from test_host_worker import late_device
from test_virtual_clock import NEAR, check_profile, train

DEVICES: dict[str, Callable[[FakeRuntime], Any]] = {
    "emulated": lambda runtime: "emulated",
    "checked": lambda runtime: CheckedDevice(check=True, seed=3),
    "late": lambda runtime: late_device(runtime, 2),
}
SIZES = {"bf16": ("72KiB", "110KiB"), "fp16": ("72KiB",), "fp32": ("144KiB",)}


def managed(device: Any, precision: str, size: str | None, step: str, host: Any = HOST, **told: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    told.setdefault("max_grad_norm", 1.0)
    return chunked(
        models.Language(tied=True, checkpointing=True),
        told.pop("optimizer", AdamW(lr=0.01)),
        device=device,
        precision=precision,
        budget=Budget(host=HOST) if size is None else Budget(device=size, host=host),
        options=Options(group_bytes=4096, step=step, machine="h200"),
        **told,
    )


def stepping(model: Any) -> Any:
    return hooks_of(model).engine.speculation


def values(model: Any, optimizer: Any) -> list[Tensor]:
    found = [value.clone() for value in model.state_dict().values()]
    states = optimizer.state_dict(masters=True)["state"].values()
    return found + [value for entry in states for value in entry.values() if isinstance(value, Tensor)]


STEPS = 9
SPOILT = 7
"""The number of the step with a gradient that is not finite."""


def trained(device: Any, precision: str, size: str | None, step: str, host: Any = HOST, **told: Any) -> Any:
    """Train with limits below and above the norm; return all bits, the statistics, and how many steps began early."""
    model, optimizer = managed(device, precision, size, step, host, **told)
    logs, early = [], []
    limits = torch.Generator().manual_seed(5)
    bad: list[float] = []
    model.blocks[1].narrow.weight.register_hook(lambda grad: grad * bad[0] if bad else grad)
    for index in range(STEPS):
        optimizer.max_grad_norm = (None, 1e-3, 1e9)[int(torch.randint(3, (1,), generator=limits))]
        bad[:] = [float("nan")] if index == SPOILT else []
        loss = next_token(model, *tokens(index))
        optimizer.scale(loss).backward()
        logs.append(loss.detach())
        early.append(0 if stepping(model) is None else len(stepping(model)._early))
        optimizer.step()
        logs.append(torch.tensor([optimizer.last_norm, optimizer.last_skipped, optimizer.loss_scale]))
        optimizer.zero_grad()
        if index == 3:
            optimizer.param_groups[0]["lr"] = 0.005
    logs += values(model, optimizer)
    found = statistics(model)
    let_go(model)
    return logs, found, early


def same(right: list[Tensor], got: list[Tensor]) -> bool:
    return len(right) == len(got) and all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(right, got, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("precision", "size"), [(p, size) for p, sizes in SIZES.items() for size in sizes])
def test_the_same_bits(precision: str, size: str, device: str) -> None:
    right, _, _ = trained("cpu", precision, None, "after_backward")
    runtime = FakeRuntime(1)
    with runtime:
        got, found, early = trained(DEVICES[device](runtime), precision, size, "speculative")
    assert same(right, got)
    print(device, precision, size, early, found.undone_group_steps, found.divergences, found.planned_passes)


@pytest.mark.parametrize("budget_kib", [64, 160])
@pytest.mark.parametrize(("precision", "clip"), [("bf16", 1e6), ("fp16", 1e6), ("fp32", 1e6)])
def test_a_step_takes_what_was_predicted(budget_kib: int, precision: str, clip: float, tmp_path: Path) -> None:
    kib = budget_kib * (2 if precision == "fp32" else 1)
    got = train(tmp_path, f"{kib}KiB", precision=precision, clip=clip, step="speculative")
    after = train(tmp_path, f"{kib}KiB", precision=precision, clip=clip)
    print(got.step_s, got.predicted.step_time_s, after.step_s)
    assert got.step_s == pytest.approx(got.predicted.step_time_s, rel=2 * NEAR)
    check_profile(got, 2 * NEAR)
    assert got.step_s <= after.step_s * 1.02

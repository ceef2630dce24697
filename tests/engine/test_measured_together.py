"""Count the calls that measure gradients on the CPU: one for each group at the step, none as gradients arrive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ps_kernels
from ps_core import AdamW, Budget, Options
from ps_core.engine import chunked, release, statistics


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_over_weights_are_measured_once_a_group_at_the_step(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    calls: list[int] = []
    real = ps_kernels.sumsq_finite

    def counted(*args: Any, **told: Any) -> None:
        calls.append(1)
        real(*args, **told)

    monkeypatch.setattr(ps_kernels, "sumsq_finite", counted)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    told: dict[str, Any] = {"budget": Budget(host="64MiB"), "options": Options(group_bytes=1 << 18)}
    model, optimizer = chunked(model, AdamW(), device="cpu", precision=precision, **told)
    loss = model(torch.ones(2, 256)).float().sum()
    optimizer.scale(loss).backward()
    assert not calls
    optimizer.step()
    assert len(calls) == statistics(model).groups
    release(model)

"""A step that changes nothing, because a gradient is not finite, is said; with a loss scale it is ordinary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _runs import let_go
from ps_core import SGD, Budget
from ps_core.engine import chunked, statistics

NAN = float("nan")


def trained(precision: str, factors: list[float], device: str = "emulated") -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = chunked(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        SGD(lr=0.1),
        precision=precision,
        device=device,
        budget=Budget(host="1MiB") if device == "cpu" else Budget(device="64KiB", host="1MiB"),
    )
    for factor in factors:
        optimizer.scale(model(torch.ones(2, 8)).float().sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_it_is_said_the_first_time_and_then_ever_more_rarely(
    precision: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "ps_core"):
        model, optimizer = trained(precision, [1.0, NAN, NAN, 1.0, NAN, NAN, NAN], device)
    assert optimizer.last_skipped
    assert statistics(model).skipped_steps == 5
    let_go(model)
    begins = [
        "step {} changes no parameter: the gradient of '0.weight' is not finite (3 more are not, either); "
        f"{skipped} of {{}} steps were such. ".format(step, step)
        for skipped, step in ((1, 2), (2, 3), (4, 6))
    ]
    assert [each.partition("To find")[0] for each in caplog.messages] == begins


def test_a_norm_that_overflows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ps_core"):
        model, _ = trained("fp32", [1e37])
    let_go(model)
    assert [each.partition(";")[0] for each in caplog.messages] == [
        "step 1 changes no parameter: the norm of all gradients is not finite"
    ]


def test_with_a_loss_scale_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ps_core"):
        model, optimizer = trained("fp16", [NAN])
    assert optimizer.last_skipped
    let_go(model)
    assert not caplog.messages

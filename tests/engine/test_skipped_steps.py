"""A step that changes nothing, because a gradient is not finite, is said; with a loss scale it is ordinary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from _runs import let_go
from ps_core import SGD, Budget, Options
from ps_core.engine import chunked, statistics

NAN = float("nan")


def trained(precision: str, factors: list[float], device: str = "emulated", **more: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = chunked(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        SGD(lr=0.1),
        precision=precision,
        device=device,
        budget=Budget(host="1MiB") if device == "cpu" else Budget(device="64KiB", host="1MiB"),
        **more,
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


OVERFLOWS = 1e37
"""Gradients that are this large are finite, but their squares are not."""


@pytest.mark.parametrize("step", ["after_backward", "in_backward", "speculative"])
@pytest.mark.parametrize("device", ["cpu", 32, 64, 200])
def test_gradients_whose_norm_overflows_are_stepped_as_by_plain_pytorch(
    step: str, device: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def passed(model: nn.Module, optimizer: Any, index: int) -> None:
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(index))
        (model(x).sum() * (OVERFLOWS if index == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    budget = Budget(host="1MiB") if device == "cpu" else Budget(device=f"{device}KiB", host="1MiB")
    plain = made()
    reference = torch.optim.SGD(plain.parameters(), lr=1e-37, fused=True)
    options = Options(step=step, group_bytes=4096)
    model, optimizer = chunked(
        made(), SGD(lr=1e-37), precision="fp32", budget=budget, options=options,
        device="cpu" if device == "cpu" else "emulated",
    )  # fmt: skip
    with caplog.at_level("WARNING", "ps_core"):
        for index in range(5):
            passed(plain, reference, index)
            passed(model, optimizer, index)
    found = model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())
    assert not torch.equal(plain[0].weight, made()[0].weight)
    told = statistics(model)
    assert told.skipped_steps == 0
    assert (told.group_steps_in_backward > 0) == (device == 64 and step != "after_backward"), "else the plan has none"
    let_go(model)
    assert not caplog.messages


def test_a_norm_that_overflows_cannot_clip(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ps_core"):
        model, _ = trained("fp32", [OVERFLOWS], max_grad_norm=1.0)
    let_go(model)
    assert [each.partition(";")[0] for each in caplog.messages] == [
        "step 1 changes no parameter: the norm of all gradients is not finite"
    ]


@pytest.mark.parametrize(("times", "skipped"), [(1e-3, False), (1e30, True)])
def test_gradients_that_the_program_multiplies_may_no_longer_be_finite(times: float, skipped: bool) -> None:
    model, optimizer = trained("fp32", [])
    (model(torch.ones(2, 8)).sum() * OVERFLOWS).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(times)
    optimizer.step()
    assert optimizer.last_skipped == skipped
    let_go(model)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_pytorchs_clipping_makes_such_gradients_zero(device: str) -> None:
    model, optimizer = trained("fp32", [1.0], device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model(torch.ones(2, 8)).sum() * OVERFLOWS).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == float("inf")
    optimizer.step()
    assert not optimizer.last_skipped
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    let_go(model)


def test_with_a_loss_scale_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "ps_core"):
        model, optimizer = trained("fp16", [NAN])
    assert optimizer.last_skipped
    let_go(model)
    assert not caplog.messages

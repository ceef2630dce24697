"""``optimizer.scaler``: the loss scale for code that is written for ``torch.amp.GradScaler``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import _models as models
from _cases import ADAMW, next_token, tokens
from _reference import Make, Settings
from _runs import HOST, check_same, chunked_model, managed
from ps_core import SGD, Budget, InvalidInput
from ps_core.engine._gradients.loss_scale import LossScale

STEPS = 5


def by_scaler(make: Make) -> list[Tensor]:
    model, optimizer = make(models.Language(layers=2), ADAMW)
    scaler, logs = optimizer.scaler, []
    assert scaler.is_enabled()
    for index in range(STEPS):
        loss = next_token(model, *tokens(index))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        logs += [loss.detach(), torch.tensor(scaler.get_scale())]
    return logs


def by_optimizer(make: Make) -> list[Tensor]:
    model, optimizer = make(models.Language(layers=2), ADAMW)
    logs = []
    for index in range(STEPS):
        loss = next_token(model, *tokens(index))
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        logs += [loss.detach(), torch.tensor(optimizer.loss_scale)]
    return logs


def test_a_loop_for_a_gradscaler_is_that_of_the_optimizer() -> None:
    told, budget = Settings(precision="fp16"), Budget(device="256KiB", host=HOST)
    got = managed(by_scaler, told, "emulated", budget)
    check_same(by_optimizer, told, got)


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    with chunked_model(models.Language(layers=1), precision="fp16") as (model, optimizer):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scaler, first = optimizer.scaler, optimizer.scaler.get_scale()
        (scaler.scale(next_token(model, *tokens(0))) * 1e30).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.last_skipped
        assert scaler.get_scale() == first / 2
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_its_state_is_a_gradscalers() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with chunked_model(models.Language(layers=1), precision="fp16") as (_, optimizer):
        assert optimizer.scaler.state_dict() == theirs.state_dict()
        optimizer.scaler.load_state_dict({**theirs.state_dict(), "scale": 8.0})
        assert optimizer.loss_scale == 8.0
        assert optimizer.state_dict()["loss_scale"] == LossScale(value=8.0).state_dict()


def test_where_nothing_is_scaled_it_does_nothing() -> None:
    with chunked_model(models.Language(layers=1), precision="bf16", spec=SGD(lr=0.5)) as (model, optimizer):
        scaler = optimizer.scaler
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0
        loss = next_token(model, *tokens(0))
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.step(optimizer)
        assert optimizer.last_norm is not None
        scaler.load_state_dict({})
        assert scaler.state_dict() == {}


@pytest.mark.parametrize("explicitly", [True, False])
def test_torchs_own_is_refused_by_the_name_of_this_one(explicitly: bool) -> None:
    """Before PyTorch says of 16-bit gradients that they cannot be unscaled."""
    with chunked_model(models.Language(layers=1), precision="fp16") as (model, optimizer):
        theirs = torch.amp.GradScaler("cpu")
        theirs.scale(next_token(model, *tokens(0))).backward()
        with pytest.raises(InvalidInput, match=r"GradScaler on the gradient of .*optimizer\.scaler in its place"):
            theirs.unscale_(optimizer) if explicitly else theirs.step(optimizer)
        optimizer.zero_grad()
        scaler = optimizer.scaler
        scaler.scale(next_token(model, *tokens(0))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert not optimizer.last_skipped


def test_what_it_refuses() -> None:
    with chunked_model(models.Language(layers=1), precision="fp16") as (model, optimizer):
        other: Any = torch.optim.SGD([torch.ones((), requires_grad=True)], lr=0.1)
        for call in (optimizer.scaler.step, optimizer.scaler.unscale_):
            with pytest.raises(InvalidInput, match=r"that chunked\(\.\.\.\) returned, found a SGD"):
                call(other)
        with pytest.raises(InvalidInput, match="load_state_dict"):
            optimizer.scaler.update(4.0)
        next_token(model, *tokens(0)).backward()
        with pytest.raises(InvalidInput, match=r"accelerator\.scaler = optimizer\.scaler"):
            optimizer.scaler.step(optimizer)

"""Schedulers of ``torch.optim.lr_scheduler``, on the optimizer that ``chunked`` returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as sched

import _models as models
from _cases import next_token, tokens
from _hugging_face import assert_near
from _reference import Make, Settings
from _runs import check_same, chunked_model
from _runs import managed as run_managed
from _twins import twin
from ps_core import SGD, AdamW, Budget, Group

NO_DECAY = Group(match=lambda name, parameter: parameter.dim() < 2, lr=0.02, weight_decay=0.0)
SPECS = {"adamw": AdamW(lr=0.01, weight_decay=0.1, groups=(NO_DECAY,)), "sgd": SGD(lr=0.1, momentum=0.9)}
STEPS = 8

Build = Callable[[Any], Any]
SCHEDULERS: dict[str, tuple[str, Build]] = {
    "step": ("sgd", lambda o: sched.StepLR(o, 2, gamma=0.5)),
    "lambda": ("adamw", lambda o: sched.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4))),
    "cosine": ("adamw", lambda o: sched.CosineAnnealingLR(o, STEPS)),
    "restarts": ("sgd", lambda o: sched.CosineAnnealingWarmRestarts(o, 3)),
    "one cycle": ("adamw", lambda o: sched.OneCycleLR(o, max_lr=0.05, total_steps=STEPS, cycle_momentum=False)),
    "cyclic": ("sgd", lambda o: sched.CyclicLR(o, 0.01, 0.2, step_size_up=2, cycle_momentum=False)),
    "exponential": ("adamw", lambda o: sched.ExponentialLR(o, 0.8)),
    "warm up, then decay": (
        "adamw",
        lambda o: sched.SequentialLR(o, [sched.LinearLR(o, 0.1, total_iters=3), sched.PolynomialLR(o, 5)], [3]),
    ),
    "plateau": ("sgd", lambda o: sched.ReduceLROnPlateau(o, factor=0.5, patience=0)),
}


def loop(build: Build, spec: Any) -> Callable[[Make], list[Tensor]]:
    def train(make: Make) -> list[Tensor]:
        model, optimizer = make(models.Language(layers=2), spec)
        scheduler, logs, rates = build(optimizer), [], []
        for index in range(STEPS):
            loss = next_token(model, *tokens(index))
            optimizer.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            value = (loss.detach().float(),) if isinstance(scheduler, sched.ReduceLROnPlateau) else ()
            scheduler.step(*value)
            rates += [group["lr"] for group in optimizer.param_groups if group["params"]]
            logs.append(loss.detach())
        assert len(set(rates)) > 2, "the rate never changed"
        return [*logs, torch.tensor(sorted(rates), dtype=torch.float64)]

    return train


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_bits_as_on_a_plain_optimizer(name: str) -> None:
    spec, build = SCHEDULERS[name]
    settings = Settings(precision="bf16")
    got = run_managed(loop(build, SPECS[spec]), settings, "emulated", Budget(device=80_000, host="64MiB"))
    assert got.evictions > 0
    check_same(loop(build, SPECS[spec]), settings, got)


@pytest.mark.parametrize("spec", ["adamw", "sgd"])
def test_momentum_follows_its_cycle(spec: str) -> None:
    def train(model: Any, optimizer: Any) -> list[Any]:
        scheduler, seen = sched.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS), []
        for index in range(STEPS - 1):
            next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            seen += [(group["lr"], group.get("betas", group.get("momentum"))) for group in optimizer.param_groups]
        assert len(set(seen)) >= STEPS - 1
        return seen

    torch.manual_seed(5)
    model = models.Language(layers=2)
    expected = train(model, twin(SPECS[spec], model))
    torch.manual_seed(5)
    with chunked_model(models.Language(layers=2), spec=SPECS[spec], precision="fp32") as (other, optimizer):
        assert train(other, optimizer) == expected
        assert_near(dict(other.state_dict()), dict(model.state_dict()), STEPS)


def test_a_scheduler_goes_on_from_its_state() -> None:
    with chunked_model(models.Language(layers=2), spec=SPECS["adamw"]) as (model, optimizer):
        scheduler = sched.CosineAnnealingLR(optimizer, STEPS)
        for index in range(3):
            next_token(model, *tokens(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        saved, rates = copy.deepcopy(scheduler.state_dict()), scheduler.get_last_lr()
        scheduler.step()
        fresh = sched.CosineAnnealingLR(optimizer, STEPS)
        fresh.load_state_dict(saved)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        fresh.step()
        assert fresh.get_last_lr() == scheduler.get_last_lr()

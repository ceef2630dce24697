"""Weights that one rank reads outside of the model, as for a log: the other ranks need not know of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _states import masters_of
from _threads import Together, run
from ps_core import SGD, AdamW, Budget, Options, UnsupportedParameter
from ps_core.engine import chunked, release, statistics

torch.manual_seed(0)
MADE = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
VALUES = torch.randn(4, 32)
ADAMW = AdamW(lr=1e-2)
KEPT = list[Tensor]()


def made(each: Together, device: str, precision: str, spec: Any = ADAMW) -> tuple[Any, Any]:
    budget = Budget(host="4MiB") if device == "cpu" else Budget(device="40KiB", host="4MiB")
    options = Options(group_bytes=2048, poison=True)
    return chunked(
        deepcopy(MADE), spec, device=device, precision=precision, budget=budget, collectives=each,
        options=options,
    )  # fmt: skip


def convert(model: nn.Module) -> None:
    with pytest.raises(UnsupportedParameter, match="release"):
        model.double()


def evaluate_part(model: nn.Module) -> None:
    with torch.no_grad():
        (VALUES.to(model[1].weight.dtype) @ model[1].weight).sum()


READS: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda model: model[0].weight.sum().item(),
    "a text": lambda model: str(model[2].weight),
    "a norm": lambda model: torch.linalg.vector_norm(model[3].weight.detach()).item(),
    "a graph that is kept": lambda model: KEPT.append(model[1].weight.square().sum()),
    "a product": evaluate_part,
    "a refused conversion": convert,
}


def trained(each: Together, device: str, precision: str, read: Callable[[Any], Any] | None) -> Any:
    """Return the masters after six steps; rank 1 reads before, within and behind some of them."""
    model, optimizer = made(each, device, precision)
    for index in range(6):
        reads = read if each.rank and index in (0, 2, 3) else None
        if reads is not None and index != 2:
            reads(model)
        loss = model(VALUES + each.rank).float().square().mean()
        loss.backward()
        if reads is not None and index == 2 and reads is not convert:  # which reads gradients, as all ranks must
            reads(model)
        optimizer.step()
        if reads is not None and index == 3:
            reads(model)
        optimizer.zero_grad()
        KEPT.clear()
    with torch.no_grad():
        model(VALUES)
    masters, planned = masters_of(optimizer.state_dict(masters=True)), statistics(model).planned_passes
    release(model)
    return list(masters.values()), planned


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("read", READS)
def test_the_bits_are_those_without_reads(read: str, precision: str, device: str) -> None:
    right = run(2, partial(trained, device=device, precision=precision, read=None))[0]
    found = run(2, partial(trained, device=device, precision=precision, read=READS[read]))[0]
    for (expected, planned), (got, ours) in zip(right, found, strict=True):
        assert all(map(torch.equal, expected, got))
        assert ours >= planned - 1, "but for the first, the model's passes go by the plan or take part in it"


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_on_weights_is_trained_by_all_ranks(first: bool, device: str) -> None:
    """Weights are read outside of the model, with a graph, before the forward pass or behind it."""

    def case(each: Together, penalised: bool) -> list[Tensor]:
        model, optimizer = made(each, device, "fp32", SGD(lr=0.01))
        for _ in range(4):
            penalty = model[1].weight.square().sum() if first and penalised else None
            loss = model(VALUES + each.rank).square().mean()
            if penalty is None and penalised:
                penalty = model[1].weight.square().sum()
            (loss if penalty is None else loss + penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = masters_of(optimizer.state_dict(masters=True))
        release(model)
        return list(masters.values())

    for one, other in (run(2, partial(case, penalised=each))[0] for each in (False, True)):
        assert all(map(torch.equal, one, other))
    plain, parts = deepcopy(MADE), 2
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(4):
        losses = [plain(VALUES + rank).square().mean() for rank in range(parts)]
        (sum(losses) + parts * plain[1].weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, value in zip(run(2, partial(case, penalised=True))[0][0], plain.parameters(), strict=True):
        torch.testing.assert_close(one, value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_loss_of_weights_alone_is_trained_by_all_ranks(device: str) -> None:
    def case(each: Together) -> list[Tensor]:
        model, optimizer = made(each, device, "fp32", SGD(lr=0.01))
        for _ in range(3):
            (model[1].weight.square().sum() * (1 + each.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = masters_of(optimizer.state_dict(masters=True))
        release(model)
        return list(masters.values())

    plain = deepcopy(MADE)
    optimizer = torch.optim.SGD([plain[1].weight], lr=0.01)
    for _ in range(3):
        (plain[1].weight.square().sum() * 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run(2, case)[0]:
        for one, value in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, value.detach(), rtol=1e-5, atol=1e-6)

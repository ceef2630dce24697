"""Train on several ranks, and evaluate in inference mode on each; every function asserts in its own process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import ps_dist
from ps_core import AdamW, Budget
from ps_core.engine import chunked, materialized, release

WIDTH, STEPS = 64, 4
BUDGETS = {
    "cpu": {"device": "cpu", "budget": "16MiB"},
    "tight": {"device": "emulated", "budget": "144KiB"},
    "roomy": {"device": "emulated", "budget": "16MiB"},
    "disk": {"device": "emulated", "budget": "144KiB"},
}


def trains_and_evaluates(each: ps_dist.TorchCollectives, where: str, moment: str, folder: str) -> None:
    """Inference mode gives what `no_grad` gives in one process, and changes nothing of the training."""
    model, optimizer = _made(each, where, folder)
    single, reference = _made(None, "cpu", "")
    for step in range(STEPS):
        parts = [_batch(step, rank) for rank in range(each.mesh.size)]
        if moment == "before":
            _evaluate(model, single, step, each.mesh.rank)
        loss = model(parts[each.mesh.rank]).float().square().mean()
        if moment == "between":
            _evaluate(model, single, step, each.mesh.rank)
        (loss / each.mesh.size).backward()
        if moment == "after":
            _evaluate(model, single, step, each.mesh.rank)
        for part in parts:
            (single(part).float().square().mean() / each.mesh.size).backward()
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
    with torch.inference_mode():
        found, wanted = model.state_dict(), single.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        with materialized(model):
            plain = copy.deepcopy(model)
        assert torch.equal(plain(_batch(9, 0)), single(_batch(9, 0)))
    states, theirs = optimizer.state_dict(masters=True)["state"], reference.state_dict(masters=True)["state"]
    assert all(torch.equal(states[index][name], row[name]) for index, row in theirs.items() for name in row)
    release(model)
    release(single)


def begins_in_inference_mode(each: ps_dist.TorchCollectives, where: str, built: str, folder: str) -> None:
    """Training begins, after `chunked` in inference mode, as in one process outside of it."""
    model, optimizer = _made(each, where, folder, torch.inference_mode, built)
    single, reference = _made(None, "cpu", "", built=built)
    for step in range(STEPS):
        parts = [_batch(step, rank) for rank in range(each.mesh.size)]
        (model(parts[each.mesh.rank]).square().mean() / each.mesh.size).backward()
        for part in parts:
            (single(part).square().mean() / each.mesh.size).backward()
        for front in (optimizer, reference):
            front.step()
            front.zero_grad()
    found, wanted = model.state_dict(), single.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    release(model)
    release(single)


def _made(
    each: ps_dist.TorchCollectives | None,
    where: str,
    folder: str,
    mode: Callable[[], Any] = nullcontext,
    built: str = "cpu",
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    with torch.device(built):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    size, device = BUDGETS[where]["budget"], BUDGETS[where]["device"]
    disk = {"host": "720KiB", "disk": "16MiB", "disk_dir": folder} if where == "disk" else {"host": "32MiB"}
    budget = Budget(host=size) if device == "cpu" else Budget(device=size, **disk)
    with mode():
        return chunked(model, AdamW(lr=1e-2), device=device, budget=budget, precision="fp32", collectives=each)


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _evaluate(model: nn.Module, single: nn.Module, step: int, rank: int) -> None:
    """Batches of the size that is trained with, larger ones, and others on each rank."""
    batch = torch.cat([_batch(100 + step, index) for index in range(1 + step % 2 + rank)])
    with torch.inference_mode():
        found = model(batch)
    with torch.no_grad():
        assert torch.equal(found, single(batch))

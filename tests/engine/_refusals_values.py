"""Refusals of parameters, tables and gradients that are not what the engine can keep; cases as in `_refusals`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from _refusals import IDS, X, case, manage_and_train, managed, refused, train
from ps_core.engine import release


@case("has max_norm=")
def norms_of_rows() -> None:
    def table(**more: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, **more), nn.Linear(4, 4))

    with refused("has max_norm="):
        managed(table(max_norm=1.0))
    manage_and_train(table(), IDS)


@case("was replaced after chunked(...) by one that nothing trains")
def replaced() -> None:
    model, _ = managed()
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with refused("was replaced after chunked(...) by one that nothing trains"):
        model(X)
    manage_and_train(release(model))
    model, optimizer = managed()
    torch.func.functional_call(model, {"0.weight": torch.ones(4, 4)}, (X,))
    train(model, optimizer)
    release(model)


@case("expected a floating-point tensor that has values")
def gradients_without_values() -> None:
    model, optimizer = managed()
    for wrong in (torch.ones(4, 4, device="meta"), torch.ones(4, 4, dtype=torch.complex64), 1.0):
        with refused("expected a floating-point tensor that has values"):
            model[0].weight.grad = wrong
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    train(model, optimizer)
    release(model)

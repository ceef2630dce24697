"""Refusals of parameters, tables and gradients that are not what the engine can keep; cases as in `_refusals`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from _refusals import IDS, X, case, manage_and_train, managed, net, refused, train
from ps_core.engine import materialized, release


@case("has max_norm=")
def norms_of_rows() -> None:
    def table(**more: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, **more), nn.Linear(4, 4))

    with refused("has max_norm="):
        managed(table(max_norm=1.0))
    manage_and_train(table(), IDS)


@case("was replaced after chunked(...) by one that nothing trains")
def replaced() -> None:
    model, optimizer = managed()
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with refused("was replaced after chunked(...) by one that nothing trains: give it to optimizer.add_param_group("):
        model(X)
    optimizer.add_param_group({"params": model[0].weight})
    train(model, optimizer)
    release(model)
    model, _ = managed(trained=False)
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with refused("was replaced after chunked(...) by one that nothing trains: release(model)"):
        model(X)
    manage_and_train(release(model))
    model, _ = managed()
    with materialized(model, write=True), torch.no_grad():
        model[0].weight.fill_(1.0)
    torch.func.functional_call(model, {"0.weight": torch.ones(4, 4)}, (X,))
    release(model)


@case("expected a dense floating-point tensor with values")
def gradients_without_values() -> None:
    model, optimizer = managed()
    for wrong in (torch.ones(4, 4, device="meta"), torch.ones(4, 4, dtype=torch.complex64), 1.0):
        with refused("expected a dense floating-point tensor with values"):
            model[0].weight.grad = wrong
    model[0].weight.grad = torch.ones(4, 4)
    optimizer.step()
    train(model, optimizer)
    release(model)


@case("but the engine keeps its own copy of this parameter, which is not trained")
def changed_in_place_and_not_trained() -> None:
    def synchronise(reference: nn.Module, policy: nn.Module) -> None:
        """As TRL's `sync_ref_model`, and averages of a teacher."""
        for kept, newer in zip(reference.parameters(), policy.parameters(), strict=True):
            kept.data.mul_(0.5).add_(newer.data, alpha=0.5)

    def frozen_in_part() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    for model in (managed(trained=False)[0], managed(frozen_in_part())[0]):
        before = model.state_dict()["0.weight"]
        with refused("but the engine keeps its own copy of this parameter, which is not trained"), torch.no_grad():
            model[0].weight.add_(1.0)
        with materialized(model, names=["0.weight"], write=True), torch.no_grad():
            model[0].weight.add_(1.0)
        assert torch.equal(model.state_dict()["0.weight"], before + 1)
        release(model)
    reference, _ = managed(trained=False)
    synchronise(reference, net())
    with refused("or do not call chunked(...) for a model that a library changes"), torch.no_grad():
        reference(X)
    plain, other = net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    synchronise(plain, other)
    assert not torch.equal(plain(X), net()(X))
    release(reference)

"""Refusals of programs that PyTorch would make of a managed model, and of models that move; cases as in `_refusals`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from _refusals import X, case, managed, net, refused, train
from ps_core.engine import materialized, release

Call = Callable[[Any], Any]
TORCHSCRIPT: list[Callable[[nn.Module], Call]] = [
    lambda model: torch.jit.trace(model, X, check_trace=False),
    torch.jit.script,
]
PROGRAMS = [*TORCHSCRIPT, lambda model: make_fx(model)(X)]


@case("would make a program of parameters")
def programs() -> None:
    model, optimizer = managed()
    train(model, optimizer)
    expected = model(X).detach()
    for program in PROGRAMS:
        for part in (torch.no_grad, torch.enable_grad):
            with refused("would make a program of parameters"), part():
                program(model)
        with torch.no_grad(), materialized(model):
            plain = copy.deepcopy(model)
            assert torch.equal(program(model)(X), expected), "also there, as long as the block lasts"
        with torch.no_grad():
            assert torch.equal(program(plain)(X), expected)
    for part in (model[0], nn.Sequential(model[0]), nn.Sequential(model)):
        for program in TORCHSCRIPT:
            with refused("would make a program of parameters"):
                program(part)
    with refused("would make a program of parameters"):
        torch.jit.trace(model.forward, X, check_trace=False)
    train(model, optimizer)
    release(model)


@case("was made by copy.copy() from one under management")
def shallow_copies() -> None:
    model, optimizer = managed(nn.Sequential(net(), nn.Identity()))
    train(model, optimizer)
    copied, model[0] = copy.copy(model[0]), nn.Sequential(*model[0])
    with refused("was made by copy.copy() from one under management"):
        copied.half()
    with materialized(model):
        plain = copy.deepcopy(model)
    assert plain.half()[0][0].weight.dtype is torch.float16
    train(model, optimizer)
    release(model)


class Own(Tensor):
    """A class that handles every function itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Recomputed(nn.Module):
    def __init__(self, *, plain: bool, recomputed: bool = True) -> None:
        super().__init__()
        self.block, self.plain, self.recomputed = nn.Linear(4, 4), plain, recomputed

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            x = x.as_subclass(Tensor)
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputed else self.block(x)


@case("meets a {}, a tensor class with functions of its own")
def recomputed_with_another_class() -> None:
    x = X.as_subclass(Own)
    model, optimizer = managed(Recomputed(plain=False))
    with refused("meets a Own, a tensor class with functions of its own"):
        train(model, optimizer, x)
    release(model)
    for model in (Recomputed(plain=True), Recomputed(plain=False, recomputed=False)):
        train(*managed(model), x)
        release(model)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


MOVES: dict[str, list[Callable[[nn.Module], Any]]] = {
    "cannot be replaced by a parameter elsewhere": [
        lambda model: model.to("meta"),
        lambda model: model[0].to("meta"),
        lambda model: model.to_empty(device="meta"),
        lambda model: model._apply(lambda each: torch.empty_like(each, device="meta")),
    ],
    "cannot be given other data": [
        lambda model: model.half(),
        lambda model: model.type(torch.float64),
        lambda model: model.to_empty(device="cpu"),
    ],
    "cannot be put in shared memory": [lambda model: model.share_memory()],
}
HARMLESS: list[Callable[[nn.Module], Any]] = [
    lambda model: model.cpu(),
    lambda model: model.to("cpu", torch.float32),
    lambda model: model.requires_grad_(True),
]


@case("this {} is under management and cannot run on fake tensors, as torch.export makes them")
def exported() -> None:
    model, optimizer = managed()
    train(model, optimizer)
    expected = model(X)
    with refused("cannot run on fake tensors"):
        torch.export.export(model, (X,))
    with materialized(model):
        plain = copy.deepcopy(model)
    assert torch.equal(torch.export.export(plain, (X,)).module()(X), expected)
    release(model)


@case("is under management and cannot be {}")
def models_moved() -> None:
    """Nothing is lost before the refusal."""
    for text, moves in MOVES.items():
        for move in moves:
            model, optimizer = managed(normed())
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            with refused(text):
                move(model)
            for harmless in HARMLESS:
                harmless(model)
            found = model.state_dict()
            assert all(torch.equal(value, found[name]) for name, value in expected.items())
            train(model, optimizer)
            move(release(model))

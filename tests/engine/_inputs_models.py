"""Cases of models, devices and passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from _followed import refused
from _inputs import backward, case, folder, goes_on, made, row, works
from _refusals import IDS, X, net, train
from ps_core import SGD, Budget, CheckpointDamaged, InvalidInput, TorchOptimizer
from ps_core.engine import (
    HostEmbedding,
    WeightAverage,
    is_managed,
    materialized,
    profiled,
    release,
    trace,
)
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._devices.cuda.device import cuda_device

row("chunked(model, ...) expects an nn.Module", lambda: made(3), works)
row("has no parameters to manage", lambda: made(nn.ReLU()), works)
row("accumulation_steps must be", lambda: made(accumulation_steps=0), lambda: works(accumulation_steps=2))
row("precision must be one of {}; found {}", lambda: made(precision="int8"), lambda: works(precision="bf16"))
row("{} must be {}, or None", lambda: made(optimizer="adamw"), works, lambda: release(made(optimizer=None)[0]))
row(
    "precision must be one of {}, found {}",
    lambda: trace(net(), X, precision="int8"),
    lambda: trace(net(), X, precision="bf16", loss=torch.sum),
)
row("expected a torch.nn.Module", lambda: is_managed(None), lambda: is_managed(net()))
row("expected a model that chunked", lambda: release(None), lambda: release(made()[0]))
row("expected a size of at least 1 byte", lambda: CpuDevice().host(0), lambda: CpuDevice().host(1))

CPU = {"device": "cpu", "budget": Budget(host="1MiB")}
row("device must be a text like", lambda: made(device=0), lambda: works(**CPU))
row("device must be 'cpu', 'emulated'", lambda: made(device="tpu"), lambda: works(**CPU), works)
row("device must be 'cuda' or like", lambda: cuda_device("cuda:x", pin=False), lambda: works(**CPU))
row(
    "Budget.device must be None for device='cpu'",
    lambda: made(device="cpu", budget=Budget(device="64KiB", host="1MiB")),
    lambda: works(**CPU),
)
row(
    "needs Budget(device=...)",
    lambda: made(budget=Budget(host="1MiB")),
    lambda: works(budget=Budget(device="64KiB", host="1MiB")),
)
row(
    "steps whole matrices, and several processes",
    lambda: made(matrix(), TorchOptimizer(torch.optim.Muon), collectives=Several()),
    lambda: works(matrix(), TorchOptimizer(torch.optim.Muon)),
)
row(
    "cannot make a file in {}: {}; expected a directory that exists and may be written to",
    lambda: made(budget=on_disk(folder() / "absent")),
    lambda: works(budget=on_disk(folder())),
)


def matrix() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False))


def on_disk(place: Any) -> Budget:
    return Budget(device="64KiB", host="1MiB", disk="1MiB", disk_dir=str(place))


class Several:
    """What is asked first of collectives."""

    local_ranks = processes = 2


class OfCard(CpuDevice):
    """A device that knows how much memory it has."""

    def memory_bytes(self) -> tuple[int, int]:
        return 2**16, 2**17


row(
    "bytes, but {} has {}, of which {} are free; None takes what is free",
    lambda: made(device=OfCard(name="emulated"), budget=Budget(device="1MiB", host="1MiB")),
    lambda: works(device=OfCard(name="emulated"), budget=Budget(host="1MiB")),
)


@case("torch finds no CUDA device here", "this computer has {} CUDA devices")
def cards() -> None:
    """Follow what is said where there is none, and where there are too few."""
    there = torch.cuda.is_available()
    said = "this computer has {} CUDA devices" if there else "torch finds no CUDA device here"
    with refused(said):
        made(device="cuda:99", budget=Budget(host="1MiB"))
    works(device="cuda:0" if there else "emulated")


@case("this {} is not under management: call chunked(model, ...) first")
def not_managed() -> None:
    with refused("is not under management: call chunked"), materialized(net()):
        pass
    with materialized(made()[0]):
        pass


@case("models that chunked(...) has under management, {}: call this for each of them")
def two_models() -> None:
    first, second = made()[0], made()[0]
    with refused("call this for each of them"), materialized(nn.ModuleList([first, second])):
        pass
    with materialized(first), materialized(second):
        assert first[0].weight.sum() == second[0].weight.sum()


@case("are ordinary ones: work with them there, or call this after the block")
def within_the_block() -> None:
    model, _ = made()
    with materialized(model):
        with refused("work with them there, or call this after the block"):
            release(model)
        assert model[0].weight.sum() == copy.deepcopy(model)[0].weight.sum()
    release(model)


@case("release(model) inside a backward pass", "inside a backward pass nothing can be {}: do it after")
def within_backward() -> None:
    model, optimizer = made()
    tried: list[str] = []

    def hook(*_: Any) -> None:
        for use in (lambda: release(model), model.state_dict, lambda: save(model, optimizer)):
            try:
                use()
            except InvalidInput as error:
                tried.append(str(error))

    value = model(X)
    value.register_hook(hook)
    value.sum().backward()
    assert "call it after backward has returned" in tried[0]
    assert "do it after backward() has returned" in tried[-1]
    optimizer.step()
    save(model, optimizer)
    release(model)


def save(model: nn.Module, optimizer: Any) -> None:
    from ps_core.engine import save_checkpoint

    save_checkpoint(folder() / "run", model, optimizer)


class Doubled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class DoubledOnHost(Doubled, HostEmbedding):
    pass


@case("which may do more than look rows up: make a class that has HostEmbedding among its bases")
def an_embedding_of_ones_own() -> None:
    with refused("make a class that has HostEmbedding among its bases"):
        HostEmbedding.from_embedding(Doubled(8, 4))
    own = DoubledOnHost(8, 4)
    expected = 2 * own.weight.detach()[IDS]
    model, optimizer = made(nn.Sequential(own), SGD(lr=0.1))
    assert torch.equal(model(IDS).detach(), expected)
    train(model, optimizer, IDS)
    release(model)


row(
    "HostEmbedding with {}={}: expected None or False",
    lambda: HostEmbedding(8, 4, max_norm=1.0),
    lambda: HostEmbedding(8, 4)(IDS),
    lambda: nn.Embedding(8, 4, max_norm=1.0)(IDS),
)


@case("inside materialized(model) parameters are copies: train after the block")
def trained_in_the_block() -> None:
    model, optimizer = made()
    backward(model)
    with materialized(model), refused("train after the block"):
        optimizer.step()
    optimizer.step()
    goes_on(model, optimizer)


@case("{} inside a block of materialized(...): call it after the block")
def used_in_the_block() -> None:
    model, _ = made()
    held = WeightAverage(model)
    said = "call it after the block; for more parameters"
    with materialized(model, names=["0.weight"]), refused(said), materialized(model, names=["1.weight"]):
        pass
    with materialized(model, names=["0.weight", "1.weight"], write=True), torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(2.0)
    assert model.state_dict()["1.weight"].eq(2).all()
    held.update()
    release(model)


@case("failed half way, so that parameters are a mixture of old and new: load a sound one")
def half_loaded() -> None:
    from ps_core.engine import load_checkpoint, save_checkpoint

    model, optimizer = made()
    whole, cut = folder() / "whole", folder() / "cut"
    for path in (whole, cut):
        save_checkpoint(path, model, optimizer)
    file = next(cut.glob("masters*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged):
        load_checkpoint(cut, model, optimizer)
    with refused("load a sound one"):
        model(X)
    load_checkpoint(whole, model, optimizer)
    goes_on(model, optimizer)


@case("this model was released: call chunked(...) again, and use the optimizer it returns")
def released() -> None:
    model, optimizer = made()
    release(model)
    with refused("call chunked(...) again, and use the optimizer it returns"):
        optimizer.step()
    works(model)


@case(
    "inside applied() the model has averages for weights: {} after the block",
    "inside applied() the model has averages for weights: do this after the block",
    "there is no average yet: call update() after each optimizer step",
)
def averages() -> None:
    model, optimizer = made()
    average = WeightAverage(model, decay=0.5)
    with refused("there is no average yet: call update()"), average.applied():
        pass
    train(model, optimizer)
    average.update()
    with average.applied():
        with refused("do this after the block"):
            average.update()
        backward(model)
        with refused("step after the block"):
            optimizer.step()
        optimizer.zero_grad()
    average.update()
    goes_on(model, optimizer)


def averaged(decay: float = 0.5, model: nn.Module | None = None) -> dict[str, Any]:
    model, _ = made(model)
    average = WeightAverage(model, decay=decay)
    average.update()
    return average.state_dict()


row(
    "has no trained parameters to average: call chunked(model, AdamW(...))",
    lambda: WeightAverage(made(optimizer=None)[0]),
    lambda: averaged(0.999),
)
row(
    "decay must be between 0 and 1",
    lambda: averaged(2),
    lambda: averaged(0.5),
)


@case("the averages are of other parameters than this {}'s", "the average of {} has shape {}")
def averages_of_another() -> None:
    model = made(nn.Sequential(nn.Linear(4, 4)))[0]
    average = WeightAverage(model)
    with refused("the averages are of other parameters"):
        average.load_state_dict(averaged())
    with refused("the average of {} has shape"):
        average.load_state_dict(averaged(model=nn.Sequential(nn.Linear(3, 4))))
    average.load_state_dict(averaged(model=nn.Sequential(nn.Linear(4, 4))))
    assert average.updates == 1
    release(model)


@case("state_dict(keep_vars=True) asks for the parameters themselves")
def kept_variables() -> None:
    model, _ = made()
    with refused("leave keep_vars out, or use materialized(model)"):
        model.state_dict(keep_vars=True)
    model.state_dict()
    with materialized(model):
        assert all(isinstance(each, nn.Parameter) for each in model.state_dict(keep_vars=True).values())


@case("load_state_dict(assign=True) would exchange parameters")
def assigned() -> None:
    model, _ = made()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with refused("leave assign out"):
        model.load_state_dict(state, assign=True)
    model.load_state_dict(state)
    assert not model.state_dict()["0.weight"].any()


@case("now has shape {}, expected {}: to change shapes, release(model) first")
def another_shape() -> None:
    model, _ = made()
    for write in (True, False):
        with refused("to change shapes, release(model) first"), materialized(model, write=write):
            model[1].weight.data = torch.ones(2, 4)
    release(model)
    model[1] = nn.Linear(4, 2)
    works(model)


def named(model: nn.Module, name: str) -> None:
    with materialized(model, names=[name]):
        pass


row(
    "no managed parameter is called {}; names are as in model.named_parameters()",
    lambda: named(made()[0], "weight"),
    lambda: [named(model, name) for model in (made()[0],) for name, _ in model.named_parameters()],
)


def profile(model: nn.Module, optimizer: Any, step: int | None = None) -> None:
    with profiled(model) as found:
        train(model, optimizer)
    found.svg(str(folder() / "steps.svg"), step or 0)


@case("profile: {}; train within the block", "profile: expected a step from 0 to {}")
def profiles() -> None:
    model, optimizer = made()
    with profiled(model) as found:
        pass
    with refused("train within the block, and read the profile behind it"):
        found.summary()
    with refused("profile: expected a step from 0 to 0, found 3"):
        profile(model, optimizer, 3)
    profile(model, optimizer)


@case("profiled(model): the model is being profiled already; leave the inner block out")
def profiled_twice() -> None:
    model, optimizer = made()
    with profiled(model):
        with refused("leave the inner block out"), profiled(model):
            pass
        train(model, optimizer)


@case(
    "that gradient was stepped, forgotten or replaced; read parameter.grad again, or keep a clone() of it beforehand",
    "{} on the gradient of {}: {}",
)
def an_old_gradient() -> None:
    model, optimizer = made()
    backward(model)
    old = model[0].weight.grad
    kept = old.clone()
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    with refused("an operation on the gradient of {}: that gradient was stepped, forgotten or replaced"):
        old.norm()
    assert kept.norm() > 0
    assert model[0].weight.grad.norm() > 0


@case("this is a view of the gradient; assign to parameter.grad", "found a {}; allowed is a tensor")
def the_data_of_a_views_gradient() -> None:
    model, optimizer = made()
    weight = next(model.parameters())
    backward(model)
    halved = weight.grad.clone() / 2
    with refused("an assignment to .data on the gradient of {}: this is a view of the gradient"):
        weight.grad.detach().data = halved
    with refused("an assignment to .data on the gradient of {}: found a NoneType; allowed is a tensor"):
        weight.grad.data = None
    weight.grad.data = halved
    assert torch.equal(weight.grad.clone(), halved)
    goes_on(model, optimizer)


@case("a value of optimizer.state was given other memory ({}); allowed is a tensor of shape {}")
def other_memory_for_a_state() -> None:
    model, optimizer = made()
    train(model, optimizer)
    weight = next(model.parameters())
    state = optimizer.state[weight]["exp_avg"]
    with refused("allowed is a tensor of shape"):
        state.set_(torch.zeros(1))
    state.set_(torch.ones(state.shape))
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.ones(state.shape))
    goes_on(model, optimizer)


@case("the tensor given to {} by parameter.grad = ... was changed in place, after the gradient was changed")
def an_assigned_tensor_and_its_gradient_change() -> None:
    model, optimizer = made()
    weight = next(model.parameters())
    weight.grad = given = torch.ones_like(weight, device="cpu")
    backward(model)
    given.mul_(2)
    with refused("change parameter.grad itself, or assign the tensor again after its change"):
        optimizer.step()
    weight.grad = given
    weight.grad.mul_(2)
    goes_on(model, optimizer)


@case("the gradient is in a chunk, and has no memory of its own: .clone() it first")
def a_gradients_memory() -> None:
    model, _ = made()
    backward(model)
    with refused(".clone() it first"):
        model[0].weight.grad.data_ptr()
    assert model[0].weight.grad.clone().data_ptr()


@case("torch.amp.GradScaler the engine divides by its own loss scale")
def torchs_scaler() -> None:
    model, optimizer = made()
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(model(X).sum()).backward()
    with refused("torch.amp.GradScaler on the gradient of {}: the engine divides by its own loss scale"):
        theirs.step(optimizer)
    optimizer.zero_grad()
    train(model, optimizer)
    release(model)
    model, optimizer = made(precision="fp16")
    ours = optimizer.scaler
    ours.scale(model(X).sum()).backward()
    ours.step(optimizer)
    ours.update()
    optimizer.zero_grad()
    release(model)

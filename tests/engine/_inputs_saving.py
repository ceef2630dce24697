"""Cases of files and of states that are saved and loaded."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _followed import refused
from _inputs import ADAMW, backward, case, folder, goes_on, made, row, works
from _refusals import X, net, train
from ps_core import SGD, AdamW, Group, TorchOptimizer
from ps_core.engine import export_checkpoint, load_checkpoint, load_weights, release, save_checkpoint
from ps_core.engine._checkpoint.atomic_folder import AtomicFolder


def save(path: Any, **more: Any) -> None:
    save_checkpoint(path, *made(), **more)


row("cannot be a checkpoint: name a folder below it", lambda: save("/"), lambda: save(folder() / "run"))
row(
    "extra must be a dictionary, or None; found a {}",
    lambda: save(folder() / "run", extra=[1]),
    lambda: save(folder() / "run", extra={"1": 1}),
)


@case("is being saved to by another process: wait for it")
def two_at_once() -> None:
    path = folder() / "run"
    first = AtomicFolder(path)
    with first.replaced(overwrite=False):
        with refused("is being saved to by another process: wait for it"):
            save(path)
        (first._partial / "manifest.json").write_text("{}", "utf-8")
    assert path.is_dir()
    save(folder() / "run")


@case("{} exists already: choose another path, or give overwrite=True")
def a_checkpoint_there() -> None:
    path = folder() / "run"
    save(path)
    with refused("exists already: choose another path"):
        save(path)
    save(path.with_name("other"))
    save(path, overwrite=True)


@case("{} exists and is not a checkpoint, so it is not overwritten: choose another")
def something_else_there() -> None:
    path = folder()
    for overwrite in (False, True):  # overwrite=True is no way out, so neither is it named as one
        with refused("is not a checkpoint, so it is not overwritten: choose another"):
            save(path, overwrite=overwrite)
    save(path / "run", overwrite=True)


@case("{} holds a checkpoint and what is none of it")
def more_there() -> None:
    path = folder() / "run"
    save(path)
    (path / "notes").write_text("mine", "utf-8")
    with refused("move that away, or choose another path"):
        save(path, overwrite=True)
    save(path.with_name("other"), overwrite=True)
    (path / "notes").rename(path.with_name("notes"))
    save(path, overwrite=True)


def with_buffer(value: torch.Tensor) -> nn.Module:
    model = net()
    model.register_buffer("kept", value)
    return model


row(
    "which a checkpoint cannot hold: make it dense",
    lambda: save_checkpoint(folder() / "run", *made(with_buffer(torch.eye(4).to_sparse()))),
    lambda: save_checkpoint(folder() / "run", *made(with_buffer(torch.eye(4)))),
)
row(
    "which a checkpoint cannot hold: expected a dense one with memory: try .to_dense()",
    lambda: save(folder() / "run", extra={"mask": torch.eye(4).to_sparse()}),
    lambda: save(folder() / "run", extra={"mask": torch.eye(4).to_sparse().to_dense()}),
)
row(
    "is a {}, which a checkpoint cannot hold without pickle",
    lambda: save(folder() / "run", extra={"layer": net(), "rows": [1]}),
    lambda: save(folder() / "run", extra={"layer": net().state_dict()}),
)
row(
    "which a checkpoint cannot hold without pickle: expected None, bool, int",
    lambda: save(folder() / "run", extra={"rows": torch.ones(3).numpy()}),
    lambda: save(folder() / "run", extra={"rows": torch.ones(3).numpy().tolist()}),
)
row(
    "which the safetensors format does not have: convert it to one of",
    lambda: save_checkpoint(folder() / "run", *made(with_buffer(torch.ones(2, dtype=torch.complex128)))),
    lambda: save_checkpoint(folder() / "run", *made(with_buffer(torch.ones(2, dtype=torch.complex64)))),
)


@case("is of torch.save, expected safetensors")
def pickled() -> None:
    import safetensors.torch

    path = folder() / "model.pt"
    torch.save(net().state_dict(), path)
    other = path.with_name("model.safetensors")  # a name for which torch.load does not read pickles
    for each in (path, other):
        torch.save(net().state_dict(), path)
        if each is other:
            path.rename(other)
        with refused("pickled weights are not read; save them anew"):
            load_weights(made()[0], each)
        with each.open("rb") as file:
            safetensors.torch.save_file(torch.load(file, weights_only=True), other)
        load_weights(made()[0], other)


@case("expected a safetensors file, or a folder with")
def a_folder_without_weights() -> None:
    import safetensors.torch

    path = folder()
    torch.save(net().state_dict(), path / "model.bin")
    with refused("safetensors files found: none. Name one of them"):
        load_weights(made()[0], path)
    for name in ("one.safetensors", "two.safetensors"):
        safetensors.torch.save_file(net().state_dict(), path / name)
    with refused("found: one.safetensors, two.safetensors. Name one of them"):
        load_weights(made()[0], path)
    load_weights(made()[0], path / "two.safetensors")


row(
    "cannot be the path of a checkpoint or a file of weights: {}",
    lambda: save(folder() / ("a" * 300)),
    lambda: save(folder() / ("a" * 200)),
)


@case("which would be lost: name another file")
def exported_over_itself() -> None:
    run = saved()
    with refused("which would be lost: name another file"):
        export_checkpoint(run, run / "masters.safetensors", overwrite=True)
    export_checkpoint(run, run.with_name("model.safetensors"))
    load_checkpoint(run, *made())


@case("{} is a device, a pipe or a socket, which a file would replace: name another file")
def a_pipe_there() -> None:
    run, place = folder() / "run", folder()
    save(run)
    os.mkfifo(place / "pipe")
    with refused("is a device, a pipe or a socket"):
        export_checkpoint(run, place / "pipe", overwrite=True)
    export_checkpoint(run, place / "other")


@case("{} is a folder: name a file, as in {}", "{} exists already: choose another name, or give overwrite=True")
def exported() -> None:
    run, place = folder() / "run", folder()
    save(run)
    with refused("is a folder: name a file, as in"):
        export_checkpoint(run, place)
    export_checkpoint(run, place / "model.safetensors")
    with refused("exists already: choose another name"):
        export_checkpoint(run, place / "model.safetensors")
    export_checkpoint(run, place / "other.safetensors")
    export_checkpoint(run, place / "model.safetensors", overwrite=True)
    load_weights(made()[0], place / "model.safetensors")


row(
    "there is no checkpoint at {}: expected a folder that save_checkpoint wrote",
    lambda: load_checkpoint(folder() / "absent", *made()),
    lambda: load_checkpoint(saved(), *made()),
)


def saved() -> Any:
    save(path := folder() / "run")
    return path


@case("only this {} is left of the model that chunked(...) was given: keep it")
def a_part_is_left() -> None:
    model, optimizer = made()
    part = model[0]
    del model
    gc.collect()
    with refused("is left of the model that chunked(...) was given: keep it"):
        save_checkpoint(folder() / "run", part, optimizer)
    model, optimizer = made()
    part = model[0]
    save_checkpoint(folder() / "run", part, optimizer)
    release(model)


@case("expected the optimizer that chunked(...) returned with this model", "this optimizer is another model's")
def another_optimizer() -> None:
    (model, optimizer), (_, other) = made(), made()
    with refused("expected the optimizer that chunked(...) returned with this model, found a SGD"):
        save_checkpoint(folder() / "run", model, torch.optim.SGD(net().parameters()))
    with refused("this optimizer is another model's: pass the one"):
        save_checkpoint(folder() / "run", model, other)
    save_checkpoint(folder() / "run", model, optimizer)


@case("wait for a step, and cannot be {}: call optimizer.step() first, or optimizer.zero_grad()")
def gradients_wait() -> None:
    model, optimizer = made()
    for end in (optimizer.step, optimizer.zero_grad):
        backward(model)
        with refused("wait for a step, and cannot be saved"):
            save_checkpoint(folder() / "run", model, optimizer)
        end()
        optimizer.zero_grad()
        save_checkpoint(folder() / "run", model, optimizer)


# States of optimizers.


def state_of(model: nn.Module | None = None, optimizer: Any = ADAMW) -> dict[str, Any]:
    model, made_optimizer = made(model, optimizer)
    train(model, made_optimizer)
    return made_optimizer.state_dict()


def half_frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


@case("there is a state for {}, which is frozen")
def a_state_of_a_frozen_parameter() -> None:
    state = state_of()
    model, optimizer = made(half_frozen())
    with refused("there is a state for '0.weight', which is frozen"):
        optimizer.load_state_dict(state)
    model.requires_grad_(True)
    model(X)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], state["state"][0]["exp_avg"])
    goes_on(model, optimizer)
    model, optimizer = made(net())
    optimizer.load_state_dict(state)
    goes_on(model, optimizer)


@case("is frozen and has no state")
def set_for_a_frozen_parameter() -> None:
    model, optimizer = made(half_frozen())
    with refused("is frozen and has no state"):
        optimizer.state[model[0].weight]["exp_avg"] = torch.ones(4, 4)
    model.requires_grad_(True)
    model(X)
    optimizer.state[model[0].weight]["exp_avg"] = torch.ones(4, 4)
    goes_on(model, optimizer)


@case("optimizer.state has no place for {}")
def a_state_of_ones_own() -> None:
    model, optimizer = made()
    with refused("has no place for 'noise' of '0.weight', only for"):
        optimizer.state[model[0].weight]["noise"] = torch.ones(4, 4)
    own = {model[0].weight: {"noise": torch.ones(4, 4)}}
    assert own[model[0].weight]["noise"].sum() == 16
    for key in ("exp_avg", "exp_avg_sq", "master"):
        optimizer.state[model[0].weight][key] = torch.ones(4, 4)
    goes_on(model, optimizer)


@case("has no state before its first step, so {} cannot be set alone")
def a_state_before_the_first_step() -> None:
    model, optimizer = made(optimizer=TorchOptimizer(torch.optim.RMSprop, lr=0.1))
    weight = model[0].weight
    with refused("assign all of ['step', 'square_avg'], as in optimizer.state[p]"):
        optimizer.state[weight]["square_avg"] = torch.ones(4, 4)
    optimizer.state[weight] = {"step": 1, "square_avg": torch.ones(4, 4)}
    assert optimizer.state[weight]["square_avg"].eq(1).all()
    goes_on(model, optimizer)


def set_state(key: str, value: Any) -> None:
    model, optimizer = made()
    train(model, optimizer)
    optimizer.state[model[0].weight][key] = value
    goes_on(model, optimizer)


row(
    "must be a tensor of shape",
    lambda: set_state("exp_avg", torch.ones(2)),
    lambda: set_state("exp_avg", torch.ones(4, 4)),
)
row("step of {} must be a whole number", lambda: set_state("step", 1.5), lambda: set_state("step", 3))


@case("{} of {} must be one number")
def a_single_value() -> None:
    model, optimizer = made(optimizer=TorchOptimizer(torch.optim.NAdam, lr=0.1))
    train(model, optimizer)
    with refused("mu_product of '0.weight' must be one number, found 'x'"):
        optimizer.state[model[0].weight]["mu_product"] = "x"
    optimizer.state[model[0].weight]["mu_product"] = torch.tensor(0.5)
    goes_on(model, optimizer)


@case("cannot be deleted alone: del optimizer.state[p]")
def deleted() -> None:
    model, optimizer = made()
    train(model, optimizer)
    with refused("'exp_avg' of '0.weight' cannot be deleted alone"):
        del optimizer.state[model[0].weight]["exp_avg"]
    del optimizer.state[model[0].weight]
    goes_on(model, optimizer)


def loaded(state: dict[str, Any], **more: Any) -> None:
    model, optimizer = made(**more)
    optimizer.load_state_dict(state)
    goes_on(model, optimizer)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = state_of()
    change(state)
    return state


BIASES = AdamW(groups=(Group(match=lambda name, _: name.endswith("bias"), lr=0.2),))
row(
    "this state has groups of {} parameters, the optimizer has groups of {}",
    lambda: loaded(state_of(), optimizer=BIASES),
    lambda: loaded(state_of(optimizer=BIASES), optimizer=BIASES),
)
row(
    "the state's param_groups[{}] has no {}: is it {}'s?",
    lambda: loaded(state_of(optimizer=SGD(lr=0.1))),
    lambda: loaded(state_of(optimizer=SGD(lr=0.1)), optimizer=SGD(lr=0.1)),
)
row(
    "the state of {} has no {}, found {}: is it {}'s?",
    lambda: loaded(changed(lambda state: state["state"][0].pop("exp_avg"))),
    lambda: loaded(state_of()),
)


def scale_loaded(**changes: Any) -> None:
    model, optimizer = made(precision="fp16")
    state = {**optimizer.scaler.state_dict(), **changes}
    optimizer.scaler.load_state_dict({key: value for key, value in state.items() if value is not None})
    release(model)


row("a loss scale's state needs {}", lambda: scale_loaded(scale=None), lambda: scale_loaded(scale=8.0))
row(
    "must be a whole number from {} on",
    lambda: scale_loaded(growth_interval=0.5),
    lambda: scale_loaded(growth_interval=5),
)
row("must be a positive number within fp32", lambda: scale_loaded(scale=-1), lambda: scale_loaded(scale=2))


@case("a loss scale's state must be a mapping")
def no_mapping() -> None:
    model, optimizer = made(precision="fp16")
    with refused("must be a mapping, found 3"):
        optimizer.scaler.load_state_dict(3)
    optimizer.scaler.load_state_dict(optimizer.scaler.state_dict())
    works(release(model))


@case("this is no optimizer's state dict, which has 'state', a dict, and 'param_groups'")
def no_state_dict() -> None:
    model, optimizer = made()
    backward(model)
    optimizer.step()
    with refused("pass what optimizer.state_dict() returned"):
        optimizer.load_state_dict({"state": optimizer.state_dict()["state"]})
    optimizer.load_state_dict(optimizer.state_dict())
    goes_on(model, optimizer)


@case("which is in no param group: it would be lost")
def states_by_name() -> None:
    model, optimizer = made()
    backward(model)
    optimizer.step()
    state = optimizer.state_dict()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    with refused("which is in no param group: it would be lost"):
        optimizer.load_state_dict({**state, "state": {names[index]: each for index, each in state["state"].items()}})
    optimizer.load_state_dict(state)
    goes_on(model, optimizer)

"""What people write by mistake: a line that says what is wrong and what to do, where it was written; nothing silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_core import SGD, Adam, AdamW, AlreadyManaged, Budget, Group, InvalidInput, TorchOptimizer, UnsupportedParameter
from ps_core.engine import chunked, is_managed, load_checkpoint, load_weights, release, save_checkpoint, statistics

DEVICES = ("cpu", "emulated")
NO_TRAINING = (
    r"'0.weight' is under management without an optimizer.*chunked\(model, AdamW\(...\)\).*requires_grad_\(False\)"
)


def two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def budget_for(device: str) -> Budget:
    return Budget(host="1MiB", device="64KiB" if device == "emulated" else None)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).float().sum().backward()


def own_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            raise AssertionError("there is none")


USES: list[Callable[[nn.Module, torch.optim.Optimizer], object]] = [
    lambda model, optimizer: optimizer.step(),
    lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    own_loop,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("use", USES)
def test_an_optimizer_of_pytorch_on_a_model_that_is_not_trained(
    use: Callable[[nn.Module, torch.optim.Optimizer], object], before: bool, device: str
) -> None:
    """Whenever it was made: it would find no gradients, and train nothing."""
    model = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if before else None
    chunked(model, None, device=device, budget=budget_for(device))
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    use(model, optimizer)  # nothing was lost so far
    backward(model)
    for _ in range(2):
        with pytest.raises(UnsupportedParameter, match=NO_TRAINING):
            use(model, optimizer)
    release(model)


@pytest.mark.parametrize("forget", ["model", "optimizer", "own"])
def test_forgetting_gradients_of_a_model_that_is_not_trained(forget: str) -> None:
    """As loops do that send gradients through one model into another."""
    model, _ = chunked(two(), None, budget=budget_for("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    if forget == "own":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        (model if forget == "model" else optimizer).zero_grad()
    assert model[0].weight.grad is None
    optimizer.step()
    release(model)


def test_gradients_through_a_model_that_is_not_trained() -> None:
    model, _ = chunked(two(), None, budget=budget_for("cpu"))
    x = torch.ones(2, 4, requires_grad=True)
    model(x).float().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    release(model)


def test_frozen_parameters_have_no_gradients_to_lose() -> None:
    model, _ = chunked(two().requires_grad_(False), None, budget=budget_for("cpu"))
    backward_input = torch.ones(2, 4, requires_grad=True)
    model(backward_input).float().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    release(model)


def test_parameters_that_are_unfrozen_where_nothing_is_trained() -> None:
    model = two()
    model[0].requires_grad_(False)
    chunked(model, None, budget=budget_for("cpu"))
    model.requires_grad_(True)
    with pytest.raises(UnsupportedParameter, match=r"'0.weight' was frozen when chunked"):
        backward(model)
    release(model)


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_of_pytorch_beside_ours(device: str) -> None:
    model = two()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    chunked(model, AdamW(), device=device, budget=budget_for(device))
    backward(model)
    with pytest.raises(UnsupportedParameter, match=r"step the one that chunked\(model, AdamW\(...\)\) returns"):
        other.step()
    release(model)


def test_a_wrong_number_in_one_group_steps_none() -> None:
    groups = (Group(match=lambda name, _: name.startswith("1"), lr=0.1),)
    model, optimizer = chunked(two(), SGD(lr=0.1, groups=groups), budget=budget_for("cpu"))
    assert optimizer is not None
    before = model.state_dict()
    optimizer.param_groups[1]["lr"] = -0.1
    backward(model)
    with pytest.raises(InvalidInput, match=r"lr must be a finite number of at least 0 .*found -0\.1"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    release(model)


def test_an_optimizer_of_a_released_model_says_so() -> None:
    """Although there is no gradient: those that backward makes now are the parameters' own."""
    model, optimizer = chunked(two(), AdamW(), budget=budget_for("cpu"))
    assert optimizer is not None
    optimizer.step()  # nothing to do
    release(model)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(InvalidInput, match="this model was released: call chunked"):
        optimizer.step()


@pytest.mark.parametrize(("mine", "theirs", "absent"), [(AdamW(), "SGD", "betas"), (SGD(), "AdamW", "momentum")])
def test_the_state_of_another_optimizer(mine: AdamW | SGD, theirs: str, absent: str) -> None:
    """Which has no moments yet, so that nothing but its numbers tells."""
    state = getattr(torch.optim, theirs)(two().parameters(), lr=0.5).state_dict()
    model, optimizer = chunked(two(), mine, budget=budget_for("cpu"))
    assert optimizer is not None
    with pytest.raises(InvalidInput, match=rf"param_groups\[0\] has no '{absent}': is it {type(mine).__name__}'s"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == mine.lr
    release(model)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda path: release(None), "None"),
        (lambda path: statistics(two), "a function"),
        (lambda path: load_checkpoint(two(), path, None), "a PosixPath"),
        (lambda path: save_checkpoint(two(), None, str(path)), "None"),
    ],
)
def test_something_else_in_a_models_place(call: Callable[[Path], object], found: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"expected a model .* found {found}"):
        call(tmp_path)


@pytest.mark.parametrize("new", [True, False])
def test_pickled_weights_are_called_so(new: bool, tmp_path: Path) -> None:
    """Not damaged."""
    model, _ = chunked(two(), None, budget=budget_for("cpu"))
    torch.save(two().state_dict(), tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(InvalidInput, match=r"model\.pt is of torch\.save, expected safetensors"):
        load_weights(model, tmp_path / "model.pt")
    release(model)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_from_before_are_forgotten_aloud(device: str) -> None:
    """A plain loop that steps before it calls ``zero_grad`` would use them."""
    model = two()
    backward(model)
    with pytest.warns(UserWarning, match=r"'0\.weight' and 3 others have gradients from before chunked.*forgotten"):
        model, optimizer = chunked(model, SGD(lr=0.1), device=device, budget=budget_for(device))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    release(model)
    model = two()
    backward(model)
    release(chunked(model, None, device=device, budget=budget_for(device))[0])  # nothing would be stepped


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_whose_parameters_were_all_replaced_can_be_released(device: str) -> None:
    model, _ = chunked(two(), SGD(lr=0.1), device=device, budget=budget_for(device), precision="fp32")
    with pytest.raises(UnsupportedParameter, match=r"cannot be replaced by a parameter elsewhere"):
        model.to("meta")
    for layer in model:
        layer.weight, layer.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    assert is_managed(model)
    with pytest.raises(AlreadyManaged, match=r"all its parameters were replaced since: release\(model\) first"):
        chunked(model, SGD(lr=0.1), precision="fp32")
    with pytest.raises(UnsupportedParameter, match=r"was replaced after chunked.*release\(model\)"):
        backward(model)
    release(model)
    assert not is_managed(model)
    backward(model)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(AdamW, {"lr": 0.01, "amsgrad": True}), (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True})],
)
def test_a_setting_that_only_pytorch_has_names_the_optimizer_that_has_it(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        kind(**settings)
    spec = torch_optimizer_named_by(caught.value)
    assert spec.kind is getattr(torch.optim, kind.__name__)
    assert spec.settings == {name: value for name, value in settings.items() if name != "foreach"}
    trains(*chunked(nn.Linear(4, 4), spec, precision="fp32"))


def torch_optimizer_named_by(error: Exception) -> TorchOptimizer:
    told = str(error).partition("PyTorch's own code has it: ")[2]
    spec = eval(told, {"TorchOptimizer": TorchOptimizer, "torch": torch})
    assert isinstance(spec, TorchOptimizer)
    return spec


def trains(model: nn.Module, optimizer: Any) -> None:
    before = model.state_dict()["weight"].clone()
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["weight"], before)
    release(model)


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.5), {"nesterov": True}),
        (SGD(lr=0.1, momentum=0.9), {"dampening": 0.5, "maximize": True, "foreach": True}),
        (AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6), {"amsgrad": True, "maximize": True}),
        (AdamW(lr=0.1), {"decoupled_weight_decay": False}),
        (Adam(lr=0.1), {"decoupled_weight_decay": True, "weight_decay": 0.5}),
    ],
)
def test_a_setting_that_only_pytorch_has_may_be_set_later_too(spec: Any, changes: dict[str, Any]) -> None:
    """In param groups; the optimizer that is named has all the settings of the group."""
    model, optimizer = chunked(nn.Linear(4, 4), spec, precision="fp32")
    optimizer.param_groups[0].update(changes)
    with pytest.raises(InvalidInput) as caught:
        trains(model, optimizer)
    group = dict(optimizer.param_groups[0])
    other = torch_optimizer_named_by(caught.value)
    assert all(group[name] == value for name, value in other.settings.items())
    assert other.settings.keys() >= changes.keys() - {"foreach"}
    trains(*chunked(release(model), other, precision="fp32"))

"""Conversions of a managed model that are refused change no buffer; permitted ones do what they did before."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import SGD, Budget, InvalidInput, UnsupportedParameter
from ps_core.engine import chunked, materialized, release, statistics

X = torch.arange(8.0).view(2, 4)
DEVICES = ("cpu", "emulated")


class Offset(nn.Module):
    """A module with buffers only."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.full((4,), 0.5))
        self.register_buffer("count", torch.tensor(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset.to(x.dtype)


class Scaled(nn.Module):
    """A module with a parameter and a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale.to(x.dtype)


class Block(nn.Module):
    """Buffers before, in and after the modules that have parameters, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.scaled, self.last = Offset(), nn.Linear(4, 4), Scaled(), Offset()
        self.register_buffer("own", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.scaled(self.linear(self.first(x)))) * self.own.to(x.dtype)
        assert isinstance(x, Tensor)
        return x


def managed(device: str, precision: str = "fp32", model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    budget = Budget(host="1MiB") if device == "cpu" else Budget(device="64KiB", host="1MiB")
    model = nn.Sequential(Offset(), Block(), Block()) if model is None else model
    return chunked(model, SGD(lr=0.1), device=device, budget=budget, precision=precision)


def train(model: nn.Module, optimizer: Any) -> None:
    model(X).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def refused_without_change(model: nn.Module, error: type[Exception] = UnsupportedParameter) -> Iterator[None]:
    """Expect a refusal; all buffers are then the same objects, with the same values."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with pytest.raises(error):
        yield
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0], name
        assert buffer.is_meta or torch.equal(buffer, before[name][1]), name


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "meta": lambda model: model.to("meta"),
    "half": lambda model: model.half(),
    "float64": lambda model: model.to(torch.float64),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
    "_apply": lambda model: model._apply(lambda each: each.clone()),
}
PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the model": lambda model: model,
    "a part": lambda model: model[1],  # type: ignore[index]
    "around": lambda model: nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"inner": model})),
    "around a part": lambda model: nn.Sequential(model[2], nn.Linear(4, 4)),  # type: ignore[index]
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_refused_conversion_changes_no_buffer(conversion: str, part: str, device: str) -> None:
    model, optimizer = managed(device)
    train(model, optimizer)
    with refused_without_change(model):
        CONVERSIONS[conversion](PARTS[part](model))
    train(model, optimizer)
    CONVERSIONS[conversion](release(model))
    assert not any("_apply" in vars(module) for module in model.modules())


@pytest.mark.parametrize("switch", ["swap_module_params", "overwrite_module_params"])
def test_also_where_torch_exchanges_parameters(switch: str) -> None:
    model, _ = managed("emulated")
    choose = getattr(torch.__future__, f"set_{switch}_on_conversion")
    choose(True)
    try:
        with refused_without_change(model, RuntimeError if switch.startswith("swap") else UnsupportedParameter):
            model.cpu()
    finally:
        choose(False)
    release(model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_permitted_conversions_do_what_they_did(precision: str, device: str) -> None:
    """Also while there are gradients: buffers are converted, each tensor once."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model, optimizer = managed(device, precision)
    train(model, optimizer)
    model(X).float().square().mean().backward()
    expected = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    assert model.to(dtype) is model
    assert model.cpu() is model
    assert {buffer.dtype for buffer in model.buffers()} == {dtype, torch.int64}
    assert all(torch.equal(each.grad.float(), expected[name]) for name, each in model.named_parameters())
    asked: list[Tensor] = []
    with torch.no_grad():
        model[1]._apply(lambda each: (asked.append(each), each)[1])
    for tensor in (*model[1].parameters(), *model[1].buffers()):
        assert sum(each is tensor for each in asked) == 1
    model[1].first.to(torch.float64), model[0].half()
    assert model[1].first.offset.dtype is torch.float64, "no parameters there: permitted"
    optimizer.step(), optimizer.zero_grad()
    release(model)


def test_not_recursive() -> None:
    model, _ = managed("emulated")
    model[1].to_empty(device="meta", recurse=False)
    assert model[1].own.is_meta, "its parameters are its children's"
    assert not model[1].first.offset.is_meta
    with refused_without_change(model):
        model[1].scaled.to_empty(device="meta", recurse=False)
    release(model)


def test_functions_are_told_by_their_names() -> None:
    """Metrics of torchmetrics look which conversion it is."""
    found: list[str] = []

    class Metric(nn.Module):
        def _apply(self, fn: Any, *args: Any) -> Any:
            found.append(str(fn))
            return super()._apply(fn, *args)

    torch.manual_seed(0)
    model, _ = managed("emulated", model=nn.Sequential(nn.Linear(4, 4), Metric()))
    model.float()
    assert "Module.float" in found[0]
    release(model)


class Keeps(nn.Linear):
    """A module that no conversion reaches."""

    def _apply(self, fn: Any, *args: Any) -> Any:
        return self


def test_modules_that_refuse_to_be_converted_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, _ = managed("emulated", model=nn.Sequential(Offset(), Keeps(4, 4)))
    assert model.to(torch.float64)[0].offset.dtype is torch.float64
    assert model[1].weight.dtype is torch.float32
    model.append(nn.LSTM(4, 4)).float()
    model(X)
    with refused_without_change(model):
        model.half()
    assert model(X)[0].shape == X.shape, "its weights are still those of the LSTM"
    release(model)


def test_moved_wrapped_and_removed_parts() -> None:
    model, optimizer = managed("emulated")
    model[1] = nn.Sequential(Offset(), model[1])
    removed = model[2]
    del model[2]
    train(model, optimizer)
    for part in (model, model[1], model[1][1], removed):
        with refused_without_change(part):
            part.half()
    release(model)
    for part in (model, removed):
        assert not any("_apply" in vars(module) for module in part.modules())


def test_added_parts() -> None:
    model, optimizer = managed("emulated")
    model[1].append = nn.Sequential(Offset(), nn.Linear(4, 4))
    train(model, optimizer)
    with refused_without_change(model):
        model[1].append.half()
    release(model)


@pytest.mark.parametrize("device", DEVICES)
def test_copies_in_materialized_are_plain(device: str) -> None:
    model, optimizer = managed(device)
    train(model, optimizer)
    with materialized(model):
        plain = copy.deepcopy(model)
    assert not any("_apply" in vars(module) for module in plain.modules())
    assert plain.half() is plain
    with materialized(model, names=["1.linear.weight"]), refused_without_change(model, InvalidInput):
        model.half()
    with refused_without_change(model):
        model.half()
    with pytest.raises(UnsupportedParameter):
        copy.deepcopy(model)
    release(model)


class Converts(nn.Module):
    """A model that converts its parts in its forward, as into the type of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        result = self.block.to(x.dtype)(x).square().mean()
        assert isinstance(result, Tensor)
        return result


def test_conversions_within_forward_follow_a_plan() -> None:
    """PyTorch cannot convert fake parameters, so that the first pass is not foreseen; the model stays as it is."""
    model, optimizer = managed("emulated", model=Converts())
    for planned in range(3):
        train(model, optimizer)
        assert statistics(model).planned_passes == planned
    assert type(model.block.own) is Tensor
    release(model)


def test_a_model_without_references_is_freed_at_once() -> None:
    model, _ = managed("emulated")
    found = [weakref.ref(module) for module in model.modules()]
    gc.disable()
    try:
        del model
        assert all(each() is None for each in found)
    finally:
        gc.enable()


@pytest.mark.parametrize("device", DEVICES)
def test_a_shallow_copy_in_a_part_s_place_gets_its_own_guard(device: str) -> None:
    model, optimizer = managed(device)
    train(model, optimizer)
    model[1] = copy.copy(model[1])
    gc.collect()
    train(model, optimizer)
    with refused_without_change(model):
        model.half()
    with materialized(model):
        copy.deepcopy(model)
    assert model[1].float() is model[1]
    model[1] = copy.copy(model[1])
    gc.collect()
    assert release(model).half()[1].own.dtype is torch.float16
    copy.deepcopy(model)

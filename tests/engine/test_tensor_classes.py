"""Inputs that are no plain dense tensors: classes of the user's, nested and sparse ones give PyTorch's bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_core import SGD, Budget
from ps_core.engine import chunked, release, statistics

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]
WIDTH, LAYERS = 32, 12


class GivesPlain(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class GivesItself(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if isinstance(result, Tensor) else result


class CallsSuper(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, [kind for kind in types if kind is cls], args, kwargs)


class Refuses(Tensor):
    """A class that handles no function, and leaves each to the next class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Bare(Tensor):
    pass


class NoFunctions(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Wrapper(Tensor):
    """A tensor that wraps another one, and gives that one to each operator."""

    whole: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)
        made.whole = whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(lambda each: each.whole if isinstance(each, cls) else each, (args, kwargs or {}))
        return tree_map(lambda each: cls(each) if isinstance(each, Tensor) else each, func(*args, **kwargs))


@dataclass
class Batch:
    x: Any


def nested(x: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([x[:1], x[1:]], layout=layout)


def as_class(kind: type[Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: x.as_subclass(kind)


SINGLE: dict[str, Callable[[Tensor], Any]] = {
    **{kind.__name__: as_class(kind) for kind in (GivesPlain, GivesItself, CallsSuper, Bare, NoFunctions)},
    "Wrapper": Wrapper,
    "Parameter": nn.Parameter,
    "nested": lambda x: nested(x, torch.strided),
    "jagged": lambda x: nested(x, torch.jagged),
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
}
CONTAINERS: dict[str, Callable[[Any], Any]] = {"dict": lambda x: {"x": x}, "list": lambda x: [x], "dataclass": Batch}
WITHIN = {
    f"{kind} in a {name}": (lambda x, make=SINGLE[kind], put=put: put(make(x)))
    for name, put in CONTAINERS.items()
    for kind in ("GivesItself", "nested", "jagged")
}
INPUTS = SINGLE | WITHIN


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, given: Any) -> Any:
        given = given.x if isinstance(given, Batch) else given
        x = given["x"] if isinstance(given, dict) else given[0] if isinstance(given, list) else given
        return self.layers(x)


def x_of(step: int) -> Tensor:
    return torch.randn(4 + step, WIDTH, generator=torch.Generator().manual_seed(step))


def values(result: Any) -> Tensor:
    result = getattr(result, "whole", result)
    return torch.cat(result.unbind()) if result.is_nested else result


def run(model: nn.Module, make: Callable[[Tensor], Any], optimizer: Any) -> list[Any]:
    """The kinds and losses of three steps with growing batches, and of an evaluation after each."""
    found: list[Any] = []
    for step in range(3):
        result = model(make(x_of(step)))
        result = result.whole if isinstance(result, Wrapper) else result
        loss = values(result).square().mean()
        if not loss.requires_grad:  # a wrapper hides it
            loss = values(model(x_of(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = model(make(x_of(step)))
        found += [type(result), loss.item(), values(evaluated).sum().item()]
    return found


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("kind", INPUTS)
def test_results_are_those_of_pytorch(kind: str, device: str) -> None:
    plain = Net()
    expected = run(plain, INPUTS[kind], torch.optim.SGD(plain.parameters(), lr=0.1))
    budget = Budget(device="64KiB", host="1MiB") if device == "emulated" else Budget(host="1MiB")
    model, optimizer = chunked(Net(), SGD(lr=0.1), device=device, budget=budget, precision="fp32")
    try:
        assert run(model, INPUTS[kind], optimizer) == expected
        assert statistics(model).planned_passes or device == "cpu"
    finally:
        release(model)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("kind", ["GivesPlain", "GivesItself", "nested"])
def test_in_16_bits(kind: str, device: str) -> None:
    """Inputs are cast, or 16-bit already."""
    expected = values(Net().bfloat16()(INPUTS[kind](x_of(0).bfloat16())))
    budget = Budget(device="32KiB", host="1MiB") if device == "emulated" else Budget(host="1MiB")
    model, _ = chunked(Net(), SGD(lr=0.1), device=device, budget=budget, precision="bf16")
    try:
        for x in (x_of(0), x_of(0).bfloat16()):
            assert torch.equal(values(model(INPUTS[kind](x))), expected)
    finally:
        release(model)


@pytest.mark.parametrize("kind", ["GivesItself", "nested", "jagged", "coo"])
def test_a_result_without_backward_is_freed(kind: str) -> None:
    """Also where an operator saves its own output."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    made: list[Any] = []
    layers[1].register_forward_hook(lambda module, args, result: made.append(weakref.ref(result)))
    model, _ = chunked(layers, SGD(lr=0.1), device="cpu", precision="fp32")
    try:
        model(INPUTS[kind](x_of(0)))
        assert [each() for each in made] == [None] * len(made) != []
    finally:
        release(model)


def test_a_class_that_implements_nothing() -> None:
    """As in PyTorch."""
    model, _ = chunked(Net(), None, device="cpu", precision="fp32")
    try:
        for each in (Net(), model):
            with pytest.raises(TypeError, match="all __torch_function__ handlers returned NotImplemented"):
                each(x_of(0).as_subclass(Refuses))
    finally:
        release(model)


def test_a_batch_of_longer_parts_is_planned_anew() -> None:
    """Fewer elements in longer parts take as much memory where they are padded."""
    model, optimizer = chunked(
        Net(), SGD(lr=0.1), device="emulated", budget=Budget(device="64KiB", host="1MiB"), precision="fp32"
    )
    try:
        for parts in ([2, 2], [2, 2], [1, 3], [1, 3], [1, 2]):
            x = torch.nested.nested_tensor([torch.ones(length, WIDTH) for length in parts])
            torch.cat(model(x).unbind()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert statistics(model).replans == 1
        assert statistics(model).planned_passes == 3
    finally:
        release(model)

"""Tensors of inputs within objects: a larger batch there is seen as one in a dictionary is."""

from __future__ import annotations

import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from _runs import let_go
from ps_core import AdamW, Budget, DoesNotFit
from ps_core.engine import chunked, statistics
from ps_core.engine._tracing.input_tensors import comparable, tensors_of

BUDGET = 140 * 2**10
SMALL, LARGE = 8, 48


@dataclass
class Fields:
    x: Tensor


class Slots:
    """An object without ``__dict__``, one of whose attributes was never set."""

    __slots__ = ("never_set", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Store:
    """Keeps tensors behind attributes that it looks up, as graph libraries do; refers to its owner."""

    def __init__(self, owner: object, x: Tensor) -> None:
        self.__dict__["_owner"] = owner
        self.__dict__["_mapping"] = {"x": x}

    def __getattr__(self, name: str) -> Tensor:
        found: Tensor = self._mapping[name]
        return found


class Graph:
    """An object with a store, a cycle, and a property that must not be called."""

    def __init__(self, x: Tensor) -> None:
        self._store = Store(self, x)
        self.gone = weakref.proxy(Store(None, x))

    @property
    def x(self) -> Tensor:
        return self._store.x

    @property
    def dense(self) -> Tensor:
        raise AssertionError("a property was called")

    def __iter__(self) -> Any:
        raise AssertionError("the object was iterated over")


class Net(nn.Module):
    """Takes its batch in any of these."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, data: Any) -> Tensor:
        x = data.x if hasattr(data, "x") else data["x"]
        out: Tensor = self.body(x).square().mean()
        return out


WRAPPERS: dict[str, Callable[[Tensor], Any]] = {
    "dictionary": lambda x: {"x": x},
    "dataclass": Fields,
    "object with slots": Slots,
    "UserDict": lambda x: UserDict(x=x),
    "BatchEncoding": lambda x: BatchEncoding({"x": x}),
    "namespace": lambda x: SimpleNamespace(x=x),
    "mapping proxy": lambda x: MappingProxyType({"x": x}),
    "object with stores": Graph,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_larger_batch_is_refused_rather_than_run_over_the_budget(wrap: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, optimizer = chunked(Net(), AdamW(lr=1e-3), device="emulated", budget=Budget(device=BUDGET), precision="fp32")
    try:
        for _ in range(3):
            model(wrap(torch.randn(SMALL, 64))).backward()
            optimizer.step()
        assert statistics(model).planned_passes >= 2
        with pytest.raises(DoesNotFit):
            model(wrap(torch.randn(LARGE, 64))).backward()
        optimizer.zero_grad()
        model(wrap(torch.randn(SMALL // 2, 64))).backward()
        optimizer.step()
        told = statistics(model)
        assert told.last_divergence == "a batch larger than the plan's"
        assert told.divergences == 1, "smaller batches go by the plan"
    finally:
        let_go(model)


def test_what_is_found_and_in_which_order() -> None:
    a, b, c = (torch.zeros(number) for number in (1, 2, 3))
    given = ({"a": a, "n": 1, "none": None}, [Fields(b)], deque([c]), "text")
    assert [tensor.numel() for tensor in tensors_of(given)] == [1, 2, 3]


def test_modules_optimizers_functions_and_classes_are_not_followed() -> None:
    layer = nn.Linear(4, 4)

    class Trainer:
        static = torch.zeros(4)

        def __init__(self) -> None:
            self.model, self.optimizer = layer, torch.optim.AdamW(layer.parameters())
            self.kind, self.collate = Fields, lambda: layer
            self.batch = torch.zeros(3)

    assert [tensor.numel() for tensor in tensors_of(Trainer())] == [3]


def test_managed_parameters_within_an_object_are_no_inputs() -> None:
    model, _ = chunked(nn.Linear(8, 8), AdamW(), device="emulated", budget=Budget(device="1MiB"))
    try:
        assert tensors_of(Fields(model.weight)) == []
    finally:
        let_go(model)


def test_cycles_and_huge_graphs_of_objects_end() -> None:
    class Node:
        def __init__(self) -> None:
            self.next: Any = self
            self.others: list[Node] = []

    first = Node()
    first.others = [Node() for _ in range(5000)]
    for node in first.others:
        node.next, node.others = first, first.others
    assert tensors_of(first) == []
    chain = Node()
    for _ in range(5000):
        longer = Node()
        longer.next, chain = chain, longer
    assert tensors_of(chain) == []


def test_members_of_enumerations_differ_by_class_and_by_value() -> None:
    """Of whole numbers, -1 and -2 have the same hash; members have that of their names."""
    whole, other = IntEnum("whole", {"FEW": -1, "MANY": -2}), IntEnum("other", {"FEW": -1})
    named, same = Enum("named", {"FEW": 1}), Enum("same", {"FEW": 1})
    values = [whole.FEW, whole.MANY, other.FEW, named.FEW, same.FEW, -1, -2]
    assert len({comparable(value) for value in values}) == len(values)
    assert comparable(whole.FEW) == comparable(whole(-1))

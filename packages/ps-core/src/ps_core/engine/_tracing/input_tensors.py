"""Find the tensors and numbers in a model's inputs, also within objects, without running any code of theirs."""

from __future__ import annotations

import sys
from collections import deque
from enum import Enum
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from ps_core.engine._parameters.managed_parameter import ManagedParameter


def _numpy_numbers() -> tuple[type, ...]:
    """Return NumPy's types of single numbers; none if it is not installed, else PyTorch has imported it."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ()
    return tuple({kind for kind in numpy.sctypeDict.values() if issubclass(kind, numpy.number | numpy.bool_)})


_TEXTS = (str, bytes)
VALUES = (bool, int, float, complex, *_TEXTS, torch.dtype, torch.device, Enum, *_numpy_numbers())
"""Types of inputs that hold no tensors; None is another."""
_CLOSED = (nn.Module, torch.optim.Optimizer, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types whose attributes are not followed: they are no inputs, although inputs may refer to them."""
_MOST_STEPS, _MOST_OBJECTS = 12, 1000
"""An object graph is followed so far, and through so many containers and objects."""


def comparable(value: Any) -> Any:
    """Return one of the ``VALUES``; or what stands for it where code of its own class would compare it."""
    kind = type(value)
    if kind in VALUES:
        return value
    if isinstance(value, int):
        return kind, int.__index__(value)  # -1 and -2 have the same hash
    base: Any = next(each for each in VALUES if issubclass(kind, each))
    return kind, base.__hash__(value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested dictionaries, lists, tuples and attributes of objects.

    Properties are not called. Modules, optimizers and managed parameters are no inputs.
    """
    found: list[torch.Tensor] = []
    _find(value, found, [], set(), _MOST_STEPS)
    return found


def tensors_and_numbers(value: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the tensors that `tensors_of` returns, and the first 1,000 numbers, flags and members of enumerations.

    Texts there are left out: in a batch most are data, and differ in each.
    """
    found: tuple[list[torch.Tensor], list[Any]] = [], []
    _find(value, *found, set(), _MOST_STEPS)
    return found


def _find(value: Any, found: list[torch.Tensor], numbers: list[Any], seen: set[int], steps: int) -> None:
    """Add the tensors and the numbers in a value to those found; ``seen``: ids of the containers and objects so far.

    Types are asked, and not values: a proxy's ``__class__`` runs code, or raises if what it stands for is gone.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        found.append(value)
        return
    if id(value) in seen or not steps or len(seen) >= _MOST_OBJECTS:
        return
    if issubclass(kind, dict):
        parts = list(dict.values(value))
    elif issubclass(kind, list | tuple | deque):
        parts = list(value)
    elif kind is MappingProxyType:
        parts = list(value.values())
    else:
        parts = [part for part in _attributes(value) if type(part) is not ManagedParameter]
    seen.add(id(value))
    for part in parts:
        if part is None:
            continue
        if not issubclass(type(part), VALUES):
            _find(part, found, numbers, seen, steps - 1)
        elif len(numbers) < _MOST_OBJECTS and not issubclass(type(part), _TEXTS):
            numbers.append(part if type(part) in VALUES else comparable(part))


def _attributes(value: Any) -> list[Any]:
    """Return what an object's attributes hold, in ``__dict__`` and in ``__slots__``."""
    kind, found = type(value), list[Any]()
    if issubclass(kind, _CLOSED):
        return found
    for base in kind.__mro__:
        own = base.__dict__
        if type(own.get("__dict__")) in (GetSetDescriptorType, MemberDescriptorType):
            found += own["__dict__"].__get__(value, kind).values()
        if "__slots__" in own:
            for member in tuple(own.values()):
                if type(member) is MemberDescriptorType:
                    try:
                        found.append(member.__get__(value, kind))
                    except AttributeError:  # it was never set
                        continue
    return found

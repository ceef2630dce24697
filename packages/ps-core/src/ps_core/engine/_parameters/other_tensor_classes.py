"""Fetch managed parameters for functions that a tensor class of the user's handles itself.

PyTorch gives a function to the class of the first argument that has a ``__torch_function__`` of its own. For
``linear(x, weight)`` that is the class of ``x``. `ManagedParameter` is not asked then, and the weight may be on another
tier. A mode of PyTorch is asked before all classes. So a pass with such inputs runs under `FetchFirst`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.function_kinds import Function
from ps_core.engine._parameters.managed_parameter import LEAVES, ManagedParameter, call_fetched, managed
from ps_core.engine._parameters.saved_tensors import in_checkpoint

_DISABLED = torch._C._disabled_torch_function_impl


class FetchFirst(TorchFunctionMode):
    """Fetch the managed parameters among a function's arguments, then give it to the other arguments' classes."""

    def __torch_function__(self, func: Function, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        others = tuple(kind for kind in types if kind is not ManagedParameter)
        found = managed((*args, *kwargs.values())) if others else []
        if not found or ManagedParameter.answers(func, args):
            return func(*args, **kwargs)
        if in_checkpoint() and torch.is_grad_enabled():
            raise UnsupportedParameter(
                f"{found[0]._record.name!r} meets a {others[0].__name__}, a tensor class with functions of its own, "
                "inside checkpoint(...), whose repetition in backward would not fetch it: give the checkpointed block "
                "x.as_subclass(torch.Tensor), or leave checkpointing out"
            )
        return call_fetched(found, partial(_call_by_class, func, others), args, kwargs)


def _call_by_class(func: Function, classes: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function as PyTorch would if managed parameters were plain ones: by the first class that implements it."""
    with torch._C._EnableTorchFunction():
        for kind in classes:
            result = kind.__torch_function__(func, classes, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"{func} failed: all __torch_function__ handlers returned NotImplemented: {list(classes)}")


def has_other_classes(values: Iterable[Any]) -> bool:
    """Return True if a tensor among the values, also within containers, has a class that handles functions itself."""
    return any(map(_is_other, values))


def _is_other(value: Any) -> bool:
    kind = type(value)
    if kind in LEAVES or kind is ManagedParameter:
        return False
    if isinstance(value, torch.Tensor):
        return kind.__torch_function__ is not _DISABLED
    if isinstance(value, dict):
        return has_other_classes(value.values())
    if isinstance(value, list | tuple):
        return has_other_classes(value)
    if is_dataclass(value) and not isinstance(value, type):
        return has_other_classes(getattr(value, field.name, None) for field in fields(value))
    return False

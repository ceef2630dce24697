"""Copy a model with fake tensors, which have shapes but no memory, in place of all its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T")
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
"""Functions that change their first argument, besides those whose names end with an underscore."""


class CannotCopy(Exception):
    """Say that the model cannot be copied; the message says why."""


class FakeTensors(TorchFunctionMode):
    """Make and remember the fake tensor of each real one.

    While this mode is on, `copy.deepcopy` makes fake tensors of all real ones, in any object. Functions get the fake in
    place of a real parameter. So a closure or a global may still hold a parameter of the original model.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Real and fake tensors by the real one's id; real ones are kept so that ids are not reused."""

    def fake(self, tensor: torch.Tensor, name: str = "", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor's fake on the CPU, made at the first call; floating ones in ``dtype`` if given."""
        known = self._pairs.get(id(tensor))
        if known is not None:
            return known[1]
        kind = type(tensor)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(f"{name!r} is a {kind.__name__}, whose operators are its own")
        floating = tensor.dtype.is_floating_point
        made = _empty_like(tensor, dtype if dtype is not None and floating else tensor.dtype, self.mode)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            vars(made).update({**vars(tensor), **vars(made)})
        self._pairs[id(tensor)] = (tensor, made)
        return made

    def copy(self, model: nn.Module, shared: Iterable[object]) -> nn.Module:
        """Return a copy of the model with fakes; objects in ``shared`` are not copied, but used by both.

        Call this while this mode and the fake-tensor mode are on. `CannotCopy` says what cannot be copied.
        """
        memo: dict[int, Any] = {id(each): each for each in shared}
        memo.update((real, made) for real, (_, made) in self._pairs.items())
        try:
            copied = copy.deepcopy(model, memo)
        except Exception as error:
            raise CannotCopy(f"{type(error).__name__}: {error}") from error
        real = set(map(id, model.modules()))
        for module in copied.modules():
            if id(module) in real:
                raise CannotCopy(f"the copy has the same {type(module).__name__}, not one of its own")
        return copied

    def replace(self, tree: T, dtype: torch.dtype | None) -> T:
        """Return nested containers with fakes in place of their tensors."""
        found: T = tree_map_only(torch.Tensor, lambda tensor: self.fake(tensor, "an input", dtype), tree)
        return found

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self.fake(args[0], "a tensor")
        kwargs = kwargs or {}
        for target in _written(func, args, kwargs):
            if type(target) is torch.Tensor and not self._is_replaced(target):
                raise RuntimeError(f"it changes a tensor of shape {tuple(target.shape)} outside of the model in place")
        if any(self._is_replaced(leaf) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda leaf: self.fake(leaf, "a tensor") if self._is_replaced(leaf) else leaf,
                (args, kwargs),
            )
        return func(*args, **kwargs)

    def _is_replaced(self, leaf: Any) -> bool:
        """Return True for a real tensor that has a fake, or that backward would give a fake gradient."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return False
        return id(leaf) in self._pairs or leaf.requires_grad


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments that a function changes in place, by its name."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    out = kwargs.get("out")
    return (*(args[:1] if in_place else ()), *(out if isinstance(out, tuple | list) else (out,)))


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype, mode: FakeTensorMode) -> torch.Tensor:
    """Return a fake tensor of the same shape; it is dense even if the tensor is an expanded placeholder."""
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    with mode, torch.no_grad():
        if expanded:
            made = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        else:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)

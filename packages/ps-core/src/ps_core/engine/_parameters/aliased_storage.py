"""Find tensors of a model that share memory with its parameters: keep ties, refuse all others by name.

The engine moves each parameter to other memory. Anything else that uses the old memory would keep the old values. Two
parameters with the same elements in the same order are a *tie*: the engine keeps these equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ps_core._errors import UnsupportedParameter
from ps_core.engine._parameters.grouping import named
from ps_core.engine._parameters.managed_parameter import ManagedParameter

_MODULES_OWN = vars(nn.Module()).keys()
"""Attributes that every module has; of these only buffers hold tensors that matter here."""
_SUGGESTION = (
    "before chunked(...), share the Parameter itself (`a.weight = b.weight`), make the tensor a property that is "
    "computed from the parameter when it is read, or give it memory of its own (.clone())"
)


class _Range(NamedTuple):
    """The bytes between the first and the last element of a tensor."""

    memory: tuple[str, int]
    """The tensor's memory: addresses of different memories cannot be compared."""
    start: int
    stop: int


class _Named(NamedTuple):
    name: str
    tensor: torch.Tensor
    range: _Range


def find_ties(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters with the same memory, a list for each tie; refuse any other shared memory."""
    parameters = [_Named(name, each, found) for name, each in named(model) if (found := _range(each)) is not None]
    ties: dict[tuple[Any, ...], list[str]] = {}
    for each in parameters:
        _check_own_elements(each)
        ties.setdefault((each.range, *_layout(each.tensor)), []).append(each.name)
    index = _Index(parameters)
    for each in reversed(parameters):
        for other in index.overlapping(each):
            if _layout(each.tensor) != _layout(other.tensor) or each.range != other.range:
                raise _refused(f"the parameter {each.name!r}", other)
            if each.tensor.is_meta and each is not other:
                raise _refused(f"the parameter {each.name!r}, on meta,", other)
    own = {id(parameter) for parameter in model.parameters() if parameter.is_floating_point()}
    for name, tensor in _tensors(model):
        if id(tensor) not in own and (found := _range(tensor)) is not None:
            for other in index.overlapping(_Named(name, tensor, found)):
                raise _refused(f"the tensor {name!r}", other)
    return [names for names in ties.values() if len(names) > 1]


def tied_by_memory(names: list[str], why: str) -> UnsupportedParameter:
    """Return the error for a tie that cannot be kept."""
    return UnsupportedParameter(
        f"the parameters {names[0]!r} and {names[1]!r} share memory, {why}: before chunked(...), share the Parameter "
        "itself, as in `model.head.weight = model.table.weight`, or give one of them memory of its own (.clone())"
    )


def _refused(what: str, other: _Named) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{what} shares memory with the parameter {other.name!r}, and would keep old values when training moves and "
        f"changes {other.name!r}: {_SUGGESTION}"
    )


def _check_own_elements(found: _Named) -> None:
    """Refuse a trained parameter with several elements at one place in memory, as PyTorch's optimizers do."""
    tensor = found.tensor
    places = (found.range.stop - found.range.start) // tensor.itemsize
    if tensor.requires_grad and tensor.numel() > places:
        raise UnsupportedParameter(
            f"{found.name!r} is expanded: its {tensor.numel()} elements are {places} places in memory, which no "
            "optimizer can step; keep the small parameter and expand it in forward, or .clone() it before chunked(...)"
        )


class _Index:
    """Index parameters by address."""

    def __init__(self, parameters: list[_Named]) -> None:
        self._rows: dict[tuple[str, int], list[_Named]] = {}
        for each in sorted(parameters, key=lambda each: each.range):
            self._rows.setdefault(each.range.memory, []).append(each)
        self._ends = {key: list(accumulate((row.range.stop for row in rows), max)) for key, rows in self._rows.items()}

    def overlapping(self, found: _Named) -> Iterator[_Named]:
        """Yield the parameters that have an element in common with a tensor, the tensor itself included."""
        rows, ends = self._rows.get(found.range.memory, []), self._ends.get(found.range.memory, [])
        at = bisect_left(rows, found.range.stop, key=lambda row: row.range.start) - 1
        while at >= 0 and ends[at] > found.range.start:
            if rows[at].range.stop > found.range.start and _meet(found, rows[at]):
                yield rows[at]
            at -= 1


def _meet(one: _Named, other: _Named) -> bool:
    """Return True if two tensors whose ranges overlap have a byte in common; columns of one matrix may have none."""
    if one.tensor is other.tensor or (one.range == other.range and _layout(one.tensor) == _layout(other.tensor)):
        return True
    start, stop = min(one.range.start, other.range.start), max(one.range.stop, other.range.stop)
    taken = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    _bytes(taken, one, start).fill_(True)
    return bool(_bytes(taken, other, start).any())


def _bytes(memory: torch.Tensor, found: _Named, start: int) -> torch.Tensor:
    """Return a tensor's part of ``memory``, which has an element for each byte from address ``start`` on."""
    size = found.tensor.itemsize
    strides = [step * size for step in found.tensor.stride()]
    return memory.as_strided((*found.tensor.shape, size), (*strides, 1), found.range.start - start)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    steps = tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.dtype, tensor.shape, steps


def _range(tensor: torch.Tensor) -> _Range | None:
    """Return the addresses of a tensor's elements; None: it has none, or its class does not tell them."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is not torch.strided or not tensor.numel():
                return None
            if tensor.is_meta:
                memory = ("meta", tensor.untyped_storage()._cdata)
                start = int(tensor.storage_offset()) * tensor.itemsize
            else:
                memory, start = (tensor.device.type, tensor.device.index or 0), tensor.data_ptr()
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    except (RuntimeError, NotImplementedError):  # a class of tensors without memory of its own
        return None
    return _Range(memory, start, start + (last + 1) * tensor.itemsize) if start or tensor.is_meta else None


# What else a model has.


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules hold, with the path to each: parameters, buffers and other attributes."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        seen.add(id(module))
        for name, value in _attributes(module):
            yield from _within(f"{prefix}.{name}" if prefix else name, value, seen)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module holds besides other modules."""
    # A hook with a name sets that attribute in each forward, as torch.nn.utils.spectral_norm's does.
    set_anew = [getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()]
    yield from module._parameters.items()
    yield from module._buffers.items()
    yield from (row for row in vars(module).items() if row[0] not in _MODULES_OWN and row[0] not in set_anew)


def _within(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value, each once: also in collections, modules, and attributes of tensors."""
    parts: Iterable[tuple[str, Any]]
    if isinstance(value, torch.Tensor):
        parts = ((f".{name}", each) for name, each in vars(value).items())
    elif isinstance(value, dict):
        parts = ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = ((f"[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, nn.Module):
        parts = ((f".{name}", each) for name, each in (*_attributes(value), *value._modules.items()))
    else:
        return
    if id(value) in seen or isinstance(value, ManagedParameter):  # another model's, which the engine moves already
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    for suffix, part in parts:
        yield from _within(path + suffix, part, seen)

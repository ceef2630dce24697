"""Describe the size of a model's inputs: a plan serves all batches that are no larger."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from types import FrameType
from typing import Any

import torch
from torch import nn

from ps_core.engine._tracing.input_tensors import tensors_and_numbers

MODULE_CALLS = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})
_MOST_OTHERS = 7
"""A plan serves so many batches besides the first, none of which covers another."""


@dataclass(slots=True)
class BatchShape:
    """The size of the batch that the root module was last called with, or of the batches that a plan serves."""

    shapes: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0
    later: tuple[BatchShape, ...] = ()
    """Batches of further calls in the same pass."""
    others: tuple[BatchShape, ...] = ()
    """Batches of other structures or shapes that the same plan serves."""
    part: str = ""
    """The class of the part of the model that was called; empty: the model itself was."""
    values: tuple[Any, ...] = field(default=(), compare=False)
    """The call's arguments besides tensors (numbers, flags, texts), and whether the model is in training mode."""

    @property
    def dimensions(self) -> tuple[str | int, ...]:
        """Return what was called, with how many dimensions of each tensor; only batches with the same are compared."""
        return self.part, *map(len, self.shapes)

    def covers(self, other: BatchShape | None) -> bool:
        """Return True if no size of the other batch is larger: this one's plan then serves both."""
        if other is None:
            return False
        if self.dimensions == other.dimensions:
            pairs = zip(self.shapes, other.shapes, strict=True)
            if all(b <= a for mine, yours in pairs for a, b in zip(mine, yours, strict=True)):
                if not other.later:
                    return True
                calls = zip(self.later, other.later, strict=False)
                if len(other.later) <= len(self.later) and all(mine.covers(yours) for mine, yours in calls):
                    return True
        return bool(self.others) and any(each.covers(other) for each in self.others)

    def replaces(self, planned_for: BatchShape) -> bool:
        """Return True if a plan for this batch serves all that a plan for the other ones does."""
        return self.covers(planned_for) and all(map(self.covers, planned_for.others))

    def difference(self, other: BatchShape) -> str:
        """Return why a plan for this batch does not serve the other one."""
        if other.part and other.part not in (self.part, *(each.part for each in self.others)):
            return "a part of the model is called by itself"
        if len(other.later) > len(self.later):
            return "the model is called more often than in the plan's pass"
        if other.later:
            return "a batch larger than the plan's, in a later call"
        if other.dimensions in (self.dimensions, *(each.dimensions for each in self.others)):
            return "a batch larger than the plan's"
        return "inputs of another structure than the plan's batch"

    def beside(self, other: BatchShape) -> BatchShape:
        """Return what a plan serves that serves the other batch and this one's; of many, the newest."""
        mine = [replace(each, others=()) for each in (self, *self.others)]
        kept = [each for each in mine if not other.covers(each)]
        tokens, others = max(self.tokens, other.tokens), tuple(kept[:_MOST_OTHERS])
        return BatchShape(other.shapes, tokens, other.later, others, other.part, other.values)

    def is_like(self, other: BatchShape) -> bool:
        """Return True if one batch can cover both: all calls that both have, have inputs of the same dimensions."""
        calls = zip((self, *self.later), (other, *other.later), strict=False)
        return all(mine.dimensions == yours.dimensions for mine, yours in calls)

    def joined(self, other: BatchShape) -> BatchShape:
        """Return the smallest batch that covers both, which are alike."""
        pairs = zip(self.shapes, other.shapes, strict=True)
        shapes = tuple(tuple(map(max, mine, yours)) for mine, yours in pairs)
        both = zip_longest(self.later, other.later)
        later = tuple(mine.joined(yours) if mine and yours else mine or yours for mine, yours in both)
        return BatchShape(shapes, max(self.tokens, other.tokens), later, part=self.part)


def batch_of(args: Any, kwargs: Any) -> BatchShape:
    """Return the shape of a call's arguments, with the numbers and flags among them."""
    tensors, numbers = tensors_and_numbers((args, kwargs))
    shapes = tuple(map(_shape, tensors))
    return BatchShape(shapes, max(map(_tokens, tensors, shapes), default=0), values=tuple(numbers))


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested one its elements, its number of parts, and the largest size in each
    dimension of a part.
    """
    if not tensor.is_nested:
        return tuple(tensor.shape)
    parts = tensor.detach().unbind()
    return sum(part.numel() for part in parts), len(parts), *map(max, zip(*(part.shape for part in parts), strict=True))


def describe_call(model: nn.Module, args: Any, kwargs: Any) -> str:
    """Describe a call of a model: its arguments without the values in tensors, and its modules with their attributes.

    Calls with equal texts make passes that are alike. The text is empty if the content of an argument is unknown.
    """
    try:
        described = _described((args, kwargs))
        parts = [f"{name} {_described_module(module)}" for name, module in model.named_modules()]
    except Exception:  # any of the user's objects: a field that was never set, a cycle, a tensor without sizes
        return ""
    return "\n".join((described, *parts)) if described else ""


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad} {value.layout} {value.device.type}"
    kind = type(value).__qualname__
    if value is None or isinstance(value, bool | int | float | str):
        return f"{kind} {value!r}"
    if isinstance(value, dict):
        value = tuple(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        value = tuple((each.name, getattr(value, each.name)) for each in fields(value))
    elif not isinstance(value, list | tuple):
        return ""
    parts = list(map(_described, value))
    return f"{kind}({', '.join(parts)})" if all(parts) else ""


def _described_module(module: nn.Module) -> str:
    """Describe a module's class, its attributes that are numbers or strings, and its buffers."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    buffers = {name: _described(value) for name, value in module._buffers.items()}
    return f"{type(module).__qualname__} {plain} {buffers}"


def _tokens(tensor: torch.Tensor, shape: tuple[int, ...]) -> int:
    """Estimate how many rows pass through the model's matrices."""
    numel = shape[0] if tensor.is_nested else tensor.numel()
    if not tensor.is_floating_point() or not shape:
        return numel
    return numel // max(1, shape[-1])


def within_a_module() -> bool:
    """Return True if the caller runs within a module's call; parameters read outside depend on no batch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in MODULE_CALLS:
            return True
        frame = frame.f_back
    return False

"""What a model is called with, as far as plans go."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

_MODULE_CALLS = frozenset({nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__})


@dataclass(slots=True)
class Batch:
    """What the root module was last called with."""

    shapes: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0

    def covers(self, other: Batch | None) -> bool:
        """Whether a plan for this batch is good for another: no dimension is larger."""
        if other is None or len(self.shapes) != len(other.shapes):
            return False
        return all(
            len(mine) == len(yours) and all(b <= a for a, b in zip(mine, yours, strict=True))
            for mine, yours in zip(self.shapes, other.shapes, strict=True)
        )


class Largest:
    """How large batches have been at most."""

    def __init__(self) -> None:
        self._numel = 0
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Of each dimension, by how many of them the tensors of a batch have."""

    def grows(self, batch: Batch) -> bool:
        """Note a batch; whether anything of it is larger than in any before."""
        kind = tuple(len(shape) for shape in batch.shapes)
        sizes = tuple(size for shape in batch.shapes for size in shape)
        known = self._sizes.get(kind)
        self._sizes[kind] = sizes if known is None else tuple(map(max, known, sizes))
        numel, before = sum(map(math.prod, batch.shapes)), self._numel
        self._numel = max(before, numel)
        return self._sizes[kind] != known or numel > before


def batch_of(args: Any, kwargs: Any) -> Batch:
    """Of the arguments of a call."""
    tensors = list(tensors_of((args, kwargs)))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return Batch(shapes, max((_tokens(tensor) for tensor in tensors), default=0))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def _tokens(tensor: torch.Tensor) -> int:
    """Roughly, how many rows pass through the model's matrices."""
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return tensor.numel()
    return tensor.numel() // max(1, tensor.shape[-1])


def within_a_module() -> bool:
    """Whether the caller runs within a module's call; parameters that are read outside of any are in no batch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _MODULE_CALLS:
            return True
        frame = frame.f_back
    return False

"""What a tape says: operations, and the memory they read and write; see [Note: the tape] in `tape`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OVERWRITES = frozenset(
    {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
)
"""Of a tensor, all that was there before."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor as a part of some memory."""

    memory: int
    memory_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Whether it is all of its memory. (A tensor without overlaps, as those are that initialisers write to.)"""
        return self.size.numel() * self.dtype.itemsize == self.memory_bytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, on real memory."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)


def place_of(tensor: Tensor) -> Place:
    """Where a tensor is."""
    storage = tensor.untyped_storage()
    return Place(
        storage._cdata, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
    )


@dataclass(slots=True)
class Note:
    """One operation; tensors among its arguments are `Place`s."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: set[int]
    writes: list[Place]
    makes: list[Place]
    """Of its results, those in memory of their own."""

    @property
    def random(self) -> bool:
        """Whether it draws."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwrites(self) -> bool:
        """Whether what it writes to could have held anything."""
        return self.func.overloadpacket.__name__ in OVERWRITES or self.func._overloadname.endswith("out")

    def settles(self, memory: int) -> bool:
        """Whether what was in this memory before does not matter."""
        if any(place.memory == memory for place in self.makes):
            return True
        return self.overwrites and any(place.memory == memory and place.whole for place in self.writes)

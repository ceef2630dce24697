"""Store the contents of a tape: operations, and the memory they read and write; see [Note: the tape] in `tape`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OVERWRITES = frozenset(
    {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_"}
)
"""Operators that overwrite everything that a tensor held before."""


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """A tensor as a view of some memory."""

    memory: int
    memory_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Return True if the tensor is all of its memory (and has no overlaps, as tensors that initialisers write
        to).
        """
        return self.size.numel() * self.dtype.itemsize == self.memory_bytes

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor on real memory."""
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)


def place_of(tensor: Tensor) -> ViewSpec:
    """Return the storage, type, shape, strides and offset of a tensor."""
    storage = tensor.untyped_storage()
    return ViewSpec(
        storage._cdata, storage.nbytes(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
    )


@dataclass(slots=True)
class TapedCall:
    """One operation; tensors among its arguments are `ViewSpec`s."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: set[int]
    writes: list[ViewSpec]
    makes: list[ViewSpec]
    """Results of the call in new memory."""

    @property
    def random(self) -> bool:
        """Return True if the call draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def overwrites(self) -> bool:
        """Return True if the call ignores what was in the memory that it writes to."""
        return self.func.overloadpacket.__name__ in OVERWRITES or self.func._overloadname.endswith("out")

    def settles(self, memory: int) -> bool:
        """Return True if the call overwrites all of this memory; earlier calls then do not matter to its contents."""
        if any(place.memory == memory for place in self.makes):
            return True
        return self.overwrites and any(place.memory == memory and place.whole for place in self.writes)


class TapedCalls:
    """All recorded calls of a tape, in order."""

    def __init__(self) -> None:
        self.notes: list[TapedCall] = []
        self.captured: dict[int, Tensor] = {}
        """Contents of tensors with memory when a call first named each."""
        self._writers: dict[int, list[int]] = defaultdict(list)
        """The calls that write each memory."""

    def add(self, note: TapedCall) -> None:
        """Append a call."""
        for place in (*note.writes, *note.makes):
            self._writers[place.memory].append(len(self.notes))
        self.notes.append(note)

    def cut(self, end: int) -> None:
        """Drop all calls from this one on."""
        del self.notes[end:]
        for indices in self._writers.values():
            while indices and indices[-1] >= end:
                indices.pop()

    def matter(self, memory: int) -> list[int]:
        """Return the calls that this memory's final contents come from, in order."""
        found: set[int] = set()
        self._trace(memory, len(self.notes), found)
        return sorted(found)

    def _trace(self, memory: int, end: int, found: set[int]) -> None:
        for index in reversed(self._writers.get(memory, ())):
            if index >= end:
                continue
            note = self.notes[index]
            if index not in found:
                found.add(index)
                for other in note.reads - {memory}:
                    self._trace(other, index, found)
            if note.settles(memory):
                return

    def is_complete(self, place: ViewSpec) -> bool:
        """Return True if calls filled every element of a tensor; False if any is uninitialised memory."""
        if place.memory in self.captured:
            return True
        notes = [self.notes[index] for index in self._writers.get(place.memory, ())]
        if any(note.settles(place.memory) for note in notes):
            return True
        filled = torch.zeros(place.memory_bytes // place.dtype.itemsize, dtype=torch.bool, device="cpu")
        for note in notes:
            for part in note.writes:
                if part.memory == place.memory and note.overwrites:
                    filled.as_strided(part.size, part.stride, part.offset).fill_(True)
        return bool(filled.all())

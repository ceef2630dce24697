"""Check a list of tensors and their chunk together: checks are most of the cost of small copies."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import add, index, le
from typing import Any

from ps_kernels._arrays import (
    FLOATS,
    Array,
    View,
    check_contiguous,
    check_dtype,
    check_flat,
    check_together,
    check_written,
    refuse_uncounted,
    shown,
    view,
)
from ps_kernels._errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors, and where in the chunk each begins; ``starts`` count elements of the chunk, ``numels`` the tensor's."""

    whole: View
    parts: Sequence[Array]
    starts: Sequence[int]
    numels: Sequence[int]
    addresses: Sequence[int]
    nbytes: Sequence[int]
    dtypes: Collection[Any]
    """The tensors' types, each once, as their library names them."""

    def places(self) -> list[int]:
        """Return the addresses in the chunk."""
        first, size = self.whole.address, self.whole.itemsize
        return [first + start * size for start in self.starts]

    def pairs(self, *, scatter: bool) -> Iterator[tuple[Array, Array]]:
        """Yield the written and the read array of each copy."""
        for part, start, numel in zip(self.parts, self.starts, self.numels, strict=True):
            place = self.whole.array[start : start + numel]
            yield (part, place) if scatter else (place, part)

    def check_gather(self) -> None:
        """Raise unless the chunk can be written, each element at most once, and shares no byte with a tensor."""
        both = _overlapping(self.starts, self.numels)
        if both:
            raise InvalidArgument(f"offsets: pieces {both[0]} and {both[1]} of the chunk overlap")
        if self.whole.library != "torch" or self._in_chunk():
            check_written([self.whole], self._views())

    def check_scatter(self) -> None:
        """Raise unless the tensors can be written and share no byte with each other or with the chunk."""
        if self.whole.library != "torch" or self._in_chunk() or _overlapping(self.addresses, self.nbytes):
            check_written(self._views(), [self.whole])

    def _in_chunk(self) -> bool:
        """Return True if a tensor shares a byte with the chunk."""
        first, last = self.whole.address, self.whole.address + self.whole.nbytes
        spans = zip(self.addresses, map(add, self.addresses, self.nbytes), strict=True)
        return any(start < last and first < end > start for start, end in spans)

    def _views(self) -> list[View]:
        return [view(f"tensors[{number}]", part) for number, part in enumerate(self.parts)]


def check_batch(tensors: Sequence[Array], chunk: Array, offsets: Sequence[int]) -> Batch:
    """Check plain tensors all at once; if anything is wrong, check one after another to say what."""
    whole = view("chunk", chunk)
    for name, values in (("tensors", tensors), ("offsets", offsets)):
        if not hasattr(values, "__len__"):
            refuse_uncounted(name, values)
    if len(tensors) != len(offsets):
        raise InvalidArgument(f"offsets: expected one for each of {len(tensors)} tensors, found {len(offsets)}")
    check_flat([whole], whole.numel)
    return _at_once(tensors, whole, offsets) or _one_by_one(tensors, whole, offsets)


def _at_once(tensors: Sequence[Any], whole: View, offsets: Sequence[int]) -> Batch | None:
    torch = sys.modules.get("torch")
    if whole.library != "torch" or torch is None or set(map(type, offsets)) != {int}:
        return None
    tensor, chunk = torch.Tensor, whole.array
    if not {tensor, torch.nn.Parameter}.issuperset(map(type, tensors)):
        return None
    dtypes, floats = {each.dtype for each in tensors}, {torch.float32, torch.float16, torch.bfloat16}
    if any(each.layout is not torch.strided or each.is_nested for each in tensors):
        return None
    if dtypes != {chunk.dtype} and not (dtypes | {chunk.dtype}) <= floats:
        return None
    here = all(each.is_cpu for each in tensors) if chunk.is_cpu else {each.device for each in tensors} == {chunk.device}
    if not here or not all(map(tensor.is_contiguous, tensors)):
        return None
    if any(map(tensor.is_neg, tensors)) or any(map(tensor.is_conj, tensors)):
        return None
    numels = list(map(tensor.numel, tensors))
    if min(offsets) < 0 or max(map(add, offsets, numels)) > whole.numel:
        return None
    return Batch(
        whole=whole,
        parts=list(tensors),
        starts=list(offsets),
        numels=numels,
        addresses=list(map(tensor.data_ptr, tensors)),
        nbytes=[numel * whole.itemsize for numel in numels]
        if dtypes == {chunk.dtype}
        else [numel * each.itemsize for numel, each in zip(numels, tensors, strict=True)],
        dtypes=dtypes,
    )


def _one_by_one(tensors: Sequence[Array], whole: View, offsets: Sequence[int]) -> Batch:
    parts = [view(f"tensors[{number}]", tensor) for number, tensor in enumerate(tensors)]
    check_together([whole, *parts])
    for part, offset in zip(parts, offsets, strict=True):
        check_dtype([part], FLOATS if whole.dtype in FLOATS else (whole.dtype,))
        check_contiguous(part)
        if not hasattr(offset, "__index__"):
            raise InvalidArgument(f"offsets: expected whole numbers, found {offset!r} for {part.name}")
        if not 0 <= offset <= whole.numel - part.numel:
            raise InvalidArgument(
                f"{part.name}: {part.numel} elements from offset {shown(offset)} do not lie in a chunk of {whole.numel}"
            )
    return Batch(
        whole=whole,
        parts=[part.array for part in parts],
        starts=list(map(index, offsets)),
        numels=[part.numel for part in parts],
        addresses=[part.address for part in parts],
        nbytes=[part.nbytes for part in parts],
        dtypes={part.array.dtype for part in parts},
    )


def _overlapping(starts: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return two runs that overlap, as start and end; None: there are none."""
    if all(map(le, map(add, starts, lengths), islice(starts, 1, None))):
        return None
    runs = sorted((start, start + length) for start, length in zip(starts, lengths, strict=True) if length)
    return next(((one, other) for one, other in pairwise(runs) if other[0] < one[1]), None)

"""Compute which bytes of a file hold which elements of a tensor, and which rank reads them.

[Note: parts]
Each rank writes files of its own. Tensors that it has whole are written as they are. Of others it writes a run of
elements, in the order in which the parameter lies in memory. So a file has one writer. A rank that loads reads a run of
elements too. It is cut at other places if there are other ranks. Which bytes it reads follows from the cuts of the
file's tensors and the bounds of its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ps_core.engine._checkpoint.safetensors_format import TensorEntry


@dataclass(frozen=True, slots=True)
class Layout:
    """Locate a tensor's elements: from ``offset`` on in a group that is cut into shards of ``shard_numel``."""

    offset: int
    shard_numel: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file that one rank reads."""

    start: int
    stop: int
    reader: int
    entry: TensorEntry
    first: int = 0
    """The index in the tensor, in memory order, of the first element."""
    wanted: bool = True
    """False if they are read for the checksum only."""


def cut(layout: Layout, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Cut a run of elements at shard borders; yield the shard, the first element and the count."""
    stop = first + count
    while first < stop:
        shard = (layout.offset + first) // layout.shard_numel
        end = min(stop, (shard + 1) * layout.shard_numel - layout.offset)
        yield shard, first, end - first
        first = end


def spans(
    start: int, entries: Iterable[TensorEntry], layout_of: Callable[[TensorEntry], Layout | None]
) -> Iterator[FileRange]:
    """Yield the file's byte ranges in order, each with the rank that reads it.

    Rank 0 reads ranges that no rank needs (no layout), for the checksum.
    """
    for entry in entries:
        size, layout = entry.dtype.itemsize, layout_of(entry)
        if layout is None:
            yield FileRange(start, start + entry.nbytes, 0, entry, wanted=False)
        elif not entry.nbytes:
            before = max(layout.offset - 1, 0)  # an empty tensor at a group's end is not in the shard after the last
            yield FileRange(start, start, before // layout.shard_numel, entry, entry.first)
        else:
            for shard, first, count in cut(layout, entry.first, entry.numel):
                at = start + (first - entry.first) * size
                yield FileRange(at, at + count * size, shard, entry, first)
        start += entry.nbytes


def runs(found: Iterable[FileRange]) -> list[tuple[int, int, int]]:
    """Join neighbouring ranges of one reader; return reader, first byte and end of each."""
    rows: list[tuple[int, int, int]] = []
    for each in found:
        if rows and rows[-1][0] == each.reader and rows[-1][2] == each.start:
            rows[-1] = (each.reader, rows[-1][1], each.stop)
        elif each.stop > each.start:
            rows.append((each.reader, each.start, each.stop))
    return rows


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two strides put the elements of a tensor in the same order."""
    return all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def plain_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))

"""Which bytes of which file hold which elements of a tensor, and which process reads them: pure bookkeeping.

[Note: parts]
Where several processes save, each writes files of its own: tensors of which it has all, as they are, and of others a
run of elements, in the order in which the parameter lies in memory. So a file has one writer. A reader wants a run of
elements too, cut at other places if there are other processes; what a file's bytes are to each follows from where the
file's tensors are cut and where the reader's shards are, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ps_core.engine._checkpoint.safetensors_format import TensorEntry


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor's elements are kept: from ``offset`` on in a group that is cut into shards of so many."""

    offset: int
    shard_numel: int


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file that one process reads."""

    start: int
    stop: int
    reader: int
    entry: TensorEntry
    first: int = 0
    """The first of these elements in the tensor, in memory order."""
    wanted: bool = True
    """Whether they are put anywhere; else they are read for the checksum."""


def cut(layout: Layout, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Elements of a tensor by shard: which one, the first of them, and how many."""
    stop = first + count
    while first < stop:
        shard = (layout.offset + first) // layout.shard_numel
        end = min(stop, (shard + 1) * layout.shard_numel - layout.offset)
        yield shard, first, end - first
        first = end


def spans(
    start: int, entries: Iterable[TensorEntry], layout_of: Callable[[TensorEntry], Layout | None]
) -> Iterator[FileRange]:
    """Every byte of a file's tensors, in order; what nobody wants (no layout) is for the first process."""
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
    """What lies side by side and has one reader, taken together: reader, first byte, end."""
    rows: list[tuple[int, int, int]] = []
    for each in found:
        if rows and rows[-1][0] == each.reader and rows[-1][2] == each.start:
            rows[-1] = (each.reader, rows[-1][1], each.stop)
        elif each.stop > each.start:
            rows.append((each.reader, each.start, each.stop))
    return rows


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides lay the elements of a tensor down alike."""
    return all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def plain_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of rows one after another."""
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))

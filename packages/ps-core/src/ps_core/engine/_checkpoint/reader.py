"""Tensors from files into a model: every process reads its part, and every byte is summed up by one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import torch

from ps_core._program import Kind
from ps_core.engine._checkpoint.crc32 import Checksum, joined, text_of
from ps_core.engine._checkpoint.direct_io import DoubleBuffer, buffers
from ps_core.engine._checkpoint.manifest import SavedCheckpoint
from ps_core.engine._checkpoint.ranks import CheckpointRanks
from ps_core.engine._checkpoint.safetensors_format import TensorEntry, bytes_of, damaged
from ps_core.engine._checkpoint.sections import (
    BUFFERS,
    EXTRA,
    OpenChunks,
    TensorSource,
    elements_of,
    largest_chunk_bytes,
    layout_of,
)
from ps_core.engine._checkpoint.shard_ranges import FileRange, Layout, plain_order, runs, same_order, spans
from ps_core.engine._checkpoint.tensor_files import TensorReader
from ps_core.engine._execution.engine import Engine
from ps_core.engine._parameters.state import ParamState

Targets = Mapping[str, TensorSource | None]
"""By the names of a file's tensors (not of its parts): where they go."""


@dataclass(frozen=True, slots=True)
class FullTensorLayout:
    """A tensor that is in parts."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """How it was laid down in memory where it was saved: parts are runs of that."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file with tensors in it."""

    path: Path
    start: int
    """Where the first of them begins."""
    entries: tuple[TensorEntry, ...]
    targets: Targets
    wholes: Mapping[str, FullTensorLayout] = field(default_factory=dict)
    """The tensors that parts are of."""
    head: bytes = b""
    """What is before ``start``, if there is a checksum."""
    checksum: str | None = None
    common: bool = False
    """Whether every process reads all of it."""
    version: tuple[int, ...] = ()
    """What `version_of` the file was, where there is no checksum."""

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def places(self) -> Iterator[tuple[TensorEntry, int]]:
        """Each of them, and where it begins."""
        at = self.start
        for entry in self.entries:
            yield entry, at
            at += entry.nbytes

    def shape_of(self, entry: TensorEntry) -> tuple[int, ...]:
        """Of the whole."""
        return self.wholes[entry.tensor].shape if entry.tensor else entry.shape


def stored(saved: SavedCheckpoint, targets: Mapping[str, Targets], rank: int | None) -> list[SavedFile]:
    """Return the files that one process reads, or with ``rank`` None all files, of the sections in ``targets``."""
    shapes = {name: tuple(row["shape"]) for name, row in saved.manifest["parameters"].items()}
    wholes = {
        name: FullTensorLayout(shape, tuple(saved.orders.get(name, plain_order(shape))))
        for name, shape in shapes.items()
    }
    return [
        SavedFile(
            saved.path / file.name,
            len(file.table),
            file.entries,
            targets[file.section],
            wholes,
            file.table,
            saved.sums[file.name],
            common=file.section in (BUFFERS, EXTRA),
        )
        for file in (saved.files if rank is None else saved.files_for(rank))
        if file.section in targets
    ]


class Reader:
    """One process's reading of some files."""

    def __init__(self, engine: Engine, ranks: CheckpointRanks) -> None:
        self._engine, self._ranks = engine, ranks

    def read(self, files: Sequence[SavedFile]) -> None:
        """Fill the targets; `CheckpointDamaged` on every process if a byte of any file is another."""
        rows = {file.path: self._spans(file) for file in files}
        sums: dict[Path, list[int]] = {}
        with (
            self._ranks.all_or_none("reading weights"),
            buffers(largest_chunk_bytes(self._engine)) as pair,
            OpenChunks(self._engine, write=True) as chunks,
            torch.no_grad(),
        ):
            for file in files:
                mine = [each for each in rows[file.path] if self._is_mine(file, each)]
                sums[file.path] = _read(file, mine, chunks, pair) if mine else []
            self._turn(files, chunks)
        self._check(files, rows, sums)
        for record in {held[0]: None for file in files for held in file.targets.values() if _is_managed(held)}:
            record.mark_replaced()

    def _spans(self, file: SavedFile) -> list[FileRange]:
        def layout(entry: TensorEntry) -> Layout | None:
            held = file.targets.get(entry.owner)
            if held is None or self._is_odd(file, entry, held):
                return None
            return Layout(0, max(1, entry.numel)) if isinstance(held, torch.Tensor) else layout_of(held[0])

        found = spans(file.start, file.entries, layout)
        return [replace(each, reader=self._ranks.shard) for each in found] if file.common else list(found)

    def _is_mine(self, file: SavedFile, span: FileRange) -> bool:
        return span.reader == self._ranks.shard and (span.wanted or file.checksum is not None)

    def _turn(self, files: Sequence[SavedFile], chunks: OpenChunks) -> None:
        """What is not read in order, each tensor by way of the whole."""
        odd = {
            entry.owner: (file, held)
            for file in files
            for entry in file.entries
            if (held := file.targets.get(entry.owner)) is not None and self._is_odd(file, entry, held)
        }
        for name, (file, held) in odd.items():
            same = [each for each in files if each.targets is file.targets]
            if isinstance(held, torch.Tensor):
                held.copy_(read_full_tensor(same, name, held.shape, plain_order(held.shape)).view(held.shape))
            elif mine := elements_of(held[0], self._ranks.shard):
                turned = read_full_tensor(same, name, held[0].shape, held[0].stride)
                chunks.elements(held, mine.start, len(mine)).copy_(turned[mine.start : mine.stop])

    def _is_odd(self, file: SavedFile, entry: TensorEntry, held: TensorSource) -> bool:
        """Whether a process does not read a run of the file's elements as they come."""
        if isinstance(held, torch.Tensor):
            return self._ranks.shards > 1 and not file.common  # all want it, and each byte is summed up by one
        record = held[0]
        if not entry.tensor and any(len(elements_of(record, shard)) == record.numel for shard in _shards_of(record)):
            return False  # whole here as it is there, so it may be copied in any order
        return not same_order(record.shape, _order(file, entry, record.shape), record.stride)

    def _check(
        self, files: Sequence[SavedFile], rows: Mapping[Path, list[FileRange]], sums: Mapping[Path, list[int]]
    ) -> None:
        """Put the sums of what each process read together; files without a checksum must be as they were."""
        ranks = self._ranks
        changing, files = files, [file for file in files if file.checksum is not None]
        shared = [file for file in files if not file.common]
        read = {file.path: runs(rows[file.path]) for file in shared}
        counts = [sum(reader == shard for row in read.values() for reader, *_ in row) for shard in range(ranks.shards)]
        mine = [value for file in shared for value in sums[file.path]]
        told = ranks.rows(mine, "checksums of what was read", count=max(counts), shards_only=True)
        found = [iter(row) for row in told]
        with ranks.all_or_none("checking what was read"):
            for file in changing:
                if file.version and version_of(file.path) != file.version:
                    raise damaged(file.path, "it was written to while it was read")
            for index, file in enumerate(shared):
                pieces = [(next(found[reader]), stop - start) for reader, start, stop in read[file.path]]
                if index % ranks.shards == ranks.shard:
                    compare(file, pieces)
            for file in files:
                if file.common:
                    compare(file, [(sum_, file.nbytes) for sum_ in sums[file.path]])


def _read(file: SavedFile, mine: Sequence[FileRange], chunks: OpenChunks, pair: DoubleBuffer) -> list[int]:
    """These spans; the checksum of each run of them."""
    ranges = [(start, stop) for _, start, stop in runs(mine)]
    with readable(file.path), closing(TensorReader(file.path, ranges, pair)) as source:
        for span in mine:
            held, dtype = file.targets.get(span.entry.owner), span.entry.dtype
            if held is None or not span.wanted:
                source.skip(span.stop - span.start)
            elif isinstance(held, torch.Tensor):
                source.take(dtype, held)
            elif not span.entry.tensor and span.stop - span.start == span.entry.nbytes:
                source.take(dtype, chunks.tensor(held))
            else:
                source.take(dtype, chunks.elements(held, span.first, (span.stop - span.start) // dtype.itemsize))
        return source.sums()


def version_of(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is exchanged or written to: its number, its size and its time of change."""
    with readable(path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What the system says of a file that is read as `CheckpointDamaged`."""
    try:
        yield
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


def compare(file: SavedFile, pieces: Sequence[tuple[int, int]]) -> None:
    """`CheckpointDamaged` unless every byte of the file is as it was written."""
    head = Checksum()
    head.update(file.head)
    found = text_of(joined([(head.value, len(file.head)), *pieces]))
    if found != file.checksum:
        raise damaged(file.path, f"its checksum is {found}, expected {file.checksum}: bytes have changed")


def _is_managed(held: TensorSource | None) -> TypeGuard[tuple[ParamState, Kind]]:
    return isinstance(held, tuple)


def _shards_of(record: ParamState) -> range:
    layout = layout_of(record)
    return range(layout.offset // layout.shard_numel, (layout.offset + record.numel) // layout.shard_numel + 1)


def _order(file: SavedFile, entry: TensorEntry, shape: Sequence[int]) -> tuple[int, ...]:
    return file.wholes[entry.tensor].stride if entry.tensor else plain_order(shape)


def read_full_tensor(files: Sequence[SavedFile], name: str, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """All elements of a tensor that is in these files, in the order that it has in memory with these strides."""
    found = [(file, entry, at) for file in files for entry, at in file.places() if entry.owner == name]
    file, entry, _ = found[0]
    order = _order(file, entry, shape)
    given = torch.empty(shape.numel(), dtype=entry.dtype)
    for part, piece, at in found:
        with readable(part.path), part.path.open("rb") as source:
            source.seek(at)
            if source.readinto(bytes_of(given[piece.first : piece.first + piece.numel])) != piece.nbytes:
                raise damaged(part.path, f"it ends in the midst of {piece.name!r}")
    if same_order(shape, order, stride):
        return given
    turned = torch.empty_like(given)
    turned.as_strided(shape, stride).copy_(given.as_strided(shape, order))
    return turned

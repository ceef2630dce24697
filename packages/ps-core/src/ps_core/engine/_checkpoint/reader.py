"""Read tensors from files into a model: each rank reads its part, and each byte is checked by one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import torch

from ps_core._extents import Kind
from ps_core.engine._checkpoint.checkpoint_tensors import (
    BUFFERS,
    EXTRA,
    OpenChunks,
    TensorSource,
    elements_of,
    largest_chunk_bytes,
    layout_of,
)
from ps_core.engine._checkpoint.crc32 import Checksum, joined, text_of
from ps_core.engine._checkpoint.direct_io import DoubleBuffer, TensorReader, buffers
from ps_core.engine._checkpoint.manifest import SavedCheckpoint, compare_checksums
from ps_core.engine._checkpoint.rank_errors import CheckpointRanks
from ps_core.engine._checkpoint.safetensors_format import TensorEntry, bytes_of, damaged
from ps_core.engine._checkpoint.shard_ranges import FileRange, Layout, plain_order, runs, same_order, spans
from ps_core.engine._execution.engine import Engine
from ps_core.engine._parameters.param_state import ParamState

Targets = Mapping[str, TensorSource | None]
"""The destination of each tensor of a file (not of a part); None: it is not used."""


@dataclass(frozen=True, slots=True)
class FullTensorLayout:
    """Describe a whole tensor whose parts are in several files."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Its strides in memory where it was saved: parts are runs of elements in that order."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of tensors, and their destinations."""

    path: Path
    start: int
    """The byte at which the first tensor begins."""
    entries: tuple[TensorEntry, ...]
    targets: Targets
    wholes: Mapping[str, FullTensorLayout] = field(default_factory=dict)
    """Tensors that files have in parts, by name."""
    head: bytes = b""
    """The bytes before ``start``, if there is a checksum."""
    checksum: str | None = None
    common: bool = False
    """True if every rank reads all of the file."""
    version: tuple[int, ...] = ()
    """The file's `version_of`, if there is no checksum."""

    @property
    def nbytes(self) -> int:
        """Return the size of the file's tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def places(self) -> Iterator[tuple[TensorEntry, int]]:
        """Yield each tensor, and the byte at which it begins."""
        at = self.start
        for entry in self.entries:
            yield entry, at
            at += entry.nbytes

    def shape_of(self, entry: TensorEntry) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self.wholes[entry.tensor].shape if entry.tensor else entry.shape


def stored(saved: SavedCheckpoint, targets: Mapping[str, Targets], rank: int | None) -> list[SavedFile]:
    """Return the files of the sections in ``targets`` that one process reads; ``rank`` None: all files."""
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
    """Read this rank's part of some files."""

    def __init__(self, engine: Engine, ranks: CheckpointRanks) -> None:
        self._engine, self._ranks = engine, ranks

    def read(self, files: Sequence[SavedFile]) -> None:
        """Fill the targets; raise `CheckpointDamaged` on every rank if a byte of any file has changed."""
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
            self._read_transposed(files, chunks)
        self._check(files, rows, sums)
        for record in {target[0]: None for file in files for target in file.targets.values() if _is_managed(target)}:
            record.mark_replaced()

    def _spans(self, file: SavedFile) -> list[FileRange]:
        def layout(entry: TensorEntry) -> Layout | None:
            target = file.targets.get(entry.owner)
            if target is None or self._needs_transpose(file, entry, target):
                return None
            return Layout(0, max(1, entry.numel)) if isinstance(target, torch.Tensor) else layout_of(target[0])

        found = spans(file.start, file.entries, layout)
        return [replace(each, reader=self._ranks.shard) for each in found] if file.common else list(found)

    def _is_mine(self, file: SavedFile, span: FileRange) -> bool:
        return span.reader == self._ranks.shard and (span.wanted or file.checksum is not None)

    def _read_transposed(self, files: Sequence[SavedFile], chunks: OpenChunks) -> None:
        """Read each tensor whose element order differs in the file as a whole."""
        for targets in {id(file.targets): file.targets for file in files}.values():
            section = [file for file in files if file.targets is targets]
            self._read_transposed_of(section, targets, chunks)

    def _read_transposed_of(self, files: Sequence[SavedFile], targets: Targets, chunks: OpenChunks) -> None:
        """Read them for one section, such as masters or one kind of states: names are the same in all of these."""
        odd = {
            entry.owner: target
            for file in files
            for entry in file.entries
            if (target := targets.get(entry.owner)) is not None and self._needs_transpose(file, entry, target)
        }
        for name, target in odd.items():
            if isinstance(target, torch.Tensor):
                target.copy_(read_full_tensor(files, name, target.shape, plain_order(target.shape)).view(target.shape))
            elif mine := elements_of(target[0], self._ranks.shard):
                turned = read_full_tensor(files, name, target[0].shape, target[0].stride)
                chunks.elements(target, mine.start, len(mine)).copy_(turned[mine.start : mine.stop])

    def _needs_transpose(self, file: SavedFile, entry: TensorEntry, target: TensorSource) -> bool:
        """Return True if this rank's elements are not one run of the file, and the whole tensor must be read."""
        if isinstance(target, torch.Tensor):
            return self._ranks.shards > 1 and not file.common  # all ranks want it, and one rank reads each byte
        record = target[0]
        if not entry.tensor and any(len(elements_of(record, shard)) == record.numel for shard in _shards_of(record)):
            return False  # whole on one rank as in the file, so it may be copied in any order
        return not same_order(record.shape, _order(file, entry, record.shape), record.stride)

    def _check(
        self, files: Sequence[SavedFile], rows: Mapping[Path, list[FileRange]], sums: Mapping[Path, list[int]]
    ) -> None:
        """Join the checksums of all ranks and compare; files without a checksum must not have changed meanwhile."""
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
    """Read these ranges; return the checksum of each run of them."""
    ranges = [(start, stop) for _, start, stop in runs(mine)]
    with readable(file.path), closing(TensorReader(file.path, ranges, pair)) as reader:
        for span in mine:
            target, dtype = file.targets.get(span.entry.owner), span.entry.dtype
            if target is None or not span.wanted:
                reader.skip(span.stop - span.start)
            elif isinstance(target, torch.Tensor):
                reader.read(dtype, target)
            elif not span.entry.tensor and span.stop - span.start == span.entry.nbytes:
                reader.read(dtype, chunks.tensor(target))
            else:
                reader.read(dtype, chunks.elements(target, span.first, (span.stop - span.start) // dtype.itemsize))
        return reader.sums()


def version_of(path: Path) -> tuple[int, ...]:
    """Return a file's inode number, size and change time: these change when the file is replaced or written."""
    with readable(path):
        found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise errors of the operating system as `CheckpointDamaged`, with the file's name."""
    try:
        yield
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


def compare(file: SavedFile, pieces: Sequence[tuple[int, int]]) -> None:
    """Raise `CheckpointDamaged` unless every byte of the file is as it was written.

    ``pieces``: the checksum and the size of each run of its tensors' bytes, in order.
    """
    head = Checksum()
    head.update(file.head)
    assert file.checksum is not None, "only checkpoints have checksums"
    compare_checksums(file.path, text_of(joined([(head.value, len(file.head)), *pieces])), file.checksum)


def _is_managed(target: TensorSource | None) -> TypeGuard[tuple[ParamState, Kind]]:
    return isinstance(target, tuple)


def _shards_of(record: ParamState) -> range:
    layout = layout_of(record)
    return range(layout.offset // layout.shard_numel, (layout.offset + record.numel) // layout.shard_numel + 1)


def _order(file: SavedFile, entry: TensorEntry, shape: Sequence[int]) -> tuple[int, ...]:
    return file.wholes[entry.tensor].stride if entry.tensor else plain_order(shape)


def read_full_tensor(files: Sequence[SavedFile], name: str, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """Return all elements of a tensor, in the order that they have in memory with these strides."""
    found = [(file, entry, at) for file in files for entry, at in file.places() if entry.owner == name]
    file, entry, _ = found[0]
    order = _order(file, entry, shape)
    given = torch.empty(shape.numel(), dtype=entry.dtype, device="cpu")
    for part, piece, at in found:
        with readable(part.path), part.path.open("rb") as opened:
            opened.seek(at)
            if opened.readinto(bytes_of(given[piece.first : piece.first + piece.numel])) != piece.nbytes:
                raise damaged(part.path, f"it ends in the midst of {piece.name!r}")
    if same_order(shape, order, stride):
        return given
    turned = torch.empty_like(given)
    turned.as_strided(shape, stride).copy_(given.as_strided(shape, order))
    return turned

"""Write and read ``manifest.json``, and ``checksums.sfv``, which has the checksum of every file.

[Note: damage]
``checksums.sfv`` is a list as `cksfv` writes it. It has the manifest's checksum too. The manifest says which tensors
each file has. From that the file's table and size follow to the byte. The checksums prove all other bytes while they
are read. If a writer with a bug leaves something out, the checksums are correct all the same: see `completeness`.

[Note: versions]
Version 2 is written, whether one rank saves or several. Every file has a writer. Files may have parts of tensors, each
with the name of its whole (see [Note: parts]). Their tables have a mark of the save, so that files of two saves are
told apart at once. States of random numbers are in a small file for each rank. Version 1, which a single process wrote
once, is still read. It has none of that, and the states of random numbers are in the manifest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ps_core._errors import CheckpointDamaged, CheckpointMismatch, InvalidInput
from ps_core._version import __version__
from ps_core.engine._checkpoint.atomic_folder import FORMAT, MANIFEST, SUMS, is_checkpoint, name_checkpoint_below
from ps_core.engine._checkpoint.completeness import wrong_tensors, wrong_values
from ps_core.engine._checkpoint.crc32 import Checksum
from ps_core.engine._checkpoint.direct_io import open_new
from ps_core.engine._checkpoint.json_values import decode
from ps_core.engine._checkpoint.rng_state import check_random_state
from ps_core.engine._checkpoint.safetensors_format import (
    TYPES,
    TensorEntry,
    damaged,
    no_key_twice,
    table_of,
    type_name,
    write_all,
)

READABLE, WRITTEN = (1, 2), 2
"""The versions that are read, and the one that is written; see [Note: versions]."""
_CHECKSUM = re.compile("[0-9A-F]{8}")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of tensors."""

    name: str
    section: str
    entries: tuple[TensorEntry, ...]
    writer: int = 0
    """The rank that writes it."""
    save: str = ""
    """The mark of the save; empty in version 1."""

    @property
    def table(self) -> bytes:
        """Return the bytes that the file begins with."""
        return table_of(self.entries, self.save)

    @property
    def nbytes(self) -> int:
        """Return the file's size."""
        return len(self.table) + sum(entry.nbytes for entry in self.entries)

    def row(self) -> dict[str, Any]:
        """Return the file's row of the manifest."""
        tensors = []
        for each in self.entries:
            part = [each.tensor, each.first] if each.tensor else []
            tensors.append([each.name, type_name(each.name, each.dtype), list(each.shape), *part])
        return {"section": self.section, "tensors": tensors, "writer": self.writer}


def cut(section: str, shares: Iterable[tuple[int, Sequence[TensorEntry]]], limit_bytes: int) -> list[ManifestFile]:
    """Distribute a section's tensors over files: as many of one writer as the limit allows, at least one."""
    parts: list[tuple[int, list[TensorEntry]]] = []
    for writer, entries in shares:
        size = limit_bytes
        for entry in entries:
            if size + entry.nbytes > limit_bytes or not parts or parts[-1][0] != writer:
                parts.append((writer, []))
                size = 0
            parts[-1][1].append(entry)
            size += entry.nbytes
    names = numbered(section, len(parts), "safetensors")
    return [ManifestFile(name, section, tuple(part), writer) for name, (writer, part) in zip(names, parts, strict=True)]


def numbered(name: str, count: int, ending: str) -> list[str]:
    """Return the names of ``count`` files."""
    if count == 1:
        return [f"{name}.{ending}"]
    return [f"{name}-{index:05}-of-{count:05}.{ending}" for index in range(1, count + 1)]


def marked(files: Iterable[ManifestFile], manifest: dict[str, Any], more: Sequence[int]) -> list[ManifestFile]:
    """Return the files with the mark of the save, a checksum of the manifest and of ``more``."""
    whole = Checksum()
    whole.update(_text(manifest))
    whole.update(repr(list(more)).encode())
    return [replace(each, save=whole.text) for each in files]


def write_manifest(folder: Path, manifest: dict[str, Any], files: Sequence[ManifestFile], sums: dict[str, str]) -> None:
    """Write the manifest and the checksums of all files."""
    rows = {file.name: file.row() for file in files}
    mark = next(file.save for file in files)
    about = {"format": FORMAT, "version": WRITTEN, "save": mark, "written_by": f"ps-core {__version__}"}
    whole = {**about, **manifest, "files": rows}
    text = _text(whole)
    write_text(folder / MANIFEST, text)
    write_text(folder / SUMS, _sums({MANIFEST: _checksum(text), **sums}))


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, allow_nan=False) + "\n").encode()


def _sums(sums: dict[str, str]) -> bytes:
    return "".join(f"{name} {checksum}\n" for name, checksum in sums.items()).encode()


def _checksum(text: bytes) -> str:
    whole = Checksum()
    whole.update(text)
    return whole.text


def write_text(path: Path, text: bytes, folder: int | None = None) -> int:
    """Write a small file, and sync it; return its checksum. ``folder``: see `DirectWriter`."""
    file = open_new(path, folder)
    try:
        write_all(file, memoryview(text))
        os.fsync(file)
    finally:
        os.close(file)
    whole = Checksum()
    whole.update(text)
    return whole.value


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint whose manifest is correct, and whose files have their original sizes and tables."""

    path: Path
    manifest: dict[str, Any]
    files: tuple[ManifestFile, ...]
    sums: dict[str, str]

    @property
    def ranks(self) -> int:
        """Return the number of ranks that saved it."""
        found: int = self.manifest.get("ranks", 1)
        return found

    @property
    def fingerprint(self) -> str:
        """Return a checksum that tells the checkpoint from others."""
        return _checksum(_sums(self.sums))

    @property
    def orders(self) -> dict[str, list[int]]:
        """Return the strides, by name, of tensors in parts that are not contiguous."""
        found: dict[str, list[int]] = self.manifest.get("orders", {})
        return found

    def files_for(self, rank: int) -> list[ManifestFile]:
        """Return the files that one rank reads: all, except other writers' copies of the buffers."""
        mine = rank % self.ranks
        if not any(file.section == "buffers" and file.writer == mine for file in self.files):
            mine = 0
        return [file for file in self.files if file.section != "buffers" or file.writer == mine]

    def random_of(self, rank: int) -> dict[str, Any]:
        """Return the states of a rank's random numbers, checked."""
        names = self.manifest.get("random_files", [])
        path = self.path / (names[rank % len(names)] if names else MANIFEST)
        try:
            found = json.loads(self.read_small(path.name)) if names else self.manifest["random"]
            state: dict[str, Any] = decode(found, _no_tensor)
            check_random_state(state)
        except (LookupError, TypeError, ValueError) as error:
            raise damaged(path, f"the states of random numbers in it cannot be taken over ({error})") from None
        return state

    def read_small(self, name: str) -> bytes:
        """Return the bytes of a small file; raise `CheckpointDamaged` unless its checksum is right."""
        text = _read(self.path / name)
        compare_checksums(self.path / name, _checksum(text), self.sums[name])
        return text


def read_manifest(path: Path, *, files_too: bool = True) -> SavedCheckpoint:
    """Read a checkpoint's manifest, and check all but the tensors' bytes; see [Note: damage].

    With ``files_too`` false, only the manifest is checked.
    """
    if not is_checkpoint(path):
        below = name_checkpoint_below(path)
        raise InvalidInput(f"there is no checkpoint at {path}: expected a folder that save_checkpoint wrote{below}")
    sums = _read_sums(path)
    text = _read(path / MANIFEST)
    compare_checksums(path / MANIFEST, _checksum(text), sums[MANIFEST])
    manifest = _parsed(path / MANIFEST, text)
    _refuse(path, wrong_values(manifest))
    mark = manifest.get("save", "")
    files = tuple(_file(name, row, mark) for name, row in manifest["files"].items())
    _refuse(path, wrong_tensors(manifest, [(file.section, file.writer, file.entries) for file in files]))
    small = manifest.get("random_files", [])
    if sums.keys() != {MANIFEST, *(file.name for file in files), *small}:
        raise damaged(path / SUMS, "it names other files than the manifest does")
    saved = SavedCheckpoint(path, manifest, files, sums)
    if files_too:
        for file in files:
            _check_file(path / file.name, file)
        for name in small:
            saved.read_small(name)
    return saved


def compare_checksums(path: Path, found: str, recorded: str) -> None:
    """Raise `CheckpointDamaged` unless a file has the recorded checksum.

    Damage to a file changes most of its checksum's digits. Where one digit differs, the record is damaged.
    """
    if found == recorded:
        return
    if sum(one != other for one, other in zip(found, recorded, strict=True)) == 1:
        raise damaged(path.with_name(SUMS), f"it says {recorded} for {path.name}, which has {found}: one digit differs")
    raise CheckpointDamaged(
        f"{path}: its checksum is {found}, and {SUMS} says {recorded}, so one of these two files is damaged; take "
        "another checkpoint, or copy both files anew from where they are whole"
    )


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Return the manifest's values; raise `CheckpointMismatch` if its version is not known."""
    try:
        manifest = json.loads(text, object_pairs_hook=no_key_twice)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it cannot be read as JSON ({error})") from None
    if not isinstance(manifest, dict) or not {"format", "version"} <= manifest.keys():
        raise damaged(path, "it says neither its 'format' nor its 'version'")
    kind, version = manifest["format"], manifest["version"]
    if kind != FORMAT or type(version) is not int or version not in READABLE:
        known = " or ".join(map(str, READABLE))
        raise CheckpointMismatch(
            f"{path.parent} is a {kind!r} of version {version}, expected {FORMAT!r} of version {known}: load it "
            f"with the version that wrote it ({manifest.get('written_by')})"
        )
    return manifest


def _refuse(path: Path, wrong: Iterator[str]) -> None:
    """Raise `CheckpointDamaged` for the first fault; the others may follow from it."""
    first = next(wrong, None)
    if first is not None:
        raise damaged(path / MANIFEST, f"its checksum is right, but {first}: whatever wrote it has a bug")


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"it refers to a tensor {name!r}")


def _file(name: str, row: dict[str, Any], save: str) -> ManifestFile:
    entries = [TensorEntry(tensor, TYPES[dtype], tuple(shape), *part) for tensor, dtype, shape, *part in row["tensors"]]
    return ManifestFile(name, row["section"], tuple(entries), row.get("writer", 0), save)


def _check_file(path: Path, file: ManifestFile) -> None:
    table = file.table
    found = _read(path, len(table))
    size = path.stat().st_size
    if size != file.nbytes:
        raise damaged(path, f"it has {size:,} bytes, expected {file.nbytes:,}")
    if found != table:
        other = re.search(rb'^.{8}{"__metadata__":{"format":"pt","save":"(\w+)"', found, re.DOTALL)
        if other and other[1].decode() != file.save:
            raise damaged(path, f"it is a part of another save (its mark is {other[1].decode()}, not {file.save})")
        raise damaged(path, "its table is not the one that was written")


def _read_sums(path: Path) -> dict[str, str]:
    text = _read(path / SUMS)
    try:
        sums = dict(line.split(" ") for line in text.decode().splitlines())
    except ValueError:
        sums = {}
    if _sums(sums) != text or MANIFEST not in sums or not all(map(_CHECKSUM.fullmatch, sums.values())):
        raise damaged(path / SUMS, "it is not a list of checksums and files")
    return sums


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error

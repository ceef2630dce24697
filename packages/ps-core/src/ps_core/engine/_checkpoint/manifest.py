"""What a checkpoint says of itself: ``manifest.json``, and the checksums of every file, that one's included.

[Note: damage]
``checksums.sfv`` is a list as `cksfv` writes it. It vouches for the manifest; the manifest says which tensors each file
has, from which the file's table and size follow to the byte; and the checksums vouch for the rest, while it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_core._errors import CheckpointMismatch, InvalidInput
from ps_core._version import __version__
from ps_core.engine._checkpoint.direct import Checksum
from ps_core.engine._checkpoint.folder import MANIFEST
from ps_core.engine._checkpoint.safetensors import TYPES, Entry, damaged, table_of, type_name, write_all

SUMS = "checksums.sfv"
FORMAT, VERSION = "ps-core checkpoint", 1


@dataclass(frozen=True, slots=True)
class File:
    """One file of tensors."""

    name: str
    section: str
    entries: tuple[Entry, ...]

    @property
    def table(self) -> bytes:
        """What it begins with."""
        return table_of(self.entries)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self.table) + sum(entry.nbytes for entry in self.entries)


def cut(section: str, entries: Iterable[Entry], limit_bytes: int) -> list[File]:
    """A section's files: as many tensors in each as the limit allows, but at least one."""
    parts: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not parts or size + entry.nbytes > limit_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.nbytes
    if len(parts) == 1:
        return [File(f"{section}.safetensors", section, tuple(parts[0]))]
    count = len(parts)
    return [
        File(f"{section}-{index:05}-of-{count:05}.safetensors", section, tuple(part))
        for index, part in enumerate(parts, 1)
    ]


def write_manifest(folder: Path, manifest: dict[str, Any], files: Iterable[File], sums: dict[str, str]) -> None:
    """Write both, to the disk."""
    rows = {
        file.name: {
            "section": file.section,
            "tensors": [[each.name, type_name(each.name, each.dtype), list(each.shape)] for each in file.entries],
        }
        for file in files
    }
    whole = {"format": FORMAT, "version": VERSION, "written_by": f"ps-core {__version__}", **manifest, "files": rows}
    text = _text(whole)
    _write(folder / MANIFEST, text)
    _write(folder / SUMS, _sums({MANIFEST: _checksum(text), **sums}))


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, allow_nan=False) + "\n").encode()


def _sums(sums: dict[str, str]) -> bytes:
    return "".join(f"{name} {checksum}\n" for name, checksum in sums.items()).encode()


def _checksum(text: bytes) -> str:
    whole = Checksum()
    whole.update(text)
    return whole.text


def _write(path: Path, text: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(file, memoryview(text))
        os.fsync(file)
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint whose manifest is sound, and whose files have the sizes and tables they had."""

    path: Path
    manifest: dict[str, Any]
    files: tuple[File, ...]
    sums: dict[str, str]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one of ours."""
    return (path / SUMS).is_file() or (path / MANIFEST).is_file()


def read_manifest(path: Path) -> Saved:
    """A checkpoint, all but its tensors checked; see [Note: damage]."""
    if not path.is_dir():
        raise InvalidInput(f"there is no checkpoint at {path}: expected a folder that save_checkpoint wrote")
    sums = _read_sums(path)
    text = _read(path / MANIFEST)
    if _checksum(text) != sums.get(MANIFEST):
        raise damaged(path / MANIFEST, f"its checksum is not what {SUMS} says")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT or manifest["version"] != VERSION:
        raise CheckpointMismatch(
            f"{path} is a {manifest['format']!r} of version {manifest['version']}, expected {FORMAT!r} of version "
            f"{VERSION}: load it with the version that wrote it ({manifest['written_by']})"
        )
    files = tuple(
        File(
            name,
            row["section"],
            tuple(Entry(tensor, TYPES[dtype], tuple(shape)) for tensor, dtype, shape in row["tensors"]),
        )
        for name, row in manifest["files"].items()
    )
    if sums.keys() != {MANIFEST, *(file.name for file in files)}:
        raise damaged(path / SUMS, "it names other files than the manifest does")
    for file in files:
        _check_file(path / file.name, file)
    return Saved(path, manifest, files, sums)


def _check_file(path: Path, file: File) -> None:
    table = file.table
    found = _read(path, len(table))
    size = path.stat().st_size
    if size != file.nbytes:
        raise damaged(path, f"it has {size:,} bytes, expected {file.nbytes:,}")
    if found != table:
        raise damaged(path, "its table is not the one that was written")


def _read_sums(path: Path) -> dict[str, str]:
    text = _read(path / SUMS)
    try:
        sums = dict(line.split(" ") for line in text.decode().splitlines())
    except ValueError:
        sums = {}
    if _sums(sums) != text or MANIFEST not in sums:
        raise damaged(path / SUMS, "it is not a list of checksums and files")
    return sums


def _read(path: Path, count: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error

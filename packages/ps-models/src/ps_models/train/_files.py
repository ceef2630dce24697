"""Files that are either as they were or wholly new, whenever the process ends."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

from ps_core._errors import CheckpointDamaged

_DOOMED, _NEW = ".removed-", ".new"
_SUMS = "checksums.sfv"
_PIECE_BYTES = 2**22


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once."""
    beside = path.with_name(f".{path.name}{_NEW}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was renamed in a folder last."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove_whole(folder: Path) -> None:
    """Remove a folder; it is gone under its name before anything in it is."""
    doomed = folder.with_name(_DOOMED + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clear(parent: Path) -> None:
    """Finish removals that were cut short, and remove what half-written files and checkpoints left."""
    for pattern in (f"{_DOOMED}*", ".step-*.ps-partial"):
        for each in parent.glob(pattern):
            shutil.rmtree(each, ignore_errors=True)
    for each in parent.glob(f".*{_NEW}"):
        each.unlink()


def check_whole(checkpoint: Path) -> None:
    """`CheckpointDamaged` unless every file of a checkpoint has the bytes that were written; nothing is loaded."""
    try:
        rows = [line.split(" ") for line in (checkpoint / _SUMS).read_text("utf-8").splitlines()]
        changed = [name for name, written in rows if f"{_sum_of(checkpoint / name):08X}" != written]
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{checkpoint}: it cannot be read ({error})") from error
    if changed or not rows:
        raise CheckpointDamaged(f"{checkpoint / (changed or [_SUMS])[0]}: these are not the bytes that were written")


def _sum_of(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found = zlib.crc32(piece, found)
    return found

"""Files that are either as they were or wholly new, whenever the process ends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_DOOMED, _NEW = ".removed-", ".new"


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
    for pattern in (f"{_DOOMED}*", ".step-*.partial"):
        for each in parent.glob(pattern):
            shutil.rmtree(each, ignore_errors=True)
    for each in parent.glob(f".*{_NEW}"):
        each.unlink()

"""Write small files so that they are either unchanged or wholly new, whenever the process ends."""

from __future__ import annotations

import os
from pathlib import Path

UNFINISHED = ".new"
"""The end of a file's name until the file is complete."""


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file atomically; it and its name are on the disk when this returns."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk, so that new or renamed files in it survive a crash."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""Write small files so that they are either unchanged or wholly new, whenever the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".new"
"""The end of a file's name until the file is complete."""


def write_text_atomically(path: Path, text: str) -> None:
    """Replace a file atomically; it and its name are on the disk when this returns."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    with naming(path), unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system that names none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk, so that new or renamed files in it survive a crash."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

"""Read files that a user names, and check the names that such files give."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PureWindowsPath

from ps_core._units import format_bytes

MOST_BYTES = 2**24
"""The longest text that is read: no model's configuration or machine file comes near."""


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return a regular file's text; raise `ValueError` for a device, a pipe, or more than ``most_bytes``.

    Some devices never end, so they would be read until memory is full. Like ``open``, raise `OSError` for a file that
    is not there.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise ValueError("expected a regular file, found a device or a pipe")
    with path.open("rb") as file:
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ValueError(f"too long: expected at most {format_bytes(most_bytes)}")
    return text.decode("utf-8")


def stays_inside(name: str) -> bool:
    """Return True for the name of a file in the same folder, or below: neither absolute nor with ``..`` in it.

    Such a file may still be a link to another place: whoever owns the folder made that.
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character, as JSON can write it
        return False
    path = PureWindowsPath(name)  # it knows both kinds of slashes, and drives
    return bool(path.parts) and not path.anchor and ".." not in path.parts and "\0" not in name

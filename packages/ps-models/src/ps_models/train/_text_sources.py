"""Read documents: the standard library's source, text files, JSON lines."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ps_core._errors import InvalidInput

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders of the standard library that not every Python has, or that are not it."""
TEXT = frozenset({".txt", ".md", ".rst", ".py", ".html", ".c", ".h", ".json", ".csv", ".xml", ".tex"})
"""What a folder given as ``--data`` is searched for, besides ``.jsonl``."""
TOKENS = frozenset({".bin", ".npy"})


def standard_library() -> Iterator[bytes]:
    """Yield every module of Python's standard library, in the order of their paths."""
    top = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_walk(top), key=lambda path: path.relative_to(top).as_posix()):
        if path.suffix == ".py" and not path.is_symlink():
            yield path.read_bytes()


def documents(path: Path) -> Iterator[bytes]:
    """Yield the documents of a file (one, or one a line for JSON lines), or of all files of a folder."""
    if path.is_dir():
        for each in sorted(_walk(path)):
            if each.suffix in TEXT or each.suffix == ".jsonl":
                yield from documents(each)
        return
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path)
        else:
            yield path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"--data: cannot read {str(path)!r}: {error.strerror}; allowed is what can be") from error


def _walk(top: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(top):
        inner[:] = [name for name in inner if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in files)


def _json_lines(path: Path) -> Iterator[bytes]:
    """Yield the documents of a file whose lines are texts, or objects with a text under ``text``."""
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                found = found["text"] if isinstance(found, dict) else found
                yield found.encode("utf-8", "surrogatepass")
            except (ValueError, KeyError, AttributeError, RecursionError):
                raise InvalidInput(
                    f"--data: line {count} of {str(path)!r} is {line[:40].decode('utf-8', 'replace')!r}; allowed is a "
                    'JSON text, or an object with a text under "text"'
                ) from None

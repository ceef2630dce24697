"""Read documents: the standard library's source, text files, JSON lines, tables."""

from __future__ import annotations

import importlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ps_core._errors import InvalidInput
from ps_core._install_hints import how_to_install
from ps_models.train._examples import ALLOWED, Document, document_of

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
"""Folders in the standard library that not every Python has, or that are not part of it."""
TEXT = frozenset({".txt", ".md", ".rst", ".py", ".html", ".c", ".h", ".json", ".csv", ".xml", ".tex"})
"""Endings of text files in a folder for ``--data``, besides ``.jsonl`` and tables."""
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
"""Endings of tables, and the readers for them in the package datasets."""
TOKENS = frozenset({".bin", ".npy"})
_NAMED_ENDINGS = 4
"""Endings of files in a folder that are not read, at most, in a message."""


def standard_library() -> Iterator[bytes]:
    """Yield every module of Python's standard library, in the order of their paths."""
    top = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(_files_in(top, LEFT_OUT), key=lambda path: path.relative_to(top).as_posix()):
        if path.suffix == ".py" and not path.is_symlink():
            yield path.read_bytes()


def documents(path: Path, option: str = "--data") -> Iterator[Document]:
    """Yield the documents of a file (one, or one a line or row), or of all files of a folder.

    Of a folder, what has a name that begins with a dot is left out.
    """
    if path.is_dir():
        for each in sorted(_files_in(path)):
            if _is_read(each):
                yield from documents(each, option)
        return
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, option)
        elif path.suffix in TABLES:
            yield from _table_rows(path, option)
        else:
            yield path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"{option}: cannot read {str(path)!r}: {error.strerror}; allowed is a file that you may read"
        ) from error


def told_of_unread(names: Iterable[str | Path]) -> str:
    """Return in words which files of folders are not read, for their endings; empty if all are read.

    Hidden files are not counted. A folder without any other file is named.
    """
    folders = {path: list(_files_in(path)) for path in map(Path, names) if path.is_dir()}
    found = Counter(each.suffix for files in folders.values() for each in files if not _is_read(each))
    if not found:
        empty = next((path for path, files in folders.items() if not files), None)
        return "" if empty is None else f"; {str(empty)!r} has no files, hidden ones aside"
    rows = sorted(found.items(), key=lambda row: (-row[1], row[0]))
    named = [f"{ending or 'no ending'} {count:,}" for ending, count in rows[:_NAMED_ENDINGS]]
    named += ["..."] * (len(rows) > _NAMED_ENDINGS)
    files = "1 file" if found.total() == 1 else f"{found.total():,} files"
    return f"; {files} not read, for their endings ({', '.join(named)})"


def _is_read(path: Path) -> bool:
    return path.suffix in TEXT or path.suffix in TABLES or path.suffix == ".jsonl"


def _files_in(top: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield all files in and below a folder but hidden ones, and those in hidden folders or folders of these names."""
    for folder, inner, files in os.walk(top):
        inner[:] = [name for name in inner if name not in left_out and not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _json_lines(path: Path, option: str) -> Iterator[Document]:
    """Yield the document of each line that is not empty."""
    with path.open("rb") as file:
        for count, line in enumerate(file, 1):
            if not line.strip():
                continue
            place, shown = (
                f"{option}: line {count} of {str(path)!r}",
                repr(line.strip()[:40].decode("utf-8", "replace")),
            )
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                raise InvalidInput(f"{place} is {shown}; allowed is {ALLOWED}") from None
            yield document_of(found, place, shown)


def _table_rows(path: Path, option: str) -> Iterator[Document]:
    """Yield the document of each row, read a few rows at a time."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise InvalidInput(
            f"{option}: {str(path)!r} needs the package datasets; allowed without it are JSON lines and text; to have "
            f"it: {how_to_install('datasets')}"
        ) from None
    try:
        rows = datasets.load_dataset(TABLES[path.suffix], data_files=str(path), split="train", streaming=True)
        for count, row in enumerate(rows, 1):
            place = f"{option}: row {count} of {str(path)!r}"
            yield document_of(row, place, f"a row with {', '.join(map(repr, row)) or 'nothing'}")
    except InvalidInput:
        raise
    except Exception as error:  # the package has its own, and those of pyarrow
        raise InvalidInput(
            f"{option}: cannot read {str(path)!r}: {' '.join(str(error).split())}; allowed is a table that the package "
            "datasets reads"
        ) from error

"""A checkpoint as a writer with a bug would have written it: manifest, tables and checksums agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from ps_core.engine._checkpoint import manifest as _manifest
from ps_core.engine._checkpoint.atomic_folder import MANIFEST, SUMS

RANDOM = "random.json"
Rows = dict[str, list[bytes]]
"""By file: the bytes of each of its tensors."""
Change = Callable[[dict[str, Any], Rows], object]
"""Changes a manifest and the tensors' bytes in place."""


class Original:
    """A sound checkpoint, and copies of it with a bug in them."""

    def __init__(self, path: Path) -> None:
        self.path, self._copies = path, 0
        self.manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        self.rows: Rows = {name: self._tensors(name, row) for name, row in self.manifest["files"].items()}
        if (path / RANDOM).is_file():  # one rank's: here a part of the manifest, so that it can be changed likewise
            self.manifest["random"] = json.loads((path / RANDOM).read_text())

    def _tensors(self, name: str, row: dict[str, Any]) -> list[bytes]:
        file = _manifest._file(name, row, self.manifest.get("save", ""))
        data, found, at = (self.path / name).read_bytes(), [], len(file.table)
        for entry in file.entries:
            found.append(data[at : at + entry.nbytes])
            at += entry.nbytes
        return found

    def places(self) -> list[tuple[str, int, str, str]]:
        """Every tensor: its file, which one it is there, its section and its name."""
        return [
            (name, index, row["section"], tensor[0])
            for name, row in self.manifest["files"].items()
            for index, tensor in enumerate(row["tensors"])
        ]

    def changed(self, change: Change) -> Path:
        """A copy in which everything follows from the changed manifest."""
        manifest, rows = deepcopy(self.manifest), deepcopy(self.rows)
        change(manifest, rows)
        random = json.dumps(manifest.pop("random", None)) + "\n"
        return self.written(json.dumps(manifest), manifest, rows, random)

    def written(self, text: str, manifest: dict[str, Any], rows: Rows, random: str | None = None) -> Path:
        """A copy with this text as its manifest; ``random``: of `RANDOM`, None: as it was."""
        self._copies += 1
        path = self.path.with_name(f"{self.path.name} copy {self._copies}")
        path.mkdir()
        sums = {MANIFEST: _manifest._checksum(text.encode())}
        (path / MANIFEST).write_text(text)
        files = manifest["files"] if isinstance(manifest.get("files"), dict) else self.manifest["files"]
        for name, row in files.items():
            try:
                table = _manifest._file(name, row, manifest.get("save", "")).table
            except (KeyError, TypeError, ValueError):  # it says nothing that a table could be made of
                table = b""
            data = table + b"".join(rows[name])
            (path / name).write_bytes(data)
            sums[name] = _manifest._checksum(data)
        small = manifest.get("random_files", self.manifest["random_files"])
        for name in small if isinstance(small, list) else []:
            shutil.copy(self.path / name, path / name)
            if name == RANDOM and random is not None:
                (path / name).write_text(random)
            sums[name] = _manifest._checksum((path / name).read_bytes())
        (path / SUMS).write_bytes(_manifest._sums(sums))
        return path


def take_out(name: str, index: int) -> Change:
    """Leave a tensor of a file out."""

    def change(manifest: dict[str, Any], rows: Rows) -> None:
        del manifest["files"][name]["tensors"][index], rows[name][index]

    return change

"""A checkpoint's folder: it is there as a whole or not at all, whenever the process is killed.

[Note: siblings]
A save of ``runs/a`` writes ``runs/.a.ps-partial``, and has every file, the folder and its parent on the disk before it
goes on. If there is no ``runs/a`` yet, the folder is renamed to that. Else:

    1. ``.a.ps-partial`` becomes ``.a.ps-ready``: from here on the new one is what counts;
    2. ``a`` becomes ``.a.ps-previous``;
    3. ``.a.ps-ready`` becomes ``a``;
    4. ``.a.ps-previous`` is removed.

Whoever comes next (`recover`) removes a partial one, and carries on from a ready one. A save holds a lock on its new
folder for as long as it lives, so that it is not taken for a dead one's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ps_core._errors import InvalidInput, TierFailure

MANIFEST = "manifest.json"


class Folder:
    """Where a checkpoint is, and its siblings; see [Note: siblings]."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        if not self.path.name:
            raise InvalidInput(f"{os.fspath(path)!r} cannot be a checkpoint: name a folder below it")
        self._partial, self._ready, self._previous = (
            self.path.with_name(f".{self.path.name}.ps-{what}") for what in ("partial", "ready", "previous")
        )

    @contextmanager
    def replaced(self, *, overwrite: bool) -> Iterator[Path]:
        """An empty folder to write to, which takes the path's place if all goes well."""
        try:
            os.makedirs(self.path.parent, exist_ok=True)
            self.recover()
            self._check(overwrite)
            try:
                os.mkdir(self._partial)
            except FileExistsError:
                raise InvalidInput(f"{self.path} is being saved to by another process: wait for it") from None
            with _locked(self._partial, wait=True):
                try:
                    yield self._partial
                    _sync(self._partial)
                    self._check(overwrite)
                    self._publish()
                except BaseException:
                    shutil.rmtree(self._partial, ignore_errors=True)
                    raise
        except OSError as error:
            raise TierFailure(
                f"{error.filename or self.path}: the checkpoint could not be written ({error.strerror}). What was "
                "there before is as it was: make room or name another path, and save again"
            ) from error

    def _check(self, overwrite: bool) -> None:
        if not os.path.lexists(self.path):
            return
        if not overwrite:
            raise InvalidInput(f"{self.path} exists already: choose another path, or give overwrite=True")
        if not (self.path / MANIFEST).is_file():
            raise InvalidInput(f"{self.path} exists and is not a checkpoint, so it is not overwritten: choose another")

    def _publish(self) -> None:
        _sync(self.path.parent)
        if not self.path.exists():
            os.rename(self._partial, self.path)
            _sync(self.path.parent)
            return
        os.rename(self._partial, self._ready)
        self._exchange()

    def _exchange(self) -> None:
        """From a ready one on."""
        _sync(self.path.parent)
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            os.rename(self.path, self._previous)
        os.rename(self._ready, self.path)
        _sync(self.path.parent)
        shutil.rmtree(self._previous, ignore_errors=True)

    def recover(self) -> None:
        """Bring what a killed save left behind to a good end."""
        try:
            with _locked(self._ready, wait=not self.path.exists()):  # if somebody exchanges them now, it is soon done
                if self._ready.exists():
                    self._exchange()
        except OSError as error:
            if not self.path.exists() and self._ready.exists():
                raise TierFailure(f"{self._ready} cannot become {self.path} ({error.strerror}): rename it") from error
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
        with suppress(OSError), _locked(self._partial):
            shutil.rmtree(self._partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder; `BlockingIOError` if somebody else does, unless one is to wait for that."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:  # others: a file system without locks, where nobody may load while another saves
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(file)


def _sync(folder: Path) -> None:
    """Have a folder's names on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

"""Write a folder so that either all of it exists or nothing, even if the process is killed.

[Note: siblings]
A save of ``runs/a`` writes ``runs/.a.ps-partial``. It goes on once every file, the folder and its parent are on the
disk. If there is no ``runs/a`` yet, the folder is renamed to that. Else:

    1. ``.a.ps-partial`` becomes ``.a.ps-ready``: from here on the new one is what counts;
    2. ``a`` becomes ``.a.ps-previous``;
    3. ``.a.ps-ready`` becomes ``a``;
    4. ``.a.ps-previous`` is removed.

The next save or load (`recover`) removes a partial folder, and carries on from a ready one. A save holds a lock on its
new folder for as long as its process lives. So the folder is not taken for an abandoned one.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ps_core._atomic_files import sync_folder
from ps_core._errors import InvalidInput, TierFailure
from ps_core.engine._support.interrupts import defer_interrupts_installing

MANIFEST, SUMS = "manifest.json", "checksums.sfv"
FORMAT = "ps-core checkpoint"
_OURS = re.compile(
    r"(masters|exp_avg|exp_avg_sq|momentum_buffer|weights|buffers|extra|random)(-\d{5}-of-\d{5})?\.(safetensors|json)"
)
_SHOWN = 5
_LOOKS, _LOOK_S = 100, 0.1
"""How often a rank looks for rank 0's folder, and the seconds between: network file systems are slow."""


class AtomicFolder:
    """Manage a checkpoint's folder and its siblings; see [Note: siblings]."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checked_path(path).resolve()
        if not self.path.name:
            raise InvalidInput(f"{os.fspath(path)!r} cannot be a checkpoint: name a folder below it")
        self._partial, self._ready, self._previous = (
            self.path.with_name(f".{self.path.name}.ps-{what}") for what in ("partial", "ready", "previous")
        )

    @contextmanager
    def replaced(self, *, overwrite: bool) -> Iterator[Path]:
        """Make an empty folder to write to; it takes the path's place if the block raises nothing."""
        with as_tier_failure(self.path):
            os.makedirs(self.path.parent, exist_ok=True)
            self.recover()
            self._check(overwrite)
            try:
                os.mkdir(self._partial)
            except FileExistsError:
                raise InvalidInput(f"{self.path} is being saved to by another process: wait for it") from None
            keep_permissions(self.path, self._partial)
            with locked(self._partial, wait=True):
                try:
                    yield self._partial
                    sync_folder(self._partial)
                    self._check(overwrite)
                    self._publish()
                except BaseException:
                    shutil.rmtree(self._partial, ignore_errors=True)
                    raise

    def _check(self, overwrite: bool) -> None:
        if not os.path.lexists(self.path):
            return
        if not _is_ours(self.path / MANIFEST):
            raise InvalidInput(f"{self.path} exists and is not a checkpoint, so it is not overwritten: choose another")
        own, found = checkpoint_file_names(self.path), {each.name for each in self.path.iterdir()}
        others = sorted(found - own)
        if not own <= found:  # the list is damaged, or files are missing
            others = [name for name in others if not _OURS.fullmatch(name)]
        if others:
            shown = ", ".join(map(repr, others[:_SHOWN])) + (" and others" if len(others) > _SHOWN else "")
            raise InvalidInput(
                f"{self.path} holds a checkpoint and what is none of it ({shown}), so it is not overwritten: move that "
                "away, or choose another path"
            )
        if not overwrite:
            raise InvalidInput(f"{self.path} exists already: choose another path, or give overwrite=True")

    def find(self, marker: str) -> int:
        """Open the new folder in which rank 0 left a marker."""
        for _ in range(_LOOKS):
            with suppress(FileNotFoundError):
                file = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(FileNotFoundError):
                    os.stat(marker, dir_fd=file)
                    return file
                os.close(file)
            time.sleep(_LOOK_S)
        raise InvalidInput(
            f"{self.path}: rank 0 has begun to save there, and this rank cannot see it: give all ranks the same "
            "path, on a file system that all computers share"
        )

    @defer_interrupts_installing
    def _publish(self) -> None:
        sync_folder(self.path.parent)
        if not self.path.exists():
            os.rename(self._partial, self.path)
            sync_folder(self.path.parent)
            return
        os.rename(self._partial, self._ready)
        self._exchange()

    @defer_interrupts_installing
    def _exchange(self) -> None:
        """Put the ready folder in the path's place: steps 2 to 4 of the note. Ctrl-C waits, or it would leave two."""
        sync_folder(self.path.parent)
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
            os.rename(self.path, self._previous)
        os.rename(self._ready, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(self._previous, ignore_errors=True)

    def recover(self) -> None:
        """Finish or remove what a killed save left behind."""
        try:
            with locked(self._ready, wait=not self.path.exists()):  # wait, since a running exchange ends soon
                if os.path.exists(self._ready):
                    self._exchange()
        except OSError as error:
            if not self.path.exists() and os.path.exists(self._ready):
                raise TierFailure(f"{self._ready} cannot become {self.path} ({error.strerror}): rename it") from error
        if self.path.exists():
            shutil.rmtree(self._previous, ignore_errors=True)
        with suppress(OSError), locked(self._partial):
            shutil.rmtree(self._partial, ignore_errors=True)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an absolute one; raise `InvalidInput` if no file can have it."""
    try:
        found = Path(path).absolute()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(found)
    except (OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{str(path)!r} cannot be the path of a checkpoint or a file of weights: {why}") from None
    return found


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder has a checkpoint, whole or damaged."""
    return os.path.isfile(path / SUMS) or os.path.isfile(path / MANIFEST)


def name_checkpoint_below(path: Path) -> str:
    """Return words that name the newest checkpoint in a folder or in its folders; empty if there is none."""
    found = [each for depth in ("[!.]*", "[!.]*/[!.]*") for each in path.glob(f"{depth}/{MANIFEST}") if _is_ours(each)]
    return f"; the newest checkpoint below it is {max(found, key=os.path.getmtime).parent}" if found else ""


def checkpoint_file_names(path: Path) -> set[str]:
    """Return the file names of the checkpoint at ``path``, even if it is damaged; none if it is no checkpoint."""
    try:
        lines = (path / SUMS).read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    return {SUMS, MANIFEST, *(line.split(" ")[0] for line in lines)} if is_checkpoint(path) else set()


def _is_ours(manifest: Path) -> bool:
    """Return True if a file begins as a manifest does."""
    begin = f'{{"format": "{FORMAT}"'.encode()
    try:
        with manifest.open("rb") as file:
            return file.read(len(begin)) == begin
    except OSError:
        return False


def keep_permissions(old: Path, new: Path) -> None:
    """Give ``new`` the permissions of ``old``, if that exists; the owner can always read and write it."""
    with suppress(OSError):
        mode = stat.S_IMODE(os.stat(old).st_mode)
        os.chmod(new, mode | (stat.S_IRWXU if stat.S_ISDIR(os.stat(new).st_mode) else stat.S_IRUSR | stat.S_IWUSR))


@contextmanager
def as_tier_failure(path: Path) -> Iterator[None]:
    """Raise errors of the operating system as `TierFailure`, with the file's name."""
    try:
        yield
    except OSError as error:
        raise TierFailure(
            f"{error.filename or path}: the checkpoint could not be written ({error.strerror}). What was "
            "there before is as it was: make room or name another path, and save again"
        ) from error


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder within the block; if another process has locked it, wait or raise `BlockingIOError`."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:  # others: a file system without locks, where no process may load while another saves
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(file)

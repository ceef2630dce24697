"""Keep a run's files, so that the run can resume whenever the process ends.

    OUT/
      options.toml            the options of the last call, for --config
      run.json                what the run is: options that cannot change, the data's digest
      metrics.jsonl           a row a step
      export/                 a model of transformers, or its adapters, once training has ended
      loss.svg, tide.svg      pictures of the loss, and of the last step's memory
      checkpoints/
        step-00000100/        complete, or not there under this name; damaged-step-... is one that broke later,
                              unsound-step-... one whose weights gave a loss that is not finite
        latest                the newest one's name; for people and other programs
        best                  with --keep-best: the best one's name and its validation loss

A checkpoint gets its name by a rename, and loses it by one. So every ``step-*`` is complete, and a run resumes from the
newest. ``metrics.jsonl`` is on the disk before the checkpoint is; rows beyond it are cut off on resuming.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ps_core._atomic_files import UNFINISHED, naming, write_text_atomically
from ps_core._errors import CheckpointDamaged, InvalidInput
from ps_core.engine import check_checkpoint
from ps_models.train._options import TrainOptions, flag_of
from ps_models.train._ranks import TrainingRanks

_STEP = re.compile(r"step-(\d{8,})")
UNFINISHED_EXPORT = ".export"
"""The folder that an export is written to, before it takes the place of an older one."""
_REMOVED = ".removed-"
"""The beginning of a folder's name while it is removed."""


class RunFolder:
    """One run's folder, which only this process uses while it is open."""

    def __init__(self, options: TrainOptions, digest: str) -> None:
        """Make or find the folder; raise `InvalidInput` if it holds another run, or another process uses it."""
        self.path = Path(options.out)
        self.checkpoints = self.path / "checkpoints"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(
                f"--out: cannot make {str(self.path)!r}: {error.strerror}; allowed is a folder that can be written to"
            ) from error
        self._sound = 0
        """The last step whose checkpoint is known to be sound; 0: none."""
        self._lock = _lock(self.path)
        try:
            self._claim(options, digest)
            _clear(self.path)
            _clear(self.checkpoints)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder for other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _claim(self, options: TrainOptions, digest: str) -> None:
        """Write what this run is, or check that a run begun in this folder is the same."""
        written, own = self.path / "run.json", {"options": options.identity, "data": digest}
        try:
            found = json.loads(written.read_text("utf-8"))
            differences = list(_differences(found, own))
        except FileNotFoundError:
            if begun(self.path):
                raise InvalidInput(
                    f"--out: {str(self.path)!r} holds a run without run.json; allowed is a new folder, or a whole run"
                ) from None
            found, differences = None, []
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(
                f"--out: cannot read {str(written)!r}: {' '.join(str(error).split())}; allowed is a new folder, or a "
                "whole run"
            ) from error
        if differences and begun(self.path):
            raise InvalidInput(
                f"--out: {str(self.path)!r} holds another run: {', '.join(differences)}; allowed are the same model "
                "and data options, or another --out"
            )
        if found is None or differences:
            write_text_atomically(written, json.dumps(own, indent=1) + "\n")
        write_text_atomically(self.path / "options.toml", options.to_toml())

    # ---- checkpoints ----

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        return _steps_in(self.checkpoints)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after a step."""
        return self.checkpoints / f"step-{step:08d}"

    def load_newest(
        self, load: Callable[[Path], Mapping[str, Any]], say: Callable[[str], None]
    ) -> Mapping[str, Any] | None:
        """Return what ``load`` returns for the newest checkpoint that is not damaged; None if there is none at all.

        A damaged one is renamed and skipped, since an older one is better than nothing. The oldest one's error is
        raised: the user decides whether to start anew.
        """
        steps = self.steps()
        for step in steps:
            try:
                found = load(self.checkpoint(step))
            except CheckpointDamaged as error:
                if step == steps[-1]:
                    raise
                renamed = self._rename_checkpoint(step)
                say(f"step {step} is passed over, and kept as {renamed}: {' '.join(str(error).split())}")
                continue
            self._point(step)
            return found
        return None

    def saved(self, step: int, keep: int, *, sound: bool, best: float | None = None) -> None:
        """Point to the newest checkpoint, and remove old ones, but not the last that is ``sound``.

        A checkpoint is sound once a loss of its weights was computed, and is finite. ``best``: the checkpoint is the
        best, with this validation loss; None: it is not.
        """
        self._sound = step if sound else self._sound
        self._point(step)
        if best is not None:
            self.set_best(step, best)
        wanted = {*self.steps()[:keep], step, self.best()[0], self._sound}
        for each in self.steps():
            if each not in wanted:
                _remove(self.checkpoint(each))

    def note_sound(self, step: int, keep: int) -> None:
        """Note that the newest checkpoint is sound, so that older ones may be removed."""
        if step > self._sound:
            self.saved(step, keep, sound=True)

    def drop_unsound(self, step: int) -> int:
        """Rename this checkpoint, if it exists, for its lack of a finite loss; return the newest one left."""
        if self.checkpoint(step).exists():
            self._rename_checkpoint(step, "unsound")
            (self.checkpoints / "latest").unlink(missing_ok=True)
        left = max(self.steps(), default=0)
        if left:
            self._point(left)
        return left

    def _point(self, step: int) -> None:
        write_text_atomically(self.checkpoints / "latest", self.checkpoint(step).name + "\n")

    def _rename_checkpoint(self, step: int, why: str = "damaged") -> Path:
        """Rename a checkpoint that is not to be resumed from."""
        renamed = self.checkpoints / f"{why}-{self.checkpoint(step).name}"
        shutil.rmtree(renamed, ignore_errors=True)
        self.checkpoint(step).rename(renamed)
        return renamed

    def metrics(self, step: int) -> MetricsFile:
        """Open the metrics, cut off after a step."""
        return MetricsFile(self.path / "metrics.jsonl", step)

    def best(self) -> tuple[int, float]:
        """Return the step of the best checkpoint and its validation loss; (0, infinity) before there is one."""
        try:
            name, loss = (self.checkpoints / "best").read_text("utf-8").split()
            return int(name.removeprefix("step-")), float(loss)
        except (OSError, ValueError):
            return 0, float("inf")

    def check_best(self, loaded: int, say: Callable[[str], None]) -> None:
        """Check the best checkpoint; if it is damaged or gone, report that and forget its loss.

        ``loaded``: the step that training resumes from, whose checkpoint was read already.
        """
        step, loss = self.best()
        if step in (0, loaded):
            return
        kept = ""
        try:
            check_checkpoint(self.checkpoint(step))
            return
        except (CheckpointDamaged, InvalidInput) as error:
            why = " ".join(str(error).split())
        if self.checkpoint(step).exists():
            kept = f" and kept as {self._rename_checkpoint(step)}"
        (self.checkpoints / "best").unlink()
        say(
            f"the best checkpoint, of step {step} with a validation loss of {loss:.4f}, is passed over{kept}: {why}; "
            "the next validation counts as the best so far"
        )

    def set_best(self, step: int, loss: float) -> None:
        """Note that a step's checkpoint is the best."""
        write_text_atomically(self.checkpoints / "best", f"{self.checkpoint(step).name} {loss!r}\n")


def begun(path: Path) -> bool:
    """Return True if a step was made in a run's folder; there may be no such folder."""
    rows, checkpoints = path / "metrics.jsonl", path / "checkpoints"
    return (checkpoints.is_dir() and any(_steps_in(checkpoints))) or (rows.is_file() and rows.stat().st_size > 0)


def _steps_in(checkpoints: Path) -> list[int]:
    found = (_STEP.fullmatch(each.name) for each in checkpoints.iterdir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def _differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    defaults = TrainOptions().identity  # for options that are newer than the run
    for name, value in own["options"].items():
        before = found["options"].get(name, defaults[name])
        if before != value:
            yield f"{flag_of(name)} {_shown(before)} there, {_shown(value)} now"
    if found["data"] != own["data"]:
        yield "--data other there than now"


def _shown(value: object) -> str:
    """Return an option's value as one gives it on the command line; yes or no for a flag."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _lock(path: Path) -> int | None:
    try:
        import fcntl
    except ImportError:  # not on Windows, where two runs in one folder are the user's to avoid
        return None
    try:
        number = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise InvalidInput(
            f"--out: cannot write in {str(path)!r}: {error.strerror}; allowed is a folder that can be written to"
        ) from error
    try:
        # Not flock, which the copies that the engine makes of this process would hold on to.
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return number  # on a file system without locks, where two runs are the user's to avoid
        os.close(number)
        raise InvalidInput(
            f"--out: {str(path)!r} is in use by another process; allowed is a folder nobody else trains in"
        ) from None
    return number


class MetricsFile:
    """Write the rows of ``metrics.jsonl``."""

    def __init__(self, path: Path, step: int) -> None:
        """Cut off the rows beyond ``step``, and an incomplete row; later rows are appended."""
        self._path, self._file = path, path.open("ab+")
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n") or _step_of(line) > step:
                break
            end += len(line)
        self._file.truncate(end)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        with naming(self._path):
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> None:
        """Sync what was written to the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity if the line is no row."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it is renamed before any file of it is removed."""
    removed = folder.with_name(_REMOVED + folder.name)
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def _clear(parent: Path) -> None:
    """Finish removals that were cut short, and remove half-written files and checkpoints."""
    for pattern in (f"{_REMOVED}*", ".step-*.ps-partial", UNFINISHED_EXPORT):
        for each in parent.glob(pattern):
            shutil.rmtree(each, ignore_errors=True)
    for each in parent.glob(f".*{UNFINISHED}"):
        each.unlink()


class FollowerRunFolder(RunFolder):
    """The folder as ranks other than 0 use it: they read checkpoints, and write their files of new ones."""

    def __init__(self, options: TrainOptions) -> None:
        """Find the folder, which rank 0 has made."""
        self.path = Path(options.out)
        self.checkpoints = self.path / "checkpoints"
        self._lock = None

    def metrics(self, step: int) -> MetricsFile:
        """Return metrics that write nothing: rank 0 does."""
        return NoMetricsFile()

    def saved(self, step: int, keep: int, *, sound: bool, best: float | None = None) -> None:
        """Do nothing: rank 0 removes old checkpoints."""

    def note_sound(self, step: int, keep: int) -> None:
        """Do nothing: rank 0 removes old checkpoints."""

    def drop_unsound(self, step: int) -> int:
        """Do nothing: rank 0 renames the checkpoint, and reports it."""
        return 0

    def check_best(self, loaded: int, say: Callable[[str], None]) -> None:
        """Do nothing: rank 0 checks it."""

    def set_best(self, step: int, loss: float) -> None:
        """Do nothing: rank 0 writes it."""

    def _point(self, step: int) -> None:
        pass

    def _rename_checkpoint(self, step: int, why: str = "damaged") -> Path:
        return self.checkpoint(step)


class NoMetricsFile(MetricsFile):
    """Write no metrics."""

    def __init__(self) -> None:
        """Open nothing."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def open_folder(options: TrainOptions, digest: str, ranks: TrainingRanks) -> RunFolder:
    """Make or find the run's folder on rank 0, then find it on the other ranks."""
    held = RunFolder(options, digest) if ranks.leads else None
    ranks.total(0.0)
    return held or FollowerRunFolder(options)

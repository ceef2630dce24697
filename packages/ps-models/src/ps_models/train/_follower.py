"""A run's folder as the processes see it that do not lead: they read checkpoints, and write their part of new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ps_models.train._folder import Metrics, RunFolder
from ps_models.train._options import TrainOptions
from ps_models.train._peers import Peers


def open_folder(options: TrainOptions, digest: str, peers: Peers) -> RunFolder:
    """Make or find the run's folder, which is the first process's; the others come when it is there."""
    held = RunFolder(options, digest) if peers.leads else None
    peers.total(0.0)
    return held or Followed(options)


class Followed(RunFolder):
    """The folder that the first process made; all share its file system."""

    def __init__(self, options: TrainOptions) -> None:
        """It is there already."""
        self.path = Path(options.out)
        self.checkpoints = self.path / "checkpoints"
        self._lock = None

    def metrics(self, step: int) -> Metrics:
        """As in `RunFolder`."""
        return Unwritten()

    def saved(self, step: int, keep: int, *, sound: bool) -> None:
        """The first process tidies up."""

    def note_sound(self, step: int, keep: int) -> None:
        """Do nothing: the first process removes old checkpoints."""

    def drop_unsound(self, step: int) -> int:
        """Do nothing: the first process renames the checkpoint, and speaks of it."""
        return 0

    def check_best(self, loaded: int, say: Callable[[str], None]) -> None:
        """The first process looks."""

    def set_best(self, step: int, loss: float) -> None:
        """The first process writes it down."""

    def _point(self, step: int) -> None:
        pass

    def _put_aside(self, step: int, why: str = "damaged") -> Path:
        return self.checkpoint(step)


class Unwritten(Metrics):
    """No file."""

    def __init__(self) -> None:
        """Nothing is opened."""

    def write(self, row: Mapping[str, Any]) -> None:
        """The first process does."""

    def sync(self) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """Nothing was opened."""

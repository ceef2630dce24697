"""Protocol of an observer that is told of every transfer of bytes."""

from __future__ import annotations

from typing import Protocol

from ps_core.engine._support.work_recorder import WorkRecorder


class TransferObserver(Protocol):
    """Count every move, for statistics."""

    recorder: WorkRecorder | None
    """Records when queues work; None: the model is not profiled."""

    def moved(self, source: int, target: int, size: int) -> None:
        """Count bytes that were copied from one tier to another."""

    def evicted(self) -> None:
        """Count a group that was evicted from the compute tier."""

    def waited(self, seconds: float) -> None:
        """Add to the time that the host thread waited for moves."""

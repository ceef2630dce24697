"""What is told of every move of bytes."""

from __future__ import annotations

from typing import Protocol


class TransferObserver(Protocol):
    """Told of every move, for statistics."""

    def moved(self, source: int, target: int, size: int) -> None:
        """Bytes went from one tier to another."""

    def evicted(self) -> None:
        """A group left the compute tier."""

    def waited(self, seconds: float) -> None:
        """The host thread waited for moves."""

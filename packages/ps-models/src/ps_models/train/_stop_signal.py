"""The first SIGINT or SIGTERM asks for an end; the second one is not asked for anything."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Whether somebody wants the training to end. As a context manager it listens to signals."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """By which signal."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {each: signal.signal(each, self._hear) for each in _WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

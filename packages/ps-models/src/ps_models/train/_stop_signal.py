"""Stop on signals: the first SIGINT or SIGTERM ends the training after a step, the second interrupts it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Note the first signal. As a context manager it installs and removes handlers."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the signal that asked for an end; None: none did."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {each: signal.signal(each, self._note_signal) for each in _WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

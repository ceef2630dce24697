"""Where a step's time goes, by the host's clock: forward, backward, the optimizer's step, and waiting for moves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

PHASES = ("forward", "backward", "step", "stalled")


class PhaseTimer:
    """Seconds by phase; a step's are its passes' since the step before."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase = ""
        self._since = 0.0
        self.last_step: Mapping[str, float] = MappingProxyType(dict.fromkeys(PHASES, 0.0))
        """Of the last step that was finished; ``stalled`` is part of the others."""
        self.stalled_s = 0.0
        """In all."""

    def turn(self, phase: str) -> None:
        """From now on time belongs to this phase; the empty one is the user's own."""
        if phase == self._phase:
            return
        now = time.perf_counter()
        if self._phase:
            self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def waited(self, seconds: float) -> None:
        """The host thread waited for moves."""
        self.stalled_s += seconds
        self._spent["stalled"] += seconds

    def stepped(self) -> None:
        """A step is over."""
        self.turn("")
        self.last_step = MappingProxyType(self._spent)
        self._spent = dict.fromkeys(PHASES, 0.0)

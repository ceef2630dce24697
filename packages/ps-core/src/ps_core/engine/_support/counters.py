"""Count what one engine did, and where a step's time went, for `statistics`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

PHASES = ("forward", "backward", "step", "stalled")


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass(slots=True)
class PhaseTimer:
    """Seconds by phase, by the host's clock; a step's are its passes' since the step before."""

    stalled_s: float = 0.0
    """Seconds in all that the host thread waited for moves."""
    last_step: Mapping[str, float] = field(default_factory=lambda: MappingProxyType(_no_seconds()))
    """Seconds of the last step that was finished; ``stalled`` is part of the others."""
    _spent: dict[str, float] = field(default_factory=_no_seconds)
    _phase: str = ""
    _since: float = 0.0

    def enter_phase(self, phase: str) -> None:
        """Count time for this phase from now on; the empty phase is the user's own code."""
        if phase == self._phase:
            return
        now = time.perf_counter()
        if self._phase:
            self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def waited(self, seconds: float) -> None:
        """Add seconds that the host thread waited for moves."""
        self.stalled_s += seconds
        self._spent["stalled"] += seconds

    def end_step(self) -> None:
        """End a step: its seconds become `last_step`."""
        self.enter_phase("")
        self.last_step = MappingProxyType(self._spent)
        self._spent = _no_seconds()


@dataclass(slots=True)
class Counters(PhaseTimer):
    """Counts of one engine, and its times."""

    moved_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By tiers: from, to."""
    evictions: int = 0
    prefetch_hits: int = 0
    fetches: int = 0
    divergences: int = 0
    last_divergence: str = ""
    """Why the last pass that left its plan did so."""
    replans: int = 0
    passes: int = 0
    replayed: int = 0
    """Passes that ran by the plan to their end."""
    steps: int = 0
    skipped: int = 0

    def moved(self, source: int, target: int, size: int) -> None:
        """Add bytes that went from one tier to another."""
        self.moved_bytes[source, target] += size

    def evicted(self) -> None:
        """Count a group that left the compute tier."""
        self.evictions += 1

    def fetched(self, *, early: bool) -> None:
        """Count a group that had to be fetched; ``early``: its move had begun before it was wanted."""
        self.fetches += 1
        self.prefetch_hits += early

    def passed(self, *, replayed: bool) -> None:
        """Count a pass that ended; ``replayed``: it ran by the plan to its end."""
        self.passes += 1
        self.replayed += replayed

    def replanned(self) -> None:
        """Count a plan that took the place of one that was made from a pass that ran."""
        self.replans += 1

    def stepped(self, *, skipped: bool) -> None:
        """Count a step; ``skipped``: it was left out because a gradient was not finite."""
        self.end_step()
        self.steps += 1
        self.skipped += skipped

    def diverged(self, why: str) -> None:
        """Count a pass that left its plan."""
        self.divergences += 1
        self.last_divergence = why

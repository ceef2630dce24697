"""What has happened so far, for `statistics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ps_core.engine._support.phase_timer import PhaseTimer


@dataclass(slots=True)
class Counters:
    """Counts of one engine."""

    moved_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By tiers: from, to."""
    evictions: int = 0
    prefetch_hits: int = 0
    fetches: int = 0
    divergences: int = 0
    last_divergence: str = ""
    """Why."""
    replans: int = 0
    passes: int = 0
    replayed: int = 0
    """Passes that ran by the plan to their end."""
    steps: int = 0
    skipped: int = 0
    clock: PhaseTimer = field(default_factory=PhaseTimer)

    def moved(self, source: int, target: int, size: int) -> None:
        """Bytes went from one tier to another."""
        self.moved_bytes[source, target] += size

    def evicted(self) -> None:
        """A group left the compute tier."""
        self.evictions += 1

    def fetched(self, *, early: bool) -> None:
        """A group was wanted that had to be brought; ``early``: its move had begun already."""
        self.fetches += 1
        self.prefetch_hits += early

    def passed(self, *, replayed: bool) -> None:
        """A pass ended; ``replayed``: it ran by the plan to its end."""
        self.passes += 1
        self.replayed += replayed

    def replanned(self) -> None:
        """Another plan took the place of one that was made from a pass that ran."""
        self.replans += 1

    def stepped(self, *, skipped: bool) -> None:
        """A step was made, or left out because a gradient was not finite."""
        self.clock.stepped()
        self.steps += 1
        self.skipped += skipped

    def waited(self, seconds: float) -> None:
        """The host thread waited for moves."""
        self.clock.waited(seconds)

    def diverged(self, why: str) -> None:
        """A pass left its plan."""
        self.divergences += 1
        self.last_divergence = why

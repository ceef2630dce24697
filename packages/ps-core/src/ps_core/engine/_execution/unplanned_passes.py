"""Tell once why the passes of a loop are never planned, or leave their plan again and again."""

from __future__ import annotations

from collections.abc import Callable

from ps_core.engine._tracing.pass_recording import PassRecording

_TOLD_AFTER = 3
"""Training passes in a row that no plan can be made from, before a line says so."""
READ_OUTSIDE = "its parameters are read outside of any call of its modules"


def too_many_passes(passes: int, steps: int) -> str:
    """Return what is wrong if a step has more backward passes than ``accumulation_steps`` says; else an empty text."""
    return f"backward runs more often between steps than accumulation_steps={steps} says" if passes > steps else ""


class UnplannedPasses:
    """Count training passes that no plan can be made from, while there is no plan."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._in_a_row = 0
        self._told = False

    def note(self, recording: PassRecording, why: str) -> None:
        """Note a pass without a plan; ``why``: the reason, if the recording has none of its own."""
        why = recording.why_incomplete or why
        self._in_a_row = self._in_a_row + 1 if why else 0
        if self._in_a_row >= _TOLD_AFTER and not self._told:
            self._told = True
            self._say(f"no plan can be made, so passes run on demand: {why}")


class LeftPlans:
    """Count training passes of the plan's batch that leave the plan; ask for another plan if this goes on.

    A layer was frozen, say, or another head is trained. The first plan for such passes is made after 2 in a row. Later
    ones are made after 4, 8, 16 ..., because passes that differ each time gain nothing by another plan.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._total = self._refused = self._in_a_row = 0
        self._last = 0
        """Number of the last pass that left the plan."""
        self._plans = 0
        """Number of new plans that `note` asked for so far."""
        self.to_record = 0
        """Number of the next training passes that run on demand, and are recorded for a plan of their own."""

    def note(self, number: int, why: str, *, several: bool) -> None:
        """Note that the pass with this number left the plan; ``several``: it calls the model several times."""
        self._in_a_row = self._in_a_row + 1 if number == self._last + 1 else 1
        self._last = number
        self._total += 1
        if self._total == _TOLD_AFTER:
            self._say(
                f"passes leave their plan, and run on demand from there: {why}; another plan is made if this goes on"
            )
        if self._in_a_row >= 2 ** (self._plans + 1):
            self._plans += 1
            self._in_a_row, self.to_record = 0, 2 if several else 1

    def note_refused(self, why: str) -> None:
        """Note a training pass of the plan's batch that the plan could not begin with."""
        self._refused += 1
        if self._refused == _TOLD_AFTER:
            self._say(f"passes run on demand, although there is a plan: {why}")

    def note_recorded(self) -> bool:
        """Note a pass that was recorded; return True if a plan is to be made from it."""
        wanted, self.to_record = self.to_record > 0, max(0, self.to_record - 1)
        return wanted

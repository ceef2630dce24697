"""Tell once why the passes of a loop are never planned."""

from __future__ import annotations

from collections.abc import Callable

from ps_core.engine._tracing.pass_recording import PassRecording

_TOLD_AFTER = 3
"""Training passes in a row that no plan can be made from, before a line says so."""
_PARTS = "its parameters are read outside of any call of its modules"


class UnplannedPasses:
    """Count training passes that no plan can be made from, while there is no plan."""

    def __init__(self, model_name: str, say: Callable[[str], None]) -> None:
        self._model_name, self._say = model_name, say
        self._in_a_row = 0
        self._told = False

    def note(self, recording: PassRecording, *, of_root: bool) -> None:
        """Note a pass without a plan; ``of_root``: it began with a call of the model."""
        why = recording.why_incomplete or ("" if of_root else _PARTS)
        self._in_a_row = self._in_a_row + 1 if why else 0
        if self._in_a_row >= _TOLD_AFTER and not self._told:
            self._told = True
            self._say(f"{self._model_name}: no plan can be made, so passes run on demand: {why}")

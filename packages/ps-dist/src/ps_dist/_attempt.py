"""Something that may never come back, done by a thread that can be left behind."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

_LOOK_S = 0.1
"""How often who waits looks whether it is in vain."""


class Attempt:
    """One thing under way."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._over, self._wrong = Event(), ""
        self.error: BaseException | None = None
        """What it raised."""
        try:
            Thread(target=self._run, args=(work,), name="ps_dist attempt", daemon=True).start()
        except RuntimeError:  # the interpreter ends, and begins no more threads
            self._run(work)

    @property
    def failed(self) -> bool:
        """Whether it raised."""
        return self.error is not None

    def within(self, limit_s: float, in_vain: Callable[[], str] = str) -> str:
        """What went wrong so far; empty: it is done. ``in_vain``: why nobody need wait any more, if so."""
        deadline = monotonic() + limit_s
        while not self._over.wait(min(_LOOK_S, max(deadline - monotonic(), 0.0))):
            words = in_vain()
            if words or monotonic() >= deadline:
                return words or f"did not end within {limit_s:g} s"
        return self._wrong

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            self.error, self._wrong = error, _said_by(error)
        self._over.set()


def _said_by(error: BaseException) -> str:
    """In one line. NCCL's own words stand behind these, where PyTorch has any."""
    first, _, last = str(error).partition("Last error:")
    lines = [(part.strip().splitlines() or [""])[0] for part in (first, last)]
    return ": ".join([type(error).__name__, *filter(None, lines)])

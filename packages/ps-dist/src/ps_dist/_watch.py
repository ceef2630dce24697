"""Who is to blame when a wait does not end: found out through the store that the processes met in.

[Note: an alarm]
While all goes well a process only looks, once in a while, at one counter. One whose collective takes long, or fails,
counts it up; then every process writes down that it lives, where it is and its latest entries, for as long as the
counter goes on. From that the one that waits tells apart: ranks that did different things, ranks that ended, ranks that
are merely late. Only the first two, or the timeout, end the wait.

[Note: last words]
A process that ends by an exception says so before it goes: the first to do it writes the words down, and stays until
the others have read them, or for a few looks, for the store may end with it. Whoever waits from then on waits in vain.
Who waits for nothing is not disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from ps_core._errors import RanksDiverged
from ps_dist._journal import Entry, Journal, first_difference
from ps_dist._lane import Lane

_ALARM, _WORDS, _HEARD = "alarm", "last words", "heard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what may take."""

    timeout_s: float

    @property
    def look_s(self) -> float:
        """Between two looks."""
        return min(1.0, max(0.05, self.timeout_s / 60))

    @property
    def long_s(self) -> float:
        """A collective that takes so long is looked into."""
        return 4 * self.look_s

    @property
    def silence_s(self) -> float:
        """A process that does not answer for so long has ended."""
        return 30 * self.look_s

    @property
    def silence_after_failure_s(self) -> float:
        """The same where a connection broke: somebody has."""
        return 5 * self.look_s

    @property
    def farewell_s(self) -> float:
        """A process that goes after an exception stays at most so long for the others to hear of it."""
        return 10 * self.look_s

    @property
    def hopeless_s(self) -> float:
        """After so long nothing that this module does can be relied on."""
        return 1.5 * self.timeout_s + 5


@dataclass(slots=True)
class _Seen:
    """What one process last wrote."""

    beat: int = -1
    at_s: float = field(default_factory=monotonic)
    """When that changed; at first, when it was first looked for."""
    number: int = 0
    doing: str = ""
    tail: list[Entry] = field(default_factory=list)
    error: str = ""
    left: bool = False


class Watch:
    """The thread that looks."""

    def __init__(self, store: Any, lane: Lane, journal: Journal, *, rank: int, ranks: int, patience: Patience) -> None:
        """``store``: torch's (any: its stubs have no base with all of these methods)."""
        self._store, self._lane, self._journal = store, lane, journal
        self._rank, self._ranks, self._patience = rank, ranks, patience
        self._stop = Event()
        self._beat = 0
        self._seen: dict[int, _Seen] = {}
        self._failed_at_s: float | None = None
        self._asked_at_s: float | None = None
        """Since when the store owes an answer."""
        self._heard: str | None = None
        """Another process's last words."""
        self._own_words = ""
        lane.cut_off = self._cut_off
        self._thread = Thread(target=self._run, name="ps_dist watch", daemon=True)
        self._thread.start()

    def close(self, words: str = "") -> None:
        """Stop looking, and let the others know; ``words``: the exception by which this process ends."""
        self._own_words = words
        self._stop.set()
        self._thread.join(2 * self._patience.farewell_s)  # the store may never answer

    def _run(self) -> None:
        known = 0
        while not self._stop.wait(self._patience.look_s):
            self._asked_at_s = monotonic()
            try:
                if self._waits():
                    self._store.add(_ALARM, 1)
                alarm = self._store.add(_ALARM, 0)
                if alarm != known:
                    known = alarm
                    self._publish()
                    self._hear()
                if self._waits():
                    self._look()
                else:
                    self._seen.clear()
            except RuntimeError as error:
                self._without_store(error)
            self._asked_at_s = None
        with suppress(RuntimeError):  # nobody is there to be told
            self._go()

    def _go(self) -> None:
        self._publish(left=True)
        if not self._own_words:
            return
        told = json.dumps(f"rank {self._rank} raised {self._own_words}")
        if self._store.compare_set(_WORDS, "", told).decode() != told:
            return  # it was not the first
        self._store.add(_ALARM, 1)
        deadline = monotonic() + self._patience.farewell_s
        while self._store.add(_HEARD, 0) < self._ranks - 1 and monotonic() < deadline:
            sleep(self._patience.look_s / 10)

    def _hear(self) -> None:
        if self._heard is None and self._store.check([_WORDS]):
            self._heard = json.loads(self._store.get(_WORDS))
            self._store.add(_HEARD, 1)

    def _waits(self) -> bool:
        flight = self._lane.flight
        patience_s = self._patience.long_s if self._heard is None else self._patience.look_s
        long = flight is not None and flight[1] > patience_s
        return self._lane.error is None and (long or self._lane.failure is not None)

    def _publish(self, *, left: bool = False) -> None:
        self._beat += 1
        flight = self._lane.flight
        entry = self._journal.last if flight is None else flight[0]
        state = {
            "beat": self._beat,
            "number": entry.number,
            "doing": "" if flight is None else entry.what,
            "tail": self._journal.tail(),
            "error": "" if self._lane.error is None else str(self._lane.error),
            "left": left,
        }
        self._store.set(f"state/{self._rank}", json.dumps(state))

    # Who waits, judges.

    def _look(self) -> None:
        for rank in range(self._ranks):
            seen = self._seen.setdefault(rank, _Seen())
            if rank == self._rank or not self._store.check([f"state/{rank}"]):
                continue
            state = json.loads(self._store.get(f"state/{rank}"))
            if state["beat"] != seen.beat:
                tail = [Entry(*row) for row in state.pop("tail")]
                self._seen[rank] = _Seen(at_s=monotonic(), tail=tail, **state)
        verdict = self._verdict()
        if verdict is not None:
            self._lane.fail(RanksDiverged(f"rank {self._rank} of {self._ranks}: {verdict}"))
            self._publish()

    def _verdict(self) -> str | None:
        if self._heard is not None:
            return f"{self._doing()} cannot end: {self._heard}"
        others = {rank: seen for rank, seen in self._seen.items() if rank != self._rank}
        tails = {rank: seen.tail for rank, seen in others.items() if seen.tail}
        parted = first_difference({**tails, self._rank: self._journal.tail()})
        if parted is not None:
            return f"the ranks do different things; {parted}"
        told = {rank: seen.error for rank, seen in others.items() if seen.error}
        if told:
            rank = min(told)
            return f"rank {rank} failed: {told[rank]}"
        return self._silent(others) or self._late(others)

    def _silent(self, others: dict[int, _Seen]) -> str | None:
        failure = self._lane.failure
        limit = self._patience.silence_s if failure is None else self._patience.silence_after_failure_s
        silent = [rank for rank, seen in others.items() if monotonic() - seen.at_s > limit and not seen.left]
        gone = [rank for rank, seen in others.items() if seen.left]
        what = f"{self._doing()} cannot end"
        if gone:
            return f"{what}: {ranks_named(gone)} left the group"
        if silent:
            why = "" if failure is None else f" ({failure})"
            return f"{what}: {ranks_named(silent)} ended or cannot be reached{why}"
        if failure is None:
            return None
        if self._failed_at_s is None:
            self._failed_at_s = monotonic()
        if monotonic() - self._failed_at_s > 3 * limit:
            return f"{self._doing()} failed ({failure})"
        return None

    def _late(self, others: dict[int, _Seen]) -> str | None:
        flight = self._lane.flight
        if flight is None or flight[1] < self._patience.timeout_s:
            return None
        entry = flight[0]
        late = {rank: seen for rank, seen in others.items() if seen.number < entry.number or not seen.doing}
        rows = [
            f"rank {rank} is at number {seen.number} ({seen.doing or 'between collectives'})"
            for rank, seen in late.items()
        ]
        return f"{self._doing()} took over {self._patience.timeout_s:g} s; " + (", ".join(rows) or "nobody is behind")

    def _doing(self) -> str:
        flight = self._lane.flight
        return "nothing" if flight is None else f"number {flight[0].number}, {flight[0].what},"

    def _without_store(self, error: RuntimeError) -> None:
        """The store went, with the process that keeps it."""
        if self._waits():
            reason = str(error).splitlines()[0]
            lost = f"rank 0, or the torchrun that keeps the store, ended or cannot be reached ({reason})"
            self._lane.fail(
                RanksDiverged(f"rank {self._rank} of {self._ranks}: {self._doing()} cannot end: {self._heard or lost}")
            )

    def _cut_off(self) -> str | None:
        """Why this process will never hear from the others, if neither they nor the store answer."""
        asked_at_s = self._asked_at_s
        if asked_at_s is None or monotonic() - asked_at_s < self._patience.silence_s:
            return None
        return (
            f"rank {self._rank} of {self._ranks}: {self._doing()} cannot end: neither the other ranks nor the store "
            f"that torchrun keeps can be reached; is the network gone?"
        )


def ranks_named(ranks: Sequence[int]) -> str:
    """In words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

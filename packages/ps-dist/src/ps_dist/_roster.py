"""Which ranks are there, and whether they agree: found in a store that may hold what earlier attempts left.

[Note: a call and its answers]
torchrun keeps one store from restart to restart, with all that ended processes wrote. A node whose torchrun was
started anew counts its restarts from 0 again, so no count tells what is old. So a rank believes only what refers to a
number that was drawn just now. Rank 0 *calls* with a fresh number. The others answer every call they see, under its
number, with a number of their own. So what answers rank 0's call was written after it. The others believe only the
*roster* that has their own number. An old call is answered in vain; old answers and rosters are under other numbers.
The keys of all that ranks write later begin with the number of the call.
Rank 0 also counts its looks into the store. So ranks that wait can tell whether rank 0 is the one that is missing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any

from ps_core._errors import RanksDiverged
from ps_dist._error_text import name_ranks
from ps_dist._local_ranks import Location

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.2
"""Seconds between two looks into the store: the first pause and the longest."""
_STAY_S = 5.0
"""Seconds for which rank 0 waits for ranks to read of an error: the store may end with its process."""
_SILENT_S = 3.0
"""Rank 0 is missing if it has not looked for so many seconds; it looks much more often."""
_CALL = "call"
Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Roster:
    """Holds what every rank knows of all ranks."""

    call: str
    """The number of the call by which they found each other."""
    locations: Mapping[int, Location]
    """The computer and process of each rank."""


def find_ranks(store: Any, facts: Facts, *, rank: int, ranks: int, timeout_s: float) -> Roster:
    """Find all other ranks; raise `RanksDiverged` unless they come in time and with equal facts.

    ``store``: torch's (any: its stubs have no base with all of these methods).
    """
    return (_Answerer if rank else _Caller)(store, facts, rank, ranks, timeout_s).find()


class _Looks:
    """Pauses between looks into the store, until a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline, self._pause_s = monotonic() + timeout_s, _FIRST_LOOK_S

    def again(self) -> bool:
        """Pause, and return True; return False if the deadline has passed."""
        left = self._deadline - monotonic()
        if left <= 0:
            return False
        sleep(min(self._pause_s, left))
        self._pause_s = min(1.5 * self._pause_s, _LAST_LOOK_S)
        return True


@dataclass(frozen=True, slots=True)
class _Row:
    """The answer of one rank."""

    number: str
    facts: Facts
    location: Location

    @staticmethod
    def read(saved: Mapping[str, Any]) -> _Row:
        """Return an answer that was written as JSON."""
        return _Row(saved["number"], saved["facts"], Location(**saved["location"]))


class _Rank:
    """Reads answers of ranks, and names missing and differing ranks, for rank 0 and the others alike."""

    def __init__(self, store: Any, facts: Facts, rank: int, ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._ranks, self._timeout_s = store, rank, ranks, timeout_s
        self._own = _Row(secrets.token_hex(16), facts, Location.own())

    # Any: JSON.
    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _missing(self, present: Collection[int]) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in present]

    def _difference(self, rows: Mapping[int, _Row]) -> str | None:
        mine = rows[self._rank].facts
        for other, row in rows.items():
            for name in dict.fromkeys((*mine, *row.facts)):
                if mine.get(name) != row.facts.get(name):
                    return (
                        f"{name} must be the same on all ranks: rank {self._rank} has {mine.get(name)}, rank {other} "
                        f"has {row.facts.get(name)}; install and start the same everywhere"
                    )
        return None

    def _late(self, missing: list[int]) -> str:
        return (
            f"rank {self._rank} of {self._ranks}: {name_ranks(missing)} did not join within {self._timeout_s:.3g} s; "
            "see its output, or try a larger timeout_s"
        )

    def _fault(self, rows: Mapping[int, _Row]) -> str | None:
        """Say what differs between ranks, or else which are missing; None: neither."""
        missing = self._missing(rows)
        return self._difference(rows) or (self._late(missing) if missing else None)


class _Caller(_Rank):
    """Do rank 0's part: call, collect the answers, write the roster."""

    def find(self) -> Roster:
        """Call, collect the answers, and publish the roster."""
        self._number, self._rows = self._own.number, {0: self._own}
        self._seen: set[int] = set()
        """Indices of the answers that were read; one that was reserved may not be written yet."""
        self._store.set(_CALL, self._number)
        self._listen()
        looks, late = _Looks(self._timeout_s), False
        while self._missing(self._rows) and self._difference(self._rows) is None and not late:
            late = not looks.again()
            self._listen()
        self._publish()
        error = self._fault(self._rows)
        if error is None:
            return _roster(self._number, self._rows)
        looks = _Looks(_STAY_S)
        while self._missing(self._rows) and self._difference(self._rows) is not None and looks.again():
            self._listen()  # to tell ranks that come soon, too
            self._publish()
        while int(self._store.add(f"heard/{self._number}", 0)) < len(self._rows) - 1 and looks.again():
            pass  # the store may end with this process
        raise RanksDiverged(error)

    def _listen(self) -> None:
        """Read new answers."""
        self._store.add(f"looks/{self._number}", 1)
        count = int(self._store.add(f"answers/{self._number}", 0))
        for index in sorted(set(range(count)) - self._seen):
            answer = self._read(f"answer/{self._number}/{index + 1}")
            if answer is not None:
                self._seen.add(index)
                self._rows[answer["rank"]] = _Row.read(answer)

    def _publish(self) -> None:
        rows = {rank: asdict(row) for rank, row in sorted(self._rows.items())}
        self._store.set(f"roster/{self._number}", json.dumps(rows))


class _Answerer(_Rank):
    """Do every other rank's part: answer calls until a roster has this rank's number."""

    def find(self) -> Roster:
        """Answer every call, until the roster of one has this process on it."""
        self._answered = ""
        """The number of the call that was answered last."""
        self._looks = 0
        """Rank 0's count of its looks, as last read."""
        self._grew_at_s: float | None = None
        """Time at which that count was last seen to grow; None: it never was."""
        looks = _Looks(self._timeout_s)
        while True:
            call = self._store.get(_CALL).decode() if self._store.check([_CALL]) else ""
            rows = self._published()  # before the next call is answered: this call's roster was published before it
            if rows:
                return self._checked(rows)
            if call != self._answered:
                self._answer(call)
                continue
            self._count_looks()
            if not looks.again():
                raise RanksDiverged(self._late(self._absent()))

    def _answer(self, call: str) -> None:
        self._answered, self._looks, self._grew_at_s = call, 0, None
        index = int(self._store.add(f"answers/{call}", 1))
        self._store.set(f"answer/{call}/{index}", json.dumps({"rank": self._rank} | asdict(self._own)))

    def _count_looks(self) -> None:
        """Read rank 0's count of its looks, and note when it grew."""
        before, self._looks = self._looks, int(self._store.add(f"looks/{self._answered}", 0))
        if before not in (0, self._looks):
            self._grew_at_s = monotonic()

    def _absent(self) -> list[int]:
        """Return the missing ranks, when the deadline has passed."""
        if self._grew_at_s is None:
            return [0]  # no rank can have answered a call that rank 0 did not make
        count = int(self._store.add(f"answers/{self._answered}", 0))
        answers = [self._read(f"answer/{self._answered}/{index + 1}") for index in range(count)]
        present = {answer["rank"] for answer in answers if answer is not None}
        if monotonic() - self._grew_at_s < _SILENT_S:
            present.add(0)
        return self._missing(present) or [0]

    def _checked(self, rows: Mapping[int, _Row]) -> Roster:
        """Return the roster; raise `RanksDiverged` if ranks are missing or differ."""
        error = self._fault(rows)
        if error is not None:
            self._store.add(f"heard/{self._answered}", 1)
            raise RanksDiverged(error)
        return _roster(self._answered, rows)

    def _published(self) -> dict[int, _Row]:
        """Return the answers on the roster of the last call; empty if there is none yet that has this process."""
        found = self._read(f"roster/{self._answered}") if self._answered else None
        rows = {int(rank): _Row.read(row) for rank, row in (found or {}).items()}
        return rows if self._rank in rows and rows[self._rank].number == self._own.number else {}


def _roster(call: str, rows: Mapping[int, _Row]) -> Roster:
    return Roster(call, {rank: row.location for rank, row in sorted(rows.items())})

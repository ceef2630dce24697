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
    one = _Caller(store, facts, ranks, timeout_s) if rank == 0 else _Answerer(store, facts, rank, ranks, timeout_s)
    return one.find()


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
    location: Mapping[str, Any]


def _own_row(facts: Facts) -> _Row:
    return _Row(secrets.token_hex(16), facts, asdict(Location.own()))


def _roster(call: str, rows: Mapping[int, _Row]) -> Roster:
    return Roster(call, {rank: Location(**row.location) for rank, row in sorted(rows.items())})


class _Caller:
    """Do rank 0's part: call, collect the answers, write the roster."""

    def __init__(self, store: Any, facts: Facts, ranks: int, timeout_s: float) -> None:
        self._store, self._ranks, self._timeout_s = store, ranks, timeout_s
        own = _own_row(facts)
        self._number = own.number
        self._rows = {0: own}
        self._seen: set[int] = set()
        """Indices of the answers that were read; one that was reserved may not be written yet."""

    def find(self) -> Roster:
        """Call, collect the answers, and publish the roster."""
        self._store.set(_CALL, self._number)
        self._listen()
        looks, late = _Looks(self._timeout_s), False
        while self._missing() and _difference(0, self._rows) is None and not late:
            late = not looks.again()
            self._listen()
        self._publish()
        error = _fault(0, self._ranks, self._rows, self._timeout_s)
        if error is None:
            return _roster(self._number, self._rows)
        looks = _Looks(_STAY_S)
        while self._missing() and _difference(0, self._rows) is not None and looks.again():
            self._listen()  # to tell ranks that come soon, too
            self._publish()
        while int(self._store.add(f"heard/{self._number}", 0)) < len(self._rows) - 1 and looks.again():
            pass  # the store may end with this process
        raise RanksDiverged(error)

    def _missing(self) -> list[int]:
        return _missing(self._ranks, self._rows)

    def _listen(self) -> None:
        """Read new answers."""
        self._store.add(f"looks/{self._number}", 1)
        count = int(self._store.add(f"answers/{self._number}", 0))
        for index in sorted(set(range(count)) - self._seen):
            answer = _read(self._store, f"answer/{self._number}/{index + 1}")
            if answer is not None:
                self._seen.add(index)
                rank = answer.pop("rank")
                self._rows[rank] = _Row(**answer)

    def _publish(self) -> None:
        rows = {rank: asdict(row) for rank, row in sorted(self._rows.items())}
        self._store.set(f"roster/{self._number}", json.dumps(rows))


class _Answerer:
    """Do every other rank's part: answer calls until a roster has this rank's number."""

    def __init__(self, store: Any, facts: Facts, rank: int, ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._ranks, self._timeout_s = store, rank, ranks, timeout_s
        self._own = _own_row(facts)
        self._answered = ""
        """The number of the call that was answered last."""
        self._looks = 0
        """Rank 0's count of its looks, as last read."""
        self._grew_at_s: float | None = None
        """Time at which that count was last seen to grow; None: it never was."""

    def find(self) -> Roster:
        """Answer every call, until the roster of one has this process on it."""
        looks = _Looks(self._timeout_s)
        while True:
            call = self._newest()
            rows = self._published()  # before the next call is answered: this call's roster was published before it
            if rows:
                return self._checked(rows)
            if call != self._answered:
                self._answer(call)
                continue
            self._count_looks()
            if not looks.again():
                raise RanksDiverged(_late(self._rank, self._ranks, self._absent(), self._timeout_s))

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
        answers = [_read(self._store, f"answer/{self._answered}/{index + 1}") for index in range(count)]
        present = {answer["rank"] for answer in answers if answer is not None}
        if monotonic() - self._grew_at_s < _SILENT_S:
            present.add(0)
        return _missing(self._ranks, present) or [0]

    def _checked(self, rows: Mapping[int, _Row]) -> Roster:
        """Return the roster; raise `RanksDiverged` if ranks are missing or differ."""
        error = _fault(self._rank, self._ranks, rows, self._timeout_s)
        if error is not None:
            self._store.add(f"heard/{self._answered}", 1)
            raise RanksDiverged(error)
        return _roster(self._answered, rows)

    def _newest(self) -> str:
        found: str = self._store.get(_CALL).decode() if self._store.check([_CALL]) else ""
        return found

    def _answer(self, call: str) -> None:
        self._answered, self._looks, self._grew_at_s = call, 0, None
        index = int(self._store.add(f"answers/{call}", 1))
        self._store.set(f"answer/{call}/{index}", json.dumps({"rank": self._rank} | asdict(self._own)))

    def _published(self) -> dict[int, _Row]:
        """Return the answers on the roster of the last call; empty if there is none yet that has this process."""
        found = _read(self._store, f"roster/{self._answered}") if self._answered else None
        rows = {int(rank): _Row(**row) for rank, row in (found or {}).items()}
        return rows if self._rank in rows and rows[self._rank].number == self._own.number else {}


# Any: JSON.
def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _missing(ranks: int, present: Collection[int]) -> list[int]:
    return [rank for rank in range(ranks) if rank not in present]


def _difference(rank: int, rows: Mapping[int, _Row]) -> str | None:
    mine = rows[rank].facts
    for other, row in rows.items():
        for name in dict.fromkeys((*mine, *row.facts)):
            if mine.get(name) != row.facts.get(name):
                return (
                    f"{name} must be the same on all ranks: rank {rank} has {mine.get(name)}, rank {other} has "
                    f"{row.facts.get(name)}; install and start the same everywhere"
                )
    return None


def _fault(rank: int, ranks: int, rows: Mapping[int, _Row], timeout_s: float) -> str | None:
    """Say what differs between ranks, or else which are missing, as ``rank`` tells it; None: neither."""
    missing = _missing(ranks, rows)
    return _difference(rank, rows) or (_late(rank, ranks, missing, timeout_s) if missing else None)


def _late(rank: int, ranks: int, missing: list[int], timeout_s: float) -> str:
    return (
        f"rank {rank} of {ranks}: {name_ranks(missing)} did not join within {timeout_s:.3g} s; see its output, or "
        "try a larger timeout_s"
    )

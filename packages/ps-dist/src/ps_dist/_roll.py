"""Meeting in a store that may hold what earlier attempts left: who is here, and whether all are alike.

[Note: a call and its answers]
torchrun keeps one store from restart to restart, with whatever processes that are gone wrote there; and a node whose
torchrun was started anew counts its restarts from 0 again, so no count tells what is old. So nothing in the store is
believed but what refers to something made just now. Rank 0 *calls* with a number that nobody used before. The others
answer every call they see, under its number, with one of their own. So what answers rank 0's call was written after it;
the others believe only the *roll* that has their own number. An old call is answered in vain; old answers and rolls are
under other numbers. Whatever processes say to each other later has the number of the call before it.
Rank 0 also counts how often it looked, so that those who wait can tell whether it is rank 0 that they miss.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any, NoReturn

from ps_core._errors import RanksDiverged
from ps_dist._local_ranks import Place

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.2
"""Between two looks into the store: longer and longer."""
_STAY_S = 5.0
"""So long rank 0 waits for the others, once it knows that all cannot be well: the store may end with it."""
_SILENT_S = 3.0
"""Rank 0 looks much more often."""
_CALL = "call"
Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Met:
    """What processes that met know of each other."""

    call: str
    """The number of the call that they met by."""
    places: Mapping[int, Place]
    """Where each rank runs."""


def meet(store: Any, facts: Facts, *, rank: int, ranks: int, timeout_s: float) -> Met:
    """Find all other processes; `RanksDiverged` unless they come in time, with equal facts.

    ``store``: torch's (any: its stubs have no base with all of these methods).
    """
    one = _Caller(store, facts, ranks, timeout_s) if rank == 0 else _Answerer(store, facts, rank, ranks, timeout_s)
    return one.meet()


class _Looks:
    """Looks into the store, until it is too late."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._deadline, self._pause_s = monotonic() + timeout_s, _FIRST_LOOK_S

    def again(self) -> bool:
        """Wait a little; False: it is too late."""
        left = self._deadline - monotonic()
        if left <= 0:
            return False
        sleep(min(self._pause_s, left))
        self._pause_s = min(1.5 * self._pause_s, _LAST_LOOK_S)
        return True


@dataclass(frozen=True, slots=True)
class _Row:
    """One process, as it answered."""

    number: str
    facts: Facts
    place: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"number": self.number, "facts": dict(self.facts), "place": self.place}


def _own_row(facts: Facts) -> _Row:
    return _Row(secrets.token_hex(16), facts, asdict(Place.own()))


def _met(call: str, rows: Mapping[int, _Row]) -> Met:
    return Met(call, {rank: Place(**row.place) for rank, row in sorted(rows.items())})


class _Caller:
    """Rank 0."""

    def __init__(self, store: Any, facts: Facts, ranks: int, timeout_s: float) -> None:
        self._store, self._ranks, self._timeout_s = store, ranks, timeout_s
        own = _own_row(facts)
        self._number = own.number
        self._rows = {0: own}
        self._begun: set[int] = set()
        """Answers whose place was taken, and that were not written yet."""
        self._seen = 0
        """Places that were looked at."""

    def meet(self) -> Met:
        """Call, and publish who came."""
        self._store.set(_CALL, self._number)
        looks, late = _Looks(self._timeout_s), False
        while self._missing():
            self._listen()
            if _difference(0, self._rows) is not None:
                self._part()
            if self._missing() and late:
                self._publish()
                self._stay(_Looks(_STAY_S))
                raise RanksDiverged(_late(0, self._ranks, self._missing(), self._timeout_s))
            late = bool(self._missing()) and not looks.again()
        self._publish()
        return _met(self._number, self._rows)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in self._rows]

    def _listen(self) -> bool:
        """Whether somebody came."""
        came = False
        self._store.add(f"looks/{self._number}", 1)
        count = int(self._store.add(f"answers/{self._number}", 0))
        self._begun.update(range(self._seen, count))
        self._seen = count
        for place in sorted(self._begun):
            answer = _read(self._store, f"answer/{self._number}/{place + 1}")
            if answer is not None:
                self._begun.discard(place)
                rank = answer.pop("rank")
                self._rows[rank] = _Row(**answer)
                came = True
        return came

    def _publish(self) -> None:
        rows = {rank: row.as_json() for rank, row in sorted(self._rows.items())}
        self._store.set(f"roll/{self._number}", json.dumps(rows))

    def _part(self) -> NoReturn:
        """Tell those who are here, and those who come soon, that they are not alike."""
        self._publish()
        looks = _Looks(_STAY_S)
        while self._missing() and looks.again():
            if self._listen():
                self._publish()
        self._stay(looks)
        raise RanksDiverged(str(_difference(0, self._rows)))

    def _stay(self, looks: _Looks) -> None:
        """Until everybody who is here has heard: the store may end with this process."""
        while int(self._store.add(f"heard/{self._number}", 0)) < len(self._rows) - 1 and looks.again():
            pass


class _Answerer:
    """Any other rank."""

    def __init__(self, store: Any, facts: Facts, rank: int, ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._ranks, self._timeout_s = store, rank, ranks, timeout_s
        self._own = _own_row(facts)
        self._answered = ""
        """The call that was answered last."""
        self._looks = 0
        """How often the caller looked."""
        self._heard_at_s: float | None = None
        """When that was last seen to grow."""

    def meet(self) -> Met:
        """Answer whoever calls, until one has this process on its roll."""
        looks = _Looks(self._timeout_s)
        while True:
            call = self._newest()
            rows = self._roll()  # before another call is answered: whoever calls again has published the roll before
            if rows:
                return self._judge(rows)
            if call != self._answered:
                self._answer(call)
                continue
            self._count_looks()
            if not looks.again():
                raise RanksDiverged(_late(self._rank, self._ranks, self._absent(), self._timeout_s))

    def _count_looks(self) -> None:
        """Note whether rank 0 looked since this was last called."""
        before, self._looks = self._looks, int(self._store.add(f"looks/{self._answered}", 0))
        if before not in (0, self._looks):
            self._heard_at_s = monotonic()

    def _absent(self) -> list[int]:
        """Return who keeps all from meeting, when it is too late."""
        if self._heard_at_s is None:
            return [0]  # nobody else can have answered
        count = int(self._store.add(f"answers/{self._answered}", 0))
        answers = [_read(self._store, f"answer/{self._answered}/{place + 1}") for place in range(count)]
        present = {answer["rank"] for answer in answers if answer is not None}
        if monotonic() - self._heard_at_s < _SILENT_S:
            present.add(0)
        return self._missing(present) or [0]

    def _missing(self, present: Collection[int]) -> list[int]:
        return [rank for rank in range(self._ranks) if rank not in present]

    def _judge(self, rows: Mapping[int, _Row]) -> Met:
        words, missing = _difference(self._rank, rows), self._missing(rows)
        if words is None and missing:
            words = _late(self._rank, self._ranks, missing, self._timeout_s)
        if words is not None:
            self._store.add(f"heard/{self._answered}", 1)
            raise RanksDiverged(words)
        return _met(self._answered, rows)

    def _newest(self) -> str:
        found: str = self._store.get(_CALL).decode() if self._store.check([_CALL]) else ""
        return found

    def _answer(self, call: str) -> None:
        self._answered, self._looks, self._heard_at_s = call, 0, None
        place = int(self._store.add(f"answers/{call}", 1))
        self._store.set(f"answer/{call}/{place}", json.dumps({"rank": self._rank} | self._own.as_json()))

    def _roll(self) -> dict[int, _Row]:
        """Of the call that was answered; empty: it is not there yet, or without this process."""
        found = _read(self._store, f"roll/{self._answered}") if self._answered else None
        rows = {int(rank): _Row(**row) for rank, row in (found or {}).items()}
        return rows if self._rank in rows and rows[self._rank].number == self._own.number else {}


# Any: JSON.
def _read(store: Any, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


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


def _late(rank: int, ranks: int, missing: list[int], timeout_s: float) -> str:
    return f"rank {rank} of {ranks}: {ranks_named(missing)} did not come within {timeout_s:.3g} s"


def ranks_named(ranks: Sequence[int]) -> str:
    """Name ranks."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

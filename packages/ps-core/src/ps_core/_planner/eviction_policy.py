"""Choose which resident extent to evict: estimate what each is worth keeping, under several policies.

Belady's rule evicts what is needed again last. It is optimal for equal, clean extents when the future is known, and a
recorded iteration is a known future. The other policies are for comparison.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

NEVER = 1e300
"""A moment later than any other, whose worth is above all others."""


class Policy(StrEnum):
    """Name how extents are chosen for eviction."""

    BELADY = "belady"
    LRU = "lru"
    FIFO = "fifo"
    STATIC = "static"
    """Keeps a fixed set that is chosen beforehand; all other extents are evicted after use."""


class Ranker(Generic[Key]):
    """Rate what each extent is worth keeping: the least worth is evicted first. Time is the index of a moment."""

    def __init__(self, policy: Policy, uses: Mapping[Key, Sequence[int]], kept: frozenset[Key] = frozenset()) -> None:
        self._policy = policy
        self._uses = uses
        self._kept = kept
        self._used: dict[Key, int] = {}
        self._loaded: dict[Key, int] = {}
        self._clock = 0

    def loaded(self, key: Key) -> None:
        """Note that the extent was copied to the tier."""
        self._clock += 1
        self._loaded[key] = self._used[key] = self._clock

    def used(self, key: Key) -> None:
        """Note that the extent was used."""
        self._clock += 1
        self._used[key] = self._clock

    def next_use(self, key: Key, now: int) -> float:
        """Return the first use after ``now``."""
        uses = self._uses.get(key, ())
        place = bisect_right(uses, now)
        return uses[place] if place < len(uses) else NEVER

    def worth(self, key: Key, now: int) -> float:
        """Return what keeping the extent is worth after moment ``now``."""
        if self._policy is Policy.BELADY:
            return -self.next_use(key, now)
        if self._policy is Policy.FIFO:
            return self._loaded.get(key, 0)
        if self._policy is Policy.STATIC and key in self._kept:
            return NEVER / 2
        return self._used.get(key, 0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The cost of serving requests on demand."""

    loads: int
    write_backs: int


def on_demand(
    requests: Sequence[frozenset[Key]],
    capacities: Sequence[int],
    policy: Policy,
    *,
    start: frozenset[Key] = frozenset(),
    writes: Sequence[frozenset[Key]] | None = None,
) -> Traffic:
    """Serve unit extents on demand: at each moment the requested ones are resident, within that moment's capacity.

    If the capacity falls, extents are evicted although nothing is fetched (forced evictions). An extent that changed
    since it was fetched is written back; ``writes`` says at which moments extents change.
    """
    uses: dict[Key, list[int]] = {}
    for moment, wanted in enumerate(requests):
        for key in wanted:
            uses.setdefault(key, []).append(moment)
    ranker: Ranker[Key] = Ranker(policy, uses)
    held, dirty = set(start), set[Key]()
    loads = write_backs = 0
    for moment, (wanted, capacity) in enumerate(zip(requests, capacities, strict=True)):
        missing = wanted - held
        loads += len(missing)
        victims = sorted(held - wanted, key=lambda key: (ranker.worth(key, moment), repr(key)))
        for victim in victims[: max(0, len(held) + len(missing) - capacity)]:
            held.discard(victim)
            write_backs += victim in dirty
            dirty.discard(victim)
        held |= missing
        dirty |= (writes[moment] if writes else frozenset()) & wanted
        for key in sorted(wanted, key=repr):
            (ranker.loaded if key in missing else ranker.used)(key)
    return Traffic(loads, write_backs)

"""Decide why a collective will not end, from what one rank knows: no clock, no store, no thread.

[Note: ended and silent]
A rank *ended* if it said so, its connection broke, or the kernel knows its process no more. The others are told at
once. A rank that merely says nothing may come back: from a long C call, a stop, or a paused machine. It is *silent*,
and has the whole timeout.

[Note: who gave up]
A rank that loses the store ends, and cannot tell the others why. So nobody names a rank that ended after the store was
lost. The same holds if the store is silent, and its process ended or was silent for half of the timeout. Clocks of
ranks differ by what a busy machine took from each, so another rank's timeout may be over long before this one's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ps_dist._collective_history import HistoryEntry, first_difference
from ps_dist._timeouts import Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """The last message that another rank wrote."""

    silent_s: float = 0.0
    """Seconds since it wrote; since it was first asked, where it never did."""
    number: int = 0
    """The number of its current or latest history entry."""
    doing: str = ""
    """Its current collective; empty between collectives."""
    tail: Sequence[HistoryEntry] = ()
    left: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the transport."""

    text: str
    peer: int | None = None
    """The rank whose connection broke, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A collective of this rank that takes long or failed, and what the rank knows of the others."""

    rank: int
    number: int
    """The number of the collective in the history; 0: it failed before it had one."""
    waited_s: float
    tail: Sequence[HistoryEntry] = ()
    """This rank's latest history entries."""
    peers: Mapping[int, PeerState] = field(default_factory=dict)
    """The other ranks."""
    ended: Collection[int] = ()
    """Ranks whose process is gone."""
    failure: Failure | None = None
    failed_s: float = 0.0
    """Seconds since the failure."""
    heard: str | None = None
    """Why another rank left with an error, or gave up."""
    store_silent_s: float = 0.0
    """Seconds since the store owes an answer, where that is long."""
    store_error: str = ""
    """The error with which the connection to the store failed."""
    ended_before_store: Collection[int] | None = None
    """Ranks whose process was gone when the store was lost; None: it is not lost."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a wait ends; it reads the same on every rank."""

    text: str
    unreachable: frozenset[int] = frozenset()
    """Ranks that cannot be told any more."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names ranks and the store in messages."""

    hosts: Mapping[int, str]
    store_rank: int | None = None
    """The rank in whose process the store is; None: torchrun keeps it."""

    def __call__(self, ranks: Collection[int]) -> str:
        """Name ranks with their hosts."""
        return " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in sorted(ranks))

    @property
    def store(self) -> str:
        """Name the store by who keeps it."""
        if self.store_rank is None:
            return "the store that torchrun keeps"
        return f"{self([self.store_rank])}, which keeps the store,"


def reason_to_stop(wait: Wait, timeouts: Timeouts, names: Names) -> Reason | None:
    """Return why ``wait`` must end now, or None to go on waiting."""
    if wait.heard is not None:
        return Reason(wait.heard)
    difference = first_difference({**{r: p.tail for r, p in wait.peers.items() if p.tail}, wait.rank: wait.tail})
    if difference is not None:
        return Reason(f"the ranks do different things; {difference}")
    return _ended(wait, timeouts, names) or _failed(wait, timeouts, names) or _timed_out(wait, timeouts, names)


def _ended(wait: Wait, timeouts: Timeouts, names: Names) -> Reason | None:
    left = {rank for rank, peer in wait.peers.items() if peer.left and (peer.doing or peer.number < wait.number)}
    if left:
        return Reason(f"{names(left)} left the group", frozenset(left))
    failure = wait.failure
    broken = {failure.peer} if failure is not None and failure.peer is not None else set()
    ended = broken | {rank for rank in wait.ended if not (rank in wait.peers and wait.peers[rank].left)}
    ended -= _gave_up(ended, wait, timeouts, names)
    rows = []
    if wait.store_error:
        rows.append(f"{names.store} ended or cannot be reached ({wait.store_error})")
        ended -= {names.store_rank}
    if ended:
        how = f" ({failure.text})" if failure is not None and broken & ended else ""
        rows.append(f"{names(ended)} ended or cannot be reached{how}")
    return Reason("; ".join(rows) + _store_too(wait, names), frozenset(ended)) if rows else None


def _gave_up(ended: Collection[int], wait: Wait, timeouts: Timeouts, names: Names) -> set[int]:
    """Return the ranks that may have ended for want of the store. See [Note: who gave up]."""
    if wait.ended_before_store is not None:
        return {*ended} - {*wait.ended_before_store, names.store_rank}
    silent = names.store_rank is not None and wait.store_silent_s > timeouts.timeout_s / 2
    lost = wait.store_silent_s > 0 and names.store_rank in wait.ended
    return {*ended} - {names.store_rank} if silent or lost else set()


def _failed(wait: Wait, timeouts: Timeouts, names: Names) -> Reason | None:
    if wait.failure is None or wait.failed_s < timeouts.failure_grace_s:
        return None
    silent = _silent(wait, timeouts.failure_grace_s)
    text = f"the transport of {names([wait.rank])} failed ({wait.failure.text})"
    return Reason("; ".join([text, *_silences(wait, silent, names)]) + _store_too(wait, names), frozenset(silent))


def _timed_out(wait: Wait, timeouts: Timeouts, names: Names) -> Reason | None:
    if wait.waited_s < timeouts.timeout_s:
        return None
    waits = f"{names([wait.rank])} waited over {timeouts.timeout_s:g} s"
    if wait.store_silent_s:  # so it is not known who else is late
        return Reason(waits + _store_too(wait, names))
    silent = _silent(wait, timeouts.answer_s)
    behind = {r: p for r, p in wait.peers.items() if r not in silent and p.number < wait.number}
    late = {rank: peer for rank, peer in behind.items() if not peer.doing}
    if not late and not silent:
        late = behind  # who waits in an earlier collective is to blame only if nobody else is
    rows = _silences(wait, silent, names)
    rows += [f"{names([r])} is at number {p.number} ({p.doing or 'between collectives'})" for r, p in late.items()]
    return Reason(f"{waits}: {'; '.join(rows) or 'no other rank is behind'}", frozenset(silent))


def _silent(wait: Wait, limit_s: float) -> list[int]:
    return [rank for rank, peer in wait.peers.items() if peer.silent_s > limit_s and not peer.left]


def _silences(wait: Wait, silent: Collection[int], names: Names) -> list[str]:
    return [f"{names([rank])} has not answered for {wait.peers[rank].silent_s:.0f} s" for rank in silent]


def _store_too(wait: Wait, names: Names) -> str:
    return f"; {names.store} has not answered for {wait.store_silent_s:.0f} s" if wait.store_silent_s else ""

"""End waits in vain, by a thread that asks the other ranks through the store by which they found each other.

[Note: an alarm]
While all goes well a rank only reads one counter in the store, once in a while. A rank whose collective takes long, or
fails, counts it up. Then every rank writes down that it lives, what it does and its latest history entries. They do so
as long as the counter goes on. From these `_failure_reasons` decides whether the wait must end.

[Note: an exit message]
A rank may end by an exception, or its wait may end in vain. It writes down why before its connections break. The first
message stands: all ranks that wait, then or later, end with it, so all name the same cause. Who waits for nothing is
not disturbed. Whoever leaves after that stays until the others have read it, or for a few looks. The store may end
with its process. Whoever leaves because the store ended stays for two looks: the others then see this first. Where all
leave together, the rank that keeps the store stays until the others' last questions to it are answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Event, Thread
from time import sleep
from typing import Any

from ps_core._errors import RanksDiverged
from ps_dist._collective_history import CollectiveHistory, HistoryEntry
from ps_dist._comm_thread import CommThread, Pending
from ps_dist._error_text import first_line
from ps_dist._failure_reasons import Names, PeerState, Reason, Wait, reason_to_stop
from ps_dist._local_ranks import LocalRanks, Location
from ps_dist._timeouts import Timeouts

_ALARM, _MESSAGE, _READERS = "alarm", "exit message", "readers"

_MOST_ASKED = 4
"""Silent ranks whose computers are asked in one look."""


class Watchdog:
    """The watchdog of one connection."""

    def __init__(
        self,
        store: Any,
        thread: CommThread,
        history: CollectiveHistory,
        *,
        rank: int,
        locations: Mapping[int, Location],
        store_rank: int | None,
        timeouts: Timeouts,
    ) -> None:
        """``store``: torch's (any: its stubs have no base with all of these methods). ``store_rank``: see `Names`."""
        self._store, self._comm, self._history = store, thread, history
        self._rank, self._ranks, self._timeouts, self._clock = rank, len(locations), timeouts, thread.clock
        self._names = Names({each: location.host for each, location in locations.items()}, store_rank)
        self._local = LocalRanks(locations)
        self._stop = Event()
        self._writes = 0
        self._peers: dict[int, tuple[int, float, PeerState]] = {}
        """For each rank how often it wrote its state, when that was last seen to change, and the state."""
        self._failed_at_s: float | None = None
        self._asked_at_s: float | None = None
        """Time at which the store was asked for what it has not answered yet."""
        self._ended_before_store: frozenset[int] | None = None
        self._heard: str | None = None
        self._unreachable: frozenset[int] = frozenset()
        self._has_read = False
        self._oldest_since: tuple[Pending, float] | None = None
        """The oldest job at the last look after another rank gave up, and the time since when it is the oldest."""
        self._own_error, self._together = "", False
        self.has_ended: Callable[[int], bool] = lambda rank: False
        """Asks a rank's computer whether the rank's process has ended; False: it is not known."""
        self.abort: Callable[[], object] = lambda: None
        """Ends what devices wait for in vain; called once a wait has failed."""
        thread.check_wait = self._check_wait
        self._thread = Thread(target=self._run, name="ps_dist watchdog", daemon=True)
        self._thread.start()

    def close(self, error: str = "", *, together: bool = False) -> None:
        """Stop the thread, and tell the others.

        ``error``: the exception by which this process ends. ``together``: all ranks have agreed to leave.
        """
        self._own_error, self._together = error, together
        self._stop.set()
        deadline_s = self._clock() + 2 * self._timeouts.exit_s
        while self._thread.is_alive() and self._clock() < deadline_s and not self._store_silent_s():
            self._thread.join(self._timeouts.look_s)
        if not self._thread.is_alive():
            self._local.close()

    def _run(self) -> None:
        known = 0
        while not self._stop.wait(self._timeouts.look_s):
            self._asked_at_s = self._clock()
            try:
                known = self._inspect_peers(known)
                self._ended_before_store = None
            except RuntimeError as error:
                if self._ended_before_store is None:
                    self._ended_before_store = self._local.ended()
                if self._waits():
                    self._judge_alone(store_error=first_line(error))
            self._asked_at_s = None
        self._asked_at_s = self._clock()
        try:
            self._publish_exit()
            self._leave_store()
        except RuntimeError:  # the store has ended
            if self._own_error or self._comm.error is not None:
                sleep(2 * self._timeouts.look_s)
        self._asked_at_s = None

    def _inspect_peers(self, known: int) -> int:
        """Look into the store once; return the number of the alarm that was answered."""
        if self._waits():
            self._store.add(_ALARM, 1)
        alarm: int = self._store.add(_ALARM, 0)
        if alarm != known:
            self._publish()
            self._read_exit_message()
        if not self._waits():
            self._peers.clear()
            return alarm
        self._read_peers()
        reason = reason_to_stop(self._wait(), self._timeouts, self._names)
        if reason is not None:
            self._write_message(reason)  # before this rank's connections break
            self._fail(self._heard or reason.text)
        return alarm

    def _waits(self) -> bool:
        """Return True if a collective of this rank takes long or failed, so that the other ranks must be asked."""
        if self._comm.error is not None:
            return False
        current = self._comm.current
        patience_s = self._timeouts.long_s if self._heard is None else self._timeouts.look_s
        waits = self._comm.failure is not None or (current is not None and current[1] > patience_s)
        return waits or self._is_stuck()

    def _is_stuck(self) -> bool:
        """Return True if, after another rank gave up, one job of this rank takes long without any collective.

        Such a job may wait for its own device, which nothing else ends.
        """
        oldest = None if self._heard is None or self._comm.current is not None else self._comm.oldest_open
        if oldest is None:
            self._oldest_since = None
            return False
        if self._oldest_since is None or self._oldest_since[0] is not oldest:
            self._oldest_since = oldest, self._clock()
        return self._clock() - self._oldest_since[1] > self._timeouts.answer_s

    def _wait(self, *, store_silent_s: float = 0.0, store_error: str = "") -> Wait:
        now_s, current, failure = self._clock(), self._comm.current, self._comm.failure
        peers = {rank: replace(state, silent_s=now_s - at_s) for rank, (_, at_s, state) in tuple(self._peers.items())}
        if failure is not None and self._failed_at_s is None:
            self._failed_at_s = now_s
        return Wait(
            rank=self._rank,
            number=0 if current is None else current[0].number,
            waited_s=0.0 if current is None else current[1],
            tail=self._history.tail(),
            peers=peers,
            ended=self._local.ended() | self._refusing(peers),
            failure=failure,
            failed_s=0.0 if self._failed_at_s is None else now_s - self._failed_at_s,
            heard=self._heard,
            store_silent_s=store_silent_s,
            store_error=store_error,
            ended_before_store=self._ended_before_store,
        )

    def _refusing(self, peers: Mapping[int, PeerState]) -> frozenset[int]:
        """Return silent ranks that have ended. While a device waits for them, no connection of this rank breaks."""
        if not self._comm.device_waits:
            return frozenset()
        silent = [rank for rank, peer in peers.items() if peer.silent_s > self._timeouts.long_s and not peer.left]
        return frozenset(filter(self.has_ended, silent[:_MOST_ASKED]))

    def _fail(self, text: str) -> None:
        current = self._comm.current
        doing = "a job between collectives" if current is None else f"number {current[0].number}, {current[0].what},"
        where = f"rank {self._rank} of {self._ranks}"
        self._comm.fail(RanksDiverged(f"{where}: {doing} cannot end: {text}"))
        self.abort()

    # What ranks tell each other.

    def _publish(self, *, left: bool = False) -> None:
        self._writes += 1
        number, doing = self._comm.reached(self._history.last)
        state = {"number": number, "doing": doing, "tail": self._history.tail(), "left": left}
        self._store.set(f"state/{self._rank}", json.dumps([self._writes, state]))

    def _read_peers(self) -> None:
        for rank in range(self._ranks):
            if rank == self._rank:
                continue
            writes, _, _ = self._peers.setdefault(rank, (-1, self._clock(), PeerState()))
            if not self._store.check([f"state/{rank}"]):
                continue
            now, state = json.loads(self._store.get(f"state/{rank}"))
            if now != writes:
                tail = [HistoryEntry(*row) for row in state.pop("tail")]
                self._peers[rank] = (now, self._clock(), PeerState(tail=tail, **state))

    def _read_exit_message(self) -> None:
        if self._heard is None and self._store.check([_MESSAGE]):
            self._heard, unreachable = json.loads(self._store.get(_MESSAGE))
            self._unreachable = frozenset(unreachable)
        if self._heard is not None:
            self._count_as_reader()

    def _write_message(self, reason: Reason) -> None:
        self._store.compare_set(_MESSAGE, "", json.dumps([reason.text, sorted(reason.unreachable)]))
        self._read_exit_message()
        self._store.add(_ALARM, 1)

    def _count_as_reader(self) -> None:
        if not self._has_read:
            self._has_read = True
            self._store.add(_READERS, 1)

    def _publish_exit(self) -> None:
        if self._own_error:  # before it is known that this rank left: it tells more
            self._write_message(Reason(f"{self._names([self._rank])} raised {self._own_error}"))
        self._publish(left=True)
        self._count_as_reader()
        self._read_exit_message()
        if self._heard is None:
            return
        readers = self._ranks - len(self._unreachable)
        deadline_s = self._clock() + self._timeouts.exit_s
        while self._store.add(_READERS, 0) < readers and self._clock() < deadline_s:
            self._asked_at_s = self._clock()
            sleep(self._timeouts.look_s / 10)

    # The store.

    def _leave_store(self) -> None:
        """Note that this rank asks the store no more; on the rank that keeps it, wait for the others to do so."""
        if self._rank != self._names.store_rank:
            self._store.set(f"done/{self._rank}", "")
            return
        left = {*range(self._ranks)} - {self._rank} if self._together else set()
        deadline_s = self._clock() + self._timeouts.exit_s
        while left := {rank for rank in left - self._local.ended() if not self._store.check([f"done/{rank}"])}:
            if self._clock() > deadline_s:
                return
            self._asked_at_s = self._clock()
            sleep(self._timeouts.look_s / 10)

    def _store_silent_s(self) -> float:
        """Return the seconds for which the store has not answered, if it is called silent; else 0.

        Where its process has ended, a child of that process may still hold the connections, so nothing else tells.
        """
        asked_at_s = self._asked_at_s
        silent_s = 0.0 if asked_at_s is None else self._clock() - asked_at_s
        limit_s = self._timeouts.answer_s
        if silent_s > 2 * self._timeouts.look_s and self._names.store_rank in self._local.ended():
            limit_s = 0.0
        return silent_s if silent_s > limit_s else 0.0

    def _judge_alone(self, *, store_silent_s: float = 0.0, store_error: str = "") -> None:
        """End this rank's wait if it is in vain, from what this rank knows."""
        wait = self._wait(store_silent_s=store_silent_s, store_error=store_error)
        reason = reason_to_stop(wait, self._timeouts, self._names)
        if reason is not None:
            self._fail(reason.text)

    def _check_wait(self) -> None:
        """Judge in the watchdog's place while the store does not answer it; the thread that waits calls this."""
        silent_s = self._store_silent_s()
        if self._comm.error is None and (silent_s or not self._thread.is_alive()):
            self._judge_alone(store_silent_s=silent_s)

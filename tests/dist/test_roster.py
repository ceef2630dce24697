"""Processes, played by threads, meet in a store that holds what earlier attempts left."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from ps_core._errors import RanksDiverged
from ps_dist import _roster
from ps_dist._local_ranks import Location
from ps_dist._roster import Roster, find_ranks

FACTS = {"the number of processes": "3", "transport": "gloo"}
OLD = "0123"
Client = Callable[[], Any]


@pytest.fixture(scope="module")
def server() -> Any:
    """A store for all tests, whatever is in it: each has keys of its own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["tcp", "file"])
def client(request: pytest.FixtureRequest, server: Any, tmp_path: Path) -> Client:
    """One more process's way to the store."""
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "store"), -1)
    return lambda: PrefixStore(tmp_path.name, TCPStore("127.0.0.1", server.port, is_master=False))


class Company:
    """Ranks that come when they are told to."""

    def __init__(self, client: Client, ranks: int) -> None:
        self._ranks, self._pool = ranks, ThreadPoolExecutor(ranks)
        self.store, *self._clients = [client() for _ in range(1 + ranks)]

    def come(
        self, rank: int, *, timeout_s: float = 30, ranks: int | None = None, transport: str = "gloo"
    ) -> Future[Roster]:
        """One more."""
        size = ranks or self._ranks
        mine = {"the number of processes": str(size), "transport": transport}
        return self._pool.submit(find_ranks, self._clients[rank], mine, rank=rank, ranks=size, timeout_s=timeout_s)

    def until(self, done: Callable[[Any], Any]) -> Any:
        """Wait for something in the store; but not for ever."""
        deadline = monotonic() + 300
        while not (found := done(self.store)):
            assert monotonic() < deadline
            sleep(0.005)
        return found

    def until_answered(self, call: str, count: int) -> None:
        """Wait until so many answered."""
        self.until(lambda store: store.add(f"answers/{call}", 0) >= count)


@pytest.fixture
def three(client: Client) -> Company:
    """Ranks."""
    return Company(client, 3)


def left_behind(store: Any) -> None:
    """What attempts that are over wrote: another model's, with more processes; one that nobody heard of any more."""
    number = {"the number of processes": "5", "transport": "nccl"}
    store.set("call", OLD)
    rows = {rank: {"number": f"old-{rank}", "facts": number, "location": asdict(Location.own())} for rank in range(5)}
    store.set(f"roster/{OLD}", json.dumps(rows))
    for rank in range(1, 5):
        place = store.add(f"answers/{OLD}", 1)
        store.set(f"answer/{OLD}/{place}", json.dumps({"rank": rank} | rows[rank]))
    store.add(f"answers/{OLD}", 1)  # its place was taken, no more
    store.add(f"heard/{OLD}", 4)
    store.set("attempt/0/ps_dist/first/facts/0", json.dumps(number))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_is_old_is_not_believed(three: Company, order: tuple[int, ...]) -> None:
    left_behind(three.store)
    coming = []
    for rank in order:
        coming.append(three.come(rank))
        if order[0] == 0:
            three.until(lambda store: store.get("call").decode() != OLD)
        else:
            three.until_answered(OLD, min(5 + len(coming), 7))
    calls = {each.result().call for each in coming}
    assert len(calls) == 1
    assert OLD not in calls


def test_attempt_after_attempt_in_one_store(three: Company) -> None:
    calls = [{each.result().call for each in [three.come(rank) for rank in range(3)]} for _ in range(5)]
    assert all(len(each) == 1 for each in calls)
    assert len(set.union(*calls)) == 5


def test_one_that_answered_and_was_started_anew(three: Company) -> None:
    first = three.come(0)
    call = three.until(lambda store: store.check(["call"]) and store.get("call").decode())
    gone = {"rank": 1, "number": "gone", "facts": FACTS, "location": asdict(Location.own())}
    three.store.set(f"answer/{call}/{three.store.add(f'answers/{call}', 1)}", json.dumps(gone))
    anew = three.come(1)
    three.until_answered(call, 2)
    last = three.come(2)
    assert first.result().call == anew.result().call == last.result().call == call
    assert json.loads(three.store.get(f"roster/{call}"))["1"]["number"] != "gone"


@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_differs_ends_all_with_both_named(three: Company, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_roster, "_STAY_S", 30.0)  # all come
    left_behind(three.store)
    order = [first, *({0, 1, 2} - {first})]
    coming = {rank: three.come(rank, transport="nccl" if rank == 1 else "gloo") for rank in order}
    for rank in range(3):
        mine, other, theirs = ("nccl", 0, "gloo") if rank == 1 else ("gloo", 1, "nccl")
        message = f"transport must be the same on all ranks: rank {rank} has {mine}, rank {other} has {theirs}"
        with pytest.raises(RanksDiverged, match=message):
            coming[rank].result()


@pytest.mark.parametrize(("leads", "other", "place"), [(3, 2, 1), (2, 3, 2)])
def test_another_number_of_processes(
    three: Company, leads: int, other: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_roster, "_STAY_S", 0.2)  # for somebody who does not come
    first, second = three.come(0, ranks=leads), three.come(place, ranks=other)
    for rank, coming, mine, there, theirs in ((0, first, leads, place, other), (place, second, other, 0, leads)):
        message = f"the number of processes must be .*: rank {rank} has {mine}, rank {there} has {theirs}"
        with pytest.raises(RanksDiverged, match=message):
            coming.result()


def test_who_did_not_come_is_named_to_all(three: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Event()

    class Looks(_roster._Looks):
        def __init__(self, timeout_s: float) -> None:
            super().__init__(timeout_s)
            self._is_of_rank_0 = timeout_s == 7

        def again(self) -> bool:
            return not answered.wait(30) if self._is_of_rank_0 else super().again()

    monkeypatch.setattr(_roster, "_Looks", Looks)
    first, second = three.come(0, timeout_s=7), three.come(1)
    call = three.until(lambda store: store.check(["call"]) and store.get("call").decode())
    three.until(lambda store: store.check([f"answer/{call}/1"]))
    answered.set()
    for rank, coming in enumerate((first, second)):
        with pytest.raises(RanksDiverged, match=f"rank {rank} of 3: rank 2 did not join within"):
            coming.result()


def test_nobody_calls(three: Company) -> None:
    left_behind(three.store)
    with pytest.raises(RanksDiverged, match=r"rank 2 of 3: rank 0 did not join within 0.1 s; see"):
        three.come(2, timeout_s=0.1).result()

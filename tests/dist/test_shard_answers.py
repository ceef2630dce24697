"""Questions for shards, which threads of other processes answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from _crew import free_port
from ps_core import RanksDiverged
from ps_dist import _shard_answers as shard_answers
from ps_dist._shard_answers import ADDRESS, ShardAnswers, refuses


@pytest.fixture
def pair() -> Iterator[list[ShardAnswers]]:
    """Two ranks, whose shards of a group say whose, and of which group of which model, they are."""
    made = [ShardAnswers("localhost", 5.0) for _ in range(2)]
    for rank, each in enumerate(made):
        each.set_addresses([other.address for other in made])
        for model in range(2):
            each.add(lambda group, _, rank=rank, model=model: _shard(rank, model, group))
    yield made
    for each in made:
        each.close()


def _shard(rank: int, model: int, group: int) -> Tensor:
    return torch.tensor([rank, model, group] * 1000, dtype=torch.uint8)


def test_every_rank_gets_the_shards_of_all_in_their_order(pair: list[ShardAnswers]) -> None:
    for rank, each in enumerate(pair):
        for model, group in ((0, 3), (1, 7), (0, 4)):
            found = each.ask(model, group, 0, me=rank)
            assert all(map(torch.equal, found, [_shard(0, model, group), _shard(1, model, group)]))


def test_who_does_not_know_the_secret_gets_no_answer(pair: list[ShardAnswers]) -> None:
    mine, other = pair
    _, host, port = ADDRESS.unpack(other.address)
    mine.set_addresses([mine.address, ADDRESS.pack(b"guessed", host, port)])
    with pytest.raises(RanksDiverged, match="rank 1 does not answer for its shard of group 2"):
        mine.ask(0, 2, 0, me=0)


def test_a_rank_that_has_gone_is_named(pair: list[ShardAnswers]) -> None:
    mine, other = pair
    other.close()
    with pytest.raises(RanksDiverged, match="rank 1 does not answer for its shard of group 2"):
        mine.ask(0, 2, 0, me=0)


def test_a_question_waits_for_the_step_that_it_asks_for(pair: list[ShardAnswers]) -> None:
    mine, other = pair
    steps, tried = 0, []

    def answer(group: int, wanted: int) -> Tensor | None:
        nonlocal steps
        tried.append(steps)
        steps += 1
        return _shard(1, 2, group) if tried[-1] >= wanted else None

    mine.add(lambda group, _: _shard(0, 2, group))
    model = other.add(answer)
    assert torch.equal(mine.ask(model, 5, 3, me=0)[1], _shard(1, 2, 5))
    assert tried == [0, 1, 2, 3]


def test_an_empty_answer_comes_as_an_empty_shard(pair: list[ShardAnswers]) -> None:
    """A rank that has freed the model gives one; the engine says so by name."""
    for rank, each in enumerate(pair):
        model = each.add(lambda group, _, rank=rank: _shard(0, 2, group) if rank == 0 else torch.empty(0).byte())
    own, empty = pair[0].ask(model, 6, 0, me=0)
    assert own.equal(_shard(0, 2, 6))
    assert (empty.shape, empty.dtype) == ((0,), torch.uint8)


def test_a_rank_that_leaves_answers_nobody_who_waits(pair: list[ShardAnswers]) -> None:
    mine, other = pair
    asked = Event()

    def answer(group: int, wanted: int) -> Tensor | None:
        asked.set()
        return None

    mine.add(lambda group, _: _shard(0, 2, group))
    model = other.add(answer)
    leaving = Thread(target=lambda: (asked.wait(30), other.close()))
    leaving.start()
    with pytest.raises(RanksDiverged, match="rank 1 does not answer for its shard of group 5"):
        mine.ask(model, 5, 1, me=0)
    leaving.join()


def test_who_connects_and_asks_nothing_is_left(pair: list[ShardAnswers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_answers, "_QUESTION_S", 0.2)
    mine, other = pair
    _, host, port = ADDRESS.unpack(other.address)
    with socket.create_connection((host.rstrip(b"\0").decode(), port)):
        begun_s = time.monotonic()
        assert mine.ask(0, 5, 0, me=0)[1].equal(_shard(1, 0, 5))
        assert time.monotonic() - begun_s < 4, "not the timeout of answers"


def test_an_address_within_a_computer_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = shard_answers._own_address
    asked = []

    def towards(host: str) -> str:
        asked.append(host)
        return "127.0.0.2" if host == shard_answers._ELSEWHERE else own(host)

    monkeypatch.setattr(shard_answers, "_own_address", towards)
    hosts = []
    for several in (False, True):
        each = ShardAnswers("localhost", 5.0, several_computers=several)
        hosts.append(ADDRESS.unpack(each.address)[1].rstrip(b"\0").decode())
        each.close()
    assert shard_answers.is_within_computer(hosts[0])
    assert hosts[1] == "127.0.0.2"
    assert asked == ["localhost", "localhost", shard_answers._ELSEWHERE]


def test_an_address_within_a_computer_tells_nothing_of_another_one() -> None:
    address = ADDRESS.pack(b"", b"127.0.0.1", free_port())
    assert refuses(address)
    assert not refuses(address, several_computers=True)


def test_who_has_ended_refuses_and_who_is_busy_does_not() -> None:
    each = ShardAnswers("localhost", 5.0)
    each.add(lambda group, steps: _shard(0, 0, 0))
    asked = [refuses(each.address) for _ in range(3)]
    each.set_addresses([each.address])
    assert [shard.numel() for shard in each.ask(0, 1, 0, me=1)] == [3000], "it still answers"
    address = each.address
    each.close()
    assert asked == [False] * 3
    assert refuses(address)
    assert not refuses(ADDRESS.pack(b"", b"no such host.invalid", 1)), "which tells nothing"

"""The kernel says which processes of this computer are gone, and is not asked about those of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ps_dist._local_ranks import LocalRanks, Location, _started


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it is told to."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def place_of(process: subprocess.Popen[bytes]) -> Location:
    return replace(Location.own(), process=process.pid, started=_started(process.pid))


def test_a_process_that_ended(other: subprocess.Popen[bytes]) -> None:
    ranks = LocalRanks({0: Location.own(), 3: place_of(other)})
    assert ranks.ended() == frozenset()
    other.communicate(b"\n")
    assert ranks.ended() == ranks.ended() == {3}
    ranks.close()
    assert ranks.ended() == frozenset()


def test_processes_of_other_computers(other: subprocess.Popen[bytes]) -> None:
    here = place_of(other)
    ranks = LocalRanks(
        {1: replace(here, machine="another"), 2: replace(here, machine=""), 3: replace(here, started="7")}
    )
    other.communicate(b"\n")
    assert ranks.ended() == frozenset(), "another computer's process may have the same number"
    ranks.close()


def test_two_threads_may_ask_at_once(other: subprocess.Popen[bytes]) -> None:
    """The watchdog asks, and the thread that waits while the store is silent; a poll object refuses two at once."""
    ranks = LocalRanks({0: Location.own(), 1: place_of(other)})

    def ask() -> set[frozenset[int]]:
        return {ranks.ended() for _ in range(20_000)}

    with ThreadPoolExecutor(4) as pool:
        assert [future.result() for future in [pool.submit(ask) for _ in range(4)]] == [{frozenset()}] * 4
    ranks.close()

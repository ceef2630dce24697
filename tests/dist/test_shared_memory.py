"""Processes that share host memory: when they do, what it takes, and what is left of it."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import _memory_cases as cases
import _transport_cases as transport_cases
import _zero_cases as zero_cases
from _crew import Crew, crew
from ps_core.engine._devices.cpu.device import CpuDevice
from ps_core.engine._sharding.join_ranks import GroupJoin
from ps_dist._local_ranks import Location
from ps_dist._messages import PeerMessages
from ps_dist._share_memory import Sharing, ranks_by_computer, share_memory


@pytest.fixture(scope="module")
def three() -> Iterator[Crew]:
    with crew(3) as made:
        yield made


def test_it_is_used_unless_it_is_switched_off(each_crew: Crew) -> None:
    assert each_crew.run(cases.transport) == [("shared", "")] * each_crew.ranks
    assert each_crew.run(cases.transport, shared_memory=False) == [("gloo", "")] * each_crew.ranks


@pytest.mark.parametrize("at_rank", [0, 1])
@pytest.mark.parametrize("what", ["os.memfd_create", "os.ftruncate", "socket.send_fds", "socket.recv_fds"])
def test_all_ranks_use_sockets_if_one_has_none(two: Crew, what: str, at_rank: int) -> None:
    two.run(cases.lacks, what, at_rank)


def test_a_setting_that_differs_is_named(two: Crew) -> None:
    two.run(cases.differ)


@pytest.mark.parametrize("machines", [("one", "other"), ("", "")])
def test_ranks_that_have_computers_of_their_own_send(machines: tuple[str, str]) -> None:
    computers = ranks_by_computer({rank: Location("host", 100 + rank, each) for rank, each in enumerate(machines)})
    nobody: Any = PeerMessages(None, 0)
    why = "no two ranks are known to run on one computer"
    found = share_memory(nobody, computers, 0, lambda: False, 1.0)
    assert found == Sharing(computers, why_not=why)
    assert found.ranks_on_computer_of(0) == 2, "which is careful, if it is not known"
    assert share_memory(nobody, [(0,)], 0, lambda: False, 1.0) == Sharing([(0,)])


def test_which_ranks_run_on_one_computer() -> None:
    places = {rank: Location("host", rank, each) for rank, each in enumerate(("a", "b", "a", "", ""))}
    computers = ranks_by_computer(places)
    assert computers == [(0, 2), (1,), (3,), (4,)]
    assert [Sharing(computers).ranks_on_computer_of(rank) for rank in range(5)] == [2, 1, 2, 1, 1]


@pytest.mark.parametrize(("process", "why"), [(0, "no memory"), (1, "no memory"), (0, "")])
def test_the_first_rank_says_why_sockets_are_used(process: int, why: str, caplog: pytest.LogCaptureFixture) -> None:
    together: Any = SimpleNamespace(
        agree=lambda name, value: None, local_ranks=2, process=process, why_not_shared=why, host_memory=None
    )
    with caplog.at_level(logging.INFO, "ps_core"):
        GroupJoin(together).check(CpuDevice(name="cpu"))
    said = ["processes send what they share over sockets: no memory"] if why and not process else []
    assert [record.message for record in caplog.records] == said


@pytest.mark.parametrize("way", [{}, {"shared_memory": False}], ids=["shared", "sockets"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_three_ranks(three: Crew, kind: str, way: dict[str, bool]) -> None:
    three.run(transport_cases.gathers, 10_007, kind, 1, **way)
    three.run(transport_cases.reduces, 10_007, kind, 1, 2, **way)
    three.run(zero_cases.trains, zero_cases.Way(precision=kind), 2, True, **way)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("disk", [False, True])
def test_budgets_count_shared_memory_once(two: Crew, device: str, disk: bool, tmp_path: Path) -> None:
    two.run(cases.counted, device, str(tmp_path) if disk else "")


def shared_bytes() -> int:
    """Memory of this computer that belongs to anonymous and other files without a disk."""
    found = re.search(r"Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def once_bytes(process: int) -> int:
    """A process's shared memory; what two processes have mapped counts half for each."""
    found = re.search(r"Pss_Shmem:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("what", ["forget", "release", "step"])
def test_a_fork_does_not_change_the_memory_of_its_parent(two: Crew, what: str) -> None:
    two.run(cases.used_in_a_fork, what)


def test_nothing_is_left_of_killed_processes() -> None:
    size, folder = 64 << 20, Path("/dev/shm")
    names, written = set(folder.iterdir()), 2 * 3 * size
    with crew(2) as killed:
        processes = killed.run(cases.fills, size)
        taken = sum(map(once_bytes, processes))
        assert written <= taken <= written + (2 << 20), "a shard, and all shards, on each of two ranks, once"
        assert not [each for each in folder.iterdir() if each not in names and "ps_dist" in each.name]
        before = shared_bytes()
        for process in processes:
            os.kill(process, signal.SIGKILL)
    assert before - shared_bytes() > written // 2, "other programs may take some meanwhile"

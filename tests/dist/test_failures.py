"""Processes that never come, or are not as many as others believe: they say so, and end. See also test_fates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from _crew import free_port, torchrun

PROGRAMS = Path(__file__).parent / "programs"


def launch(program: str, own: Sequence[dict[str, str]]) -> list[tuple[int, str]]:
    """Start the program once a rank, with what torchrun would set and each rank's own; exit status and output."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(own))}
    common |= {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(PROGRAMS / program)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, settings in enumerate(own)
    ]
    try:
        return [(each.wait(), output) for each in running for output in [each.communicate(timeout=300)[0]]]
    finally:
        for each in running:
            each.kill()


def test_a_group_nobody_else_joins() -> None:
    ((status, output),) = launch("alone.py", [{"WORLD_SIZE": "2"}])
    assert status == 0, output
    assert "rank 0 of 2: rank 1 did not join within " in output


def test_another_number_of_processes_is_found_at_the_start() -> None:
    found = launch("unlike.py", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "3"}])
    for rank, (status, output) in enumerate(found):
        assert status == 0, output
        assert f"the number of processes must be the same on all ranks: rank {rank} has {2 + rank}" in output


def test_a_store_that_outlives_attempts_which_nodes_count_differently() -> None:
    """As where the torchrun of one node was started anew, while the store's stayed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("ps_dist/roster/call", "of an attempt that is over")
    common = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    found = launch("small.py", [common | {"TORCHELASTIC_RESTART_COUNT": count} for count in ("1", "0")])
    assert [(status, output.split()[-1]) for status, output in found] == [(0, "0:3.0"), (0, "1:3.0")], found


def test_the_store_ends_last() -> None:
    """If the store ends while a rank asks it, PyTorch prints a trace of calls, although nothing failed."""
    found = launch("leaving.py", [{}, {}, {}])
    assert [status for status, _ in found] == [0, 0, 0], found
    keeper, *others = (float(output.split()[-1]) for _, output in found)
    assert max(others) < keeper
    assert not any("TCPStore" in output for _, output in found)


def test_torchrun() -> None:
    done = torchrun(PROGRAMS / "small.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0:3.0", "1:3.0"]

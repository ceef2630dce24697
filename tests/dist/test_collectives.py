"""Two and three gloo processes; what each asserts, it asserts in its own process."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


def launch(program: str, *, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """Start the program once a rank, with what torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(PROGRAMS / program)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [
            subprocess.CompletedProcess(each.args, each.wait(), output)
            for each in running
            for output in [each.communicate(timeout=60)[0]]
        ]
    finally:
        for each in running:
            each.kill()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(ranks: int) -> None:
    for done in launch("everything.py", ranks=ranks):
        assert done.returncode == 0, done.stdout
        assert "everything held" in done.stdout


def test_a_lost_rank_ends_the_others_with_an_error() -> None:
    lost, other = launch("lost.py", ranks=2)
    assert lost.returncode == 7, lost.stdout
    assert other.returncode == 0, other.stdout
    assert "rank 1 of 2: barrier failed, so another process has ended" in other.stdout
    assert math.isclose(float(other.stdout.splitlines()[-1]), 0, abs_tol=30), "seconds waited"


def test_a_group_nobody_else_joins() -> None:
    (alone,) = launch("alone.py", ranks=1)
    assert alone.returncode == 0, alone.stdout
    assert "rank 0 of 2 could not join the others" in alone.stdout


def test_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAMS / "small.py"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0:3.0", "1:3.0"]

"""Every `InvalidInput` of ps-dist that names what to do: it is provoked, followed, and that works."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_dist
from _followed import Followed, refused
from ps_dist._mesh import Mesh
from ps_dist._torchrun_variables import check_variables

TABLE = Followed()
case, row = TABLE.case, TABLE.row
TESTS = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "_transport.py:__call__": "dist/test_transport_choice.py",
    "_collectives.py:start_all_gather": "dist/_transport_cases.py",
    "_collectives.py:start_reduce_scatter": "dist/_transport_cases.py",
    "_collectives.py:_check_open": "dist/_transport_cases.py",
    "_collectives.py:_check": "dist/_transport_cases.py",
    "shared_memory=True: {}; leave it out: then processes use sockets": "dist/_memory_cases.py",
    "_reduce.py:piece_numel": "dist/_transport_cases.py",
}
"""Where cards are needed, or what the engine alone calls: the test that follows it."""


def alone(**more: Any) -> None:
    """Connect a process that is all there is, as ``torchrun --nproc-per-node=1`` starts it, and add up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**told, "MASTER_ADDR": "127.0.0.1"}.items():
            patch.setenv(name, str(value))
        with ps_dist.connect(**more) as together:
            assert together.ranks == 1


def variables(**more: str) -> None:
    check_variables({"WORLD_SIZE": "1", **more}, joins=True)


row("timeout_s: expected a positive number", lambda: alone(timeout_s=-1), lambda: alone(timeout_s=60.0))
row("transport: expected", lambda: alone(transport="mpi"), lambda: alone(transport="gloo"), alone)
row("shared_memory: expected", lambda: alone(shared_memory="yes"), lambda: alone(shared_memory=False), alone)
row("replicate: expected a whole number", lambda: alone(replicate=0), lambda: alone(replicate=1))
row("the environment variable {} must be a whole number", lambda: variables(RANK="x"), lambda: variables(RANK="0"))
row("must be less than {}, which is {}", lambda: variables(RANK="1"), lambda: variables(RANK="0"))
row("does not divide the {} processes", lambda: Mesh(0, 4, 3), lambda: Mesh(0, 4, 2))


@case("not started by torchrun: {} not set; run torchrun --nproc-per-node=N your_program.py")
def not_started_by_torchrun() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        with refused("run torchrun --nproc-per-node=N your_program.py"):
            ps_dist.connect()
    program = Path("program.py")
    said = "print(f'{together.ranks}\\n', end='', flush=True)"  # in one piece: torchrun starts ranks unbuffered
    program.write_text(f"import ps_dist\nwith ps_dist.connect() as together:\n    {said}\n", "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["2", "2"], done.stderr[-2000:]


@case("transport={}: {}; leave it out: memory of CUDA devices then goes by way of the host's")
def nccl_that_is_missing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with refused("torch finds no CUDA device here; leave it out"):
            alone(transport="nccl")
    alone()


@pytest.mark.parametrize("part", TABLE.cases)
def test_what_an_error_says_works(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TABLE.cases[part]()


def test_every_error_has_a_case() -> None:
    TABLE.check(Path(ps_dist.__file__).parent, elsewhere=ELSEWHERE)
    assert all((TESTS / path).is_file() for path in ELSEWHERE.values())

"""Joining the group: what a user can get wrong."""

from __future__ import annotations

from typing import Any

import pytest

import ps_dist
from ps_core._command.doctor import examine
from ps_core._errors import InvalidInput


@pytest.mark.parametrize("replicate", [0, -1, True, "2", 3])
def test_copies_are_equal_parts_of_the_processes(replicate: Any) -> None:
    with pytest.raises(InvalidInput, match="replicate"):
        ps_dist.Mesh(0, 4, replicate)


def test_the_mesh() -> None:
    places = [ps_dist.Mesh(rank, 6, 2) for rank in range(6)]
    assert [(each.shard, each.shards) for each in places] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [each.shard_peers for each in places] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert [each.replica_peers for each in places] == [(0, 3), (1, 4), (2, 5)] * 2
    assert {each.everyone for each in places} == {(0, 1, 2, 3, 4, 5)}


@pytest.mark.parametrize("timeout_s", [0, -1, True, "soon", float("nan")])
def test_a_timeout_is_a_positive_number(timeout_s: Any) -> None:
    with pytest.raises(InvalidInput, match="timeout_s: expected a positive number of seconds, found"):
        ps_dist.connect(timeout_s=timeout_s)


def test_what_cards_memory_travels_by(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="transport: expected 'gloo', 'nccl' or None, found 'mpi'"):
        ps_dist.connect(transport="mpi")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidInput, match="transport='nccl': torch finds no CUDA device here; leave it out"):
        ps_dist.connect(transport="nccl", timeout_s=20)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(InvalidInput, match="transport='nccl': this torch was built without NCCL"):
        ps_dist.connect(transport="nccl", timeout_s=20)


def test_what_the_doctor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert ps_dist.transports() == ("gloo",)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert ps_dist.transports() == ("gloo", "nccl")
    monkeypatch.undo()
    here = " or ".join(ps_dist.transports())
    works = ps_dist.shared_memory_error()
    said = "processes share host memory" if works is None else f"processes cannot share host memory: {works}"
    assert examine()["ps_dist"] == f"{ps_dist.__version__} sends data of GPUs by {here}; {said}"


def test_what_the_doctor_says_where_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    assert ps_dist.shared_memory_error() == "module 'os' has no attribute 'memfd_create'"
    monkeypatch.undo()
    monkeypatch.setattr("os.ftruncate", refuse)
    assert ps_dist.shared_memory_error() == "[Errno 27] File too large"
    monkeypatch.undo()
    monkeypatch.setattr("socket.send_fds", refuse)
    assert ps_dist.shared_memory_error() == "[Errno 27] File too large"


def refuse(*args: Any) -> None:
    """What a system says that allows no large files."""
    raise OSError(27, "File too large")


def test_shared_memory_is_wanted_or_not() -> None:
    with pytest.raises(InvalidInput, match="shared_memory: expected True, False or None, found 'yes'"):
        ps_dist.connect(shared_memory="yes")  # type: ignore[arg-type]


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidInput, match=r"not started by torchrun: WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        ps_dist.connect()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "x", "RANK must be a whole number from 0 to 2147483647, found 'x'"),
        ("RANK", "", "RANK must be a whole number from 0 to 2147483647, found ''"),
        ("RANK", "-1", "RANK must be a whole number from 0 to 2147483647, found '-1'"),
        ("RANK", "2", "RANK must be less than WORLD_SIZE, which is 2; found 2"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be a whole number from 1 to 2147483647, found '0'"),
        ("WORLD_SIZE", "9" * 5000, "WORLD_SIZE must be a whole number from 1 to 2147483647, found '999"),
        ("MASTER_PORT", "http", "MASTER_PORT must be a whole number from 0 to 65535, found 'http'"),
        ("MASTER_PORT", "65536", "MASTER_PORT must be a whole number from 0 to 65535, found '65536'"),
        ("LOCAL_RANK", "1.0", "LOCAL_RANK must be a whole number from 0 to 2147483647, found '1.0'"),
        ("LOCAL_WORLD_SIZE", "two", "LOCAL_WORLD_SIZE must be a whole number from 1 to 2147483647, found 'two'"),
    ],
    ids=lambda value: value[:16],
)
def test_the_variable_of_torchrun_that_is_wrong(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for each, text in {**sound, "MASTER_ADDR": "127.0.0.1", name: value}.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(InvalidInput, match=f"the environment variable {says}"):
        ps_dist.connect(timeout_s=1)

"""Two processes save a checkpoint over another, and one is killed after one of its calls of the system.

    python killed.py FOLDER

Forks before anything has threads. After each death one process loads what is there, alone; prints a line for each: the
rank that was killed, which of the two was found, after how many calls it was killed.
"""

import os
import signal
import socket
import sys
from pathlib import Path

import torch
from torch import nn

import ps_dist
from ps_core import AdamW, Budget, Options, RanksDiverged
from ps_core.engine import chunked, load_checkpoint, save_checkpoint

CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
DIVERGED = 3


class Reaper:
    """Counts calls of the system, and ends the process after one."""

    def __init__(self, last):
        self.count, self.last = 0, last
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call


def managed(together=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    return chunked(
        model, AdamW(lr=0.1), budget=Budget(host="16MiB"), options=Options(group_bytes=4000), collectives=together
    )


def save(path, model, optimizer, number):
    model.load_state_dict({name: torch.full_like(value, number) for name, value in model.state_dict().items()})
    save_checkpoint(path, model, optimizer, extra={"number": number}, overwrite=True)


def found(path):
    """The number in every weight of the checkpoint, which is whole and by itself."""
    model, optimizer = managed()
    number = load_checkpoint(path, model, optimizer)["number"]
    assert all(bool((value == number).all()) for value in model.state_dict().values())
    assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
    return number


def rank_of_two(rank, port, path, victim, last, report):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    together = ps_dist.connect(timeout_s=12)
    model, optimizer = managed(together)
    save(path, model, optimizer, 1)
    together.barrier()
    reaper = Reaper(last if rank == victim else 0)
    try:
        save(path, model, optimizer, 2)
        together.barrier()
    except RanksDiverged as error:
        if f"rank {victim}" in str(error):
            os._exit(DIVERGED)
        raise
    os.write(report, f"{rank} {reaper.count}\n".encode())
    os._exit(0)


def pair(path, victim, last):
    """Both ranks' lives; how many calls each made, where none was killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    read, write = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                rank_of_two(rank, port, path, victim, last, write)
            finally:
                os._exit(9)
        children.append(child)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    expected = [0, 0] if not last else [DIVERGED, DIVERGED]
    if last:
        expected[victim] = -signal.SIGKILL
    assert ends == expected, (victim, last, ends)
    return dict(map(int, line.split()) for line in text.splitlines())


def main():
    torch.set_num_threads(1)
    path = Path(sys.argv[1]) / "run"
    calls = pair(path, 0, 0)
    assert found(path) == 2
    instants = [(0, 3), (0, calls[0] // 2), *((0, calls[0] - back) for back in (14, 10)), (1, 2), (1, calls[1] - 1)]
    for victim, last in instants:
        pair(path, victim, last)
        print(victim, {1: "before", 2: "after"}[found(path)], last, flush=True)


if __name__ == "__main__":
    main()

"""Processes that stay, joined as torchrun would join them, and do one case after another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import SystemRandom
from typing import Any

import ps_dist

_WAIT_S = 180.0
"""Processes begin by importing torch, which takes long on a busy computer."""


def free_port() -> int:
    """Return a free port outside of the range from which the system takes ports for connections.

    Ranks take seconds to start; a connection could have taken another port meanwhile.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def exit_status(child: int) -> int:
    """Return the exit status of a forked process; kill it and raise if it has not ended after a minute.

    It may wait for a lock that another thread held at the fork, and that nobody releases in the copy.
    """
    deadline_s = time.monotonic() + 60
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("a fork did not end")
        time.sleep(0.01)


def torchrun(program: Path, *, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Two processes with a thread each; what they printed."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Crew:
    """One process a rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._broken = ""
        """Why no case can be run any more; empty: each can."""
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._lines: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, ranks, port, there), daemon=True)
            process.start()
            there.close()
            self._lines.append(here)
            self._processes.append(process)

    def run(self, case: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        """What ``case(collectives, *args)`` gives on each rank; settings are `connect`'s."""
        assert not self._broken, self._broken
        for line in self._lines:
            line.send((case, args, settings))
        found = []
        for rank, line in enumerate(self._lines):
            if not line.poll(_WAIT_S):
                self._broken = f"rank {rank} did not answer in {case.__name__}; nor would it in later cases"
                raise AssertionError(self._broken)
            try:
                good, value = line.recv()
            except EOFError:  # it was killed, which the case wants
                good, value = True, None
            found.append((good, value))
        failed = "\n".join(f"rank {rank}: {value}" for rank, (good, value) in enumerate(found) if not good)
        assert not failed, failed
        return [value for _, value in found]

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(10)
            process.kill()


@contextmanager
def crew(ranks: int) -> Iterator[Crew]:
    """For as long as the block."""
    made = Crew(ranks)
    try:
        yield made
    finally:
        made.close()


def _serve(rank: int, ranks: int, port: int, line: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first = ps_dist.connect(timeout_s=_WAIT_S)
    joined: dict[Any, ps_dist.TorchCollectives] = {(): first}
    while True:
        try:
            case, args, settings = line.recv()
        except EOFError:
            break
        try:
            key = tuple(sorted(settings.items()))
            if key not in joined:
                joined[key] = ps_dist.connect(**({"timeout_s": 30} | settings))
            line.send((True, case(joined[key], *args)))
        except BaseException:
            line.send((False, traceback.format_exc()))
    for each in reversed(joined.values()):
        each.close()

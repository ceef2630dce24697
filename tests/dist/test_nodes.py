"""Two computers, as network namespaces with a slow link between them, joined by torchrun; then the link is cut."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

import pytest

PROGRAM = Path(__file__).parent / "programs" / "node.py"
ADDRESSES = ("10.78.0.1", "10.78.0.2")


def do(*words: str) -> None:
    """Run one of the tools; skip where it may not."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Two namespaces; in each, an interface of the same name leads to the other, at 200 Mbit/s."""
    # Where administrators' tools are, which not every program's path has.
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"network namespaces cannot be made here: {' and '.join(missing)} not installed (iproute2)")
    names = (f"psa{os.getpid()}", f"psb{os.getpid()}")
    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", "node", "netns", names[0], "type", "veth", "peer", "name", "node", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "node")
            for interface in ("lo", "node"):
                do("ip", "-n", name, "link", "set", interface, "up")
            limit = ("tbf", "rate", "200mbit", "burst", "256kb", "latency", "100ms")
            do("tc", "-n", name, "qdisc", "add", "dev", "node", "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Node:
    """One torchrun in its namespace, and what was said there."""

    def __init__(self, place: int, space: str) -> None:
        words = (
            *("ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29511"),
            # By itself torchrun finds out who is the host by the names of the computer, which here is the same one.
            *("--rdzv-id=nodes", f"--local-addr={ADDRESSES[place]}", f"--rdzv-conf=is_host={1 - place}", str(PROGRAM)),
        )
        self._process = subprocess.Popen(
            words,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "node", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        self.said: list[str] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self.worker = 0
        """The process that torchrun started."""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")  # there is no more

    def until(self, pattern: str) -> re.Match[str]:
        """Read up to the line that has it."""
        deadline = time.monotonic() + 300
        while True:
            try:
                self.said.append(self._lines.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                self.said.append("")
            assert self.said[-1], f"no {pattern!r} in\n{''.join(self.said)}"
            if found := re.search(pattern, self.said[-1]):
                return found

    def close(self) -> None:
        """torchrun itself would look for the other node for a while."""
        self._process.kill()
        self._process.wait()
        if self.worker:
            with suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
        self._reader.join(10)


def has_ended(process: int) -> bool:
    """Whether it is gone, or waits for torchrun to take note of it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_link_that_is_cut_ends_both_sides(spaces: tuple[str, str]) -> None:
    nodes = [Node(place, space) for place, space in enumerate(spaces)]
    try:
        for node in nodes:
            node.worker = int(node.until(r"^process (\d+)$")[1])
        for node in nodes:
            node.until("^trained$")
        do("ip", "-n", spaces[1], "link", "set", "node", "down")
        for rank, node in enumerate(nodes):
            node.until(rf"RanksDiverged: rank {rank} of 2: number \d+, .*, cannot end: ")
            silent = rf"rank {1 - rank} on \S+ has not answered for|the store that torchrun keeps has not answered for"
            assert re.search(silent, node.said[-1]), node.said
            assert has_ended(node.worker)
    finally:
        for node in nodes:
            node.close()

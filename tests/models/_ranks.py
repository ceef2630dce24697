"""A process that has imported everything, and makes copies of itself that train together, as under torchrun.

Asked by lines of JSON, it answers with lines of JSON. A copy takes a fraction of a second, a new Python several.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class End(NamedTuple):
    """Of one process."""

    status: int
    output: str


class Ranks:
    """The tests' side of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def train(
        self,
        folder: Path,
        words: Sequence[str | Path | int],
        *,
        ranks: int = 2,
        own: Sequence[Sequence[str]] = ((), ()),
        at: tuple[int, int, signal.Signals] | None = None,
        nan: tuple[int, int] | None = None,
    ) -> list[End]:
        """How each of so many processes ended.

        ``own``: words of each process. ``at``: a process, a step, and the signal that it gets at its beginning.
        ``nan``: a process, and the step from which its losses are NaN.
        """
        asked = {
            "words": [[*map(str, words), *more] for more in own[:ranks]],
            "said": [str(folder / f"said-{rank}") for rank in range(ranks)],
            "at": at,
            "nan": nan,
        }
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        pipes[0].write(json.dumps(asked) + "\n")
        pipes[0].flush()
        statuses = json.loads(pipes[1].readline())
        return [End(status, (folder / f"said-{rank}").read_text("utf-8")) for rank, status in enumerate(statuses)]

    def close(self) -> None:
        """No more runs."""
        self._process.communicate()


def _become(rank: int, asked: dict[str, Any], port: int) -> None:
    output = os.open(asked["said"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks = str(len(asked["words"]))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if asked["at"] is not None and asked["at"][0] == rank:
        number = asked["at"][2]
        _do_at(asked["at"][1], lambda: os.kill(os.getpid(), number))
    if asked["nan"] is not None and asked["nan"][0] == rank:
        _do_at(asked["nan"][1], _make_nan)


def _do_at(step: int, do: Callable[[], object]) -> None:
    """Do something at the beginning of a step."""
    loop: Any = importlib.import_module("ps_models.train._loop")
    rate = loop.learning_rate

    def learning_rate(options: Any, at: int) -> float:
        if at == step:
            do()
        return float(rate(options, at))

    loop.learning_rate = learning_rate


def _make_nan() -> None:
    """Let every loss of this process be NaN."""
    kind: Any = importlib.import_module("ps_models.train._loop").Loop
    loss_of = kind._loss
    kind._loss = lambda loop, batch: loss_of(loop, batch) * float("nan")


def _serve() -> None:
    import torch

    import ps_dist  # noqa: F401 - for all copies
    from ps_models.train import main

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports a large part of torch
    gc.freeze()  # else each copy would look through all of that when it ends
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = []
        for rank, words in enumerate(asked["words"]):
            child = os.fork()
            if child == 0:
                _become(rank, asked, port)
                sys.exit(main(words))
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    _serve()

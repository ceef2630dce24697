"""Processes that die while they save: a program of its own, so that it can fork before anything has threads.

    python _saver.py FOLDER SEED

Children save over a checkpoint and are killed after a call of the system, after each that a save makes in turn; then at
instants that the clock picks; then while they load and clear up what another left. After each death the checkpoint is
loaded. Prints, as JSON, what was found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ps_core import AdamW, Budget, InvalidInput, Options
from ps_core.engine import chunked, load_checkpoint, save_checkpoint

CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
AT_RANDOM = 20


class Reaper:
    """Counts calls of the system, and ends the process after one."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._tick()
            return result

        return call

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class Ward:
    """A checkpoint that holds a number, in every weight and beside; and those who write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
        options = Options(group_bytes=4000)
        self.model, self.optimizer = chunked(model, AdamW(lr=0.1), budget=Budget(host="16MiB"), options=options)

    def save(self, number: int) -> None:
        same = {name: torch.full_like(value, number) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(same)
        save_checkpoint(self.path, self.model, self.optimizer, extra={"number": number}, overwrite=True)

    def load(self) -> int | None:
        """The number; None if there is no checkpoint."""
        try:
            number = load_checkpoint(self.path, self.model, self.optimizer)["number"]
        except InvalidInput:  # there is none; damage is another error
            number = None
        else:
            assert all(bool((value == number).all()) for value in self.model.state_dict().values())
        left = sorted(each.name for each in self.path.parent.iterdir())
        assert left == ([] if number is None else [self.path.name]), left
        return number


def child(work: Callable[[], object], last: int = 0) -> tuple[bool, int]:
    """Work in a process of its own; whether it was killed, and how many calls it had made if not."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        reaper = Reaper(last)
        work()
        os.write(write, str(reaper.count).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status) or status == 0, "the child failed by itself"
    return os.WIFSIGNALED(status), int(text or 0)


def at_every_call(ward: Ward) -> list[tuple[int, int | None]]:
    """From no checkpoint to the first, then from each to the next; what there was after each death."""
    found: list[tuple[int, int | None]] = []
    for number in (1, 2):
        last = 0
        killed = True
        while killed:
            last += 1
            killed, _ = child(lambda number=number: ward.save(number), last)
            found.append((number, ward.load()))
            if killed and found[-1][1] == number:  # begin again from the one before
                if number == 1:
                    for each in ward.path.iterdir():
                        each.unlink()
                    ward.path.rmdir()
                else:
                    child(lambda: ward.save(1))
    return found


def at_random(ward: Ward, rng: random.Random) -> list[tuple[int, int | None]]:
    """Killed by another process, in the midst of whatever it does."""
    found: list[tuple[int, int | None]] = []
    start = time.perf_counter()
    child(lambda: ward.save(3))
    usual_s = time.perf_counter() - start
    for number in range(4, 4 + AT_RANDOM):
        process = os.fork()
        if process == 0:
            ward.save(number)
            os._exit(0)
        time.sleep(rng.random() * usual_s)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        found.append((number, ward.load()))
    return found


def while_clearing_up(ward: Ward, rng: random.Random) -> list[tuple[int, int | None]]:
    """Killed while it loads what a killed one left."""
    found: list[tuple[int, int | None]] = []
    _, calls = child(lambda: ward.save(100))
    for last in range(2, calls, 3):
        number = 100 + last
        child(lambda number=number: ward.save(number), last)
        child(ward.load, rng.randrange(1, 20))
        found.append((number, ward.load()))
    return found


def main() -> None:
    torch.set_num_threads(1)
    ward, rng = Ward(Path(sys.argv[1]) / "run"), random.Random(int(sys.argv[2]))
    print(json.dumps([at_every_call(ward), at_random(ward, rng), while_clearing_up(ward, rng)]))


if __name__ == "__main__":
    main()

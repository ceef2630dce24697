"""Run a contender in its own process, as a program would. Contenders that share a heap slow each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Contender: TypeAlias = tuple[Callable[[], object], Callable[[], Any]]
"""A function that makes a step, and one that returns what there is to tell of all steps."""

_STEP, _TELL = "step", "tell"


class OwnProcess:
    """A contender in its own process. Use it in a ``with`` block; call it to make a step."""

    def __init__(self, make: Callable[..., AbstractContextManager[Contender]], *arguments: object) -> None:
        """Start the process, which makes the contender by ``make(*arguments)``; both must be picklable."""
        spawning = multiprocessing.get_context("spawn")
        self._pipe, other = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(other, make, arguments), daemon=True)
        self._process.start()
        other.close()

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def __call__(self) -> None:
        """Run one training step in the process, and wait until it ends."""
        self._ask(_STEP)

    def told(self) -> Any:
        """Return what the contender's second function returns (any: each contender has its own)."""
        return self._ask(_TELL)

    def _ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("a contender's process ended; its traceback is above") from None


def _serve(
    pipe: Connection, make: Callable[..., AbstractContextManager[Contender]], arguments: tuple[object, ...]
) -> None:
    with make(*arguments) as (step, tell):
        while True:
            try:
                asked = pipe.recv()
            except (EOFError, ConnectionError):  # the other process is gone, or has what it wants
                return
            answer = None
            if asked == _TELL:
                answer = tell()
            else:
                step()
            try:
                pipe.send(answer)
            except ConnectionError:
                return

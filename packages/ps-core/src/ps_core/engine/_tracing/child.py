"""Work that may abort the process or wreck its objects, done in a forked copy of it.

The child has the caller's objects without pickling them. Of the caller's threads it has one, so the work must not need
the others: no arithmetic on several cores, no accelerator.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import torch

from ps_core._errors import InvalidInput, PatrickStarError
from ps_core.engine._support.interrupts import defer_interrupts_installing

_TORCH = str(Path(torch.__file__).parent)
_SAID_BYTES = 2000


class ChildFailed(PatrickStarError):
    """The work did not finish in a copy of this process; the message says why."""


class WorkRaised(ChildFailed):
    """The work raised an exception in the copy of this process; the message has its type and first line."""


def in_child(work: Callable[[], str], timeout_s: float) -> str:
    """What ``work`` returns, done in a forked copy of this process.

    `InvalidInput` raised by the work is raised here too; whatever else ends it raises `ChildFailed`.
    """
    if not hasattr(os, "fork"):
        raise ChildFailed("this platform cannot fork a process")
    with tempfile.TemporaryFile() as said:
        child = _Child()
        try:
            child.start(work, said)
            text = child.read(timeout_s)
            status = child.wait()
        except BaseException:
            child.end()
            raise
        return _judge(text, status, said)


class _Child:
    """A copy of this process. No interrupt comes between its birth and its number being known, nor within a fork.

    (What Python does around a fork calls functions whose exceptions go nowhere.) In the copy none ever comes.
    """

    def __init__(self) -> None:
        self._number = 0
        self._answer: IO[bytes] | None = None

    @defer_interrupts_installing
    def start(self, work: Callable[[], str], said: IO[bytes]) -> None:
        """Have it do the work and write the outcome."""
        reader, writer = os.pipe()
        self._answer = os.fdopen(reader, "rb", buffering=0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads: see above
                self._number = os.fork()
            if not self._number:
                _be_the_child(work, writer, said)
        except OSError as error:
            raise ChildFailed(f"this process could not be copied: {error.strerror}") from error
        finally:
            os.close(writer)

    def read(self, timeout_s: float) -> bytes:
        """All that it has to say."""
        assert self._answer is not None, "it was started"
        end = time.monotonic() + timeout_s
        parts: list[bytes] = []
        while True:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answer], [], [], left)[0]:
                raise ChildFailed(f"it was not done after {timeout_s:g} s")
            part = self._answer.read(1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)

    @defer_interrupts_installing
    def wait(self) -> int:
        """Its exit status; it has nothing more to say."""
        number, self._number = self._number, 0
        if self._answer is not None:
            self._answer.close()
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

    @defer_interrupts_installing
    def end(self) -> None:
        """Have it gone, if it is not."""
        if self._number:
            os.kill(self._number, signal.SIGKILL)
            self.wait()
        elif self._answer is not None:
            self._answer.close()


def _be_the_child(work: Callable[[], str], writer: int, said: IO[bytes]) -> NoReturn:
    status = 1
    try:
        faulthandler.disable()  # a dump would go to the caller's terminal
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
        gc.freeze()  # collecting the caller's garbage would run its finalizers twice, and copy its pages
        torch.set_num_threads(1)
        with os.fdopen(writer, "w", encoding="utf-8") as answer:
            json.dump(_outcome(work), answer)
        status = 0
    finally:
        os._exit(status)  # whatever happened: nothing of the caller's may run here, not even its exit handlers


def _outcome(work: Callable[[], str]) -> dict[str, str]:
    try:
        return {"result": work()}
    except InvalidInput as error:
        return {"invalid": str(error)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {lines[0]}{_where(error)}"}


def _where(error: Exception) -> str:
    """The innermost line outside torch and this package: most often the model's."""
    ours = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, ours, "<")):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _judge(text: bytes, status: int, said: IO[bytes]) -> str:
    if status == 0:
        outcome: dict[str, str] = json.loads(text)
        if "result" in outcome:
            return outcome["result"]
        if "invalid" in outcome:
            raise InvalidInput(outcome["invalid"])
        raise WorkRaised(outcome["failed"])
    said.seek(max(0, said.seek(0, os.SEEK_END) - _SAID_BYTES))
    last = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()][-1:]
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    raise ChildFailed(f"the process that tried ended by {how}" + "".join(f"; its last words: {line}" for line in last))

"""A process that has imported everything, and makes copies of itself that train and are killed.

Asked by lines of JSON, it answers with lines of JSON. A copy takes a fraction of a second, a new Python several.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FILES = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.scandir", "os.listdir"})
"""What Python tells of before it does it, and what can be cut short."""


class Zygote:
    """The tests' side of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        words: list[str],
        said: Path,
        *,
        watch: Path | None = None,
        after: int | None = None,
        delay_s: float | None = None,
    ) -> dict[str, Any]:
        """Train in a copy; kill it before its ``after``th use of a file below ``watch``, or after a delay.

        Its output goes to the file ``said``. Answers with ``signal`` or ``status``, and, unless killed, ``uses``.
        """
        pipes = self._process.stdin, self._process.stdout
        asked = {"words": words, "said": str(said), "watch": str(watch), "after": after, "delay_s": delay_s}
        assert pipes[0] is not None
        assert pipes[1] is not None
        pipes[0].write(json.dumps(asked) + "\n")
        pipes[0].flush()
        answer: dict[str, Any] = json.loads(pipes[1].readline())
        return answer

    def close(self) -> None:
        """No more runs."""
        self._process.communicate()


def _child(asked: dict[str, Any], uses: int) -> None:
    """Never returns."""
    output = os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    count, watch, after = 0, asked["watch"], asked["after"]

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in FILES and arguments and str(arguments[0]).startswith(watch):
            count += 1
            if count == after:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hear)
    from ps_models.train import main

    status = main(asked["words"])
    sys.stdout.flush()
    os.write(uses, str(count).encode())
    os._exit(status)


def _serve() -> None:
    import ps_models.train

    ps_models.build("gpt-1x32")  # what the copies shall find done and imported
    for line in sys.stdin:
        asked = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _child(asked, writer)
        os.close(writer)
        if asked["delay_s"] is not None:
            time.sleep(asked["delay_s"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        uses = os.read(reader, 99)
        os.close(reader)
        answer = {"uses": int(uses)} if uses else {}
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({**answer, "status": code}), flush=True)


if __name__ == "__main__":
    _serve()

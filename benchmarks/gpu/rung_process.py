"""Run rungs of the ladder in a process of their own, and say where it is where that takes too long."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

INTERRUPTED = 130
"""The status of rungs that were interrupted."""


class RungProcess:
    """Rungs that run in a process of their own."""

    def __init__(self, script: str, names: list[str], limit_s: float, environment: dict[str, str]) -> None:
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed as this ends
        command = [sys.executable, "-X", "faulthandler", script, "--rung", *names]
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)

    def end(self, *, at_once: bool = False) -> tuple[int, list[str]]:
        """Wait until they end, or end them where they take too long or this is interrupted."""
        process, why = self._process, list[str]()
        try:
            status = process.wait(0 if at_once else max(0.1, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            status, why = 124, [f"stopped after {self._limit_s:.0f} s"]
        except KeyboardInterrupt:
            at_once = True
        if at_once:
            status, why = INTERRUPTED, ["interrupted"]
        for number in (signal.SIGUSR1, signal.SIGKILL):  # the first makes it say where its threads are
            if process.poll() is None:
                process.send_signal(number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
        with self._output as output:
            output.seek(0)
            return status, output.read().splitlines() + why

"""Threads of the compiled kernels: which cores they run on, and that Python runs on meanwhile."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

import ps_kernels
from ps_kernels import _api, _native

compiled = pytest.mark.skipif(ps_kernels.backends()["scalar"] != "available", reason=ps_kernels.backends()["scalar"])
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="fewer than two cores here, so there is nothing to bind")
NUMEL = 1 << 22

WATCH = f"""
import os, threading, numpy as np, ps_kernels
cores, numel = sorted(os.sched_getaffinity(0))[:2], {NUMEL}
main, seen = threading.get_native_id(), set()
arrays = [np.ones(numel, np.float32) for _ in range(4)]

def step():
    done = threading.Event()
    def watch():
        while not done.is_set():
            seen.add(frozenset(os.sched_getaffinity(main)))
    watcher = threading.Thread(target=watch)
    watcher.start()
    ps_kernels.adam_step(*arrays, step=1, lr=0.1, backend="scalar")
    ps_kernels.sumsq_finite(arrays[0], np.zeros(2, np.float32), backend="scalar")
    done.set()
    watcher.join()

def bound():
    others = [int(name) for name in os.listdir("/proc/self/task") if int(name) != main]
    return [sorted(cores) for other in others if (cores := os.sched_getaffinity(other)) != whole]

whole = os.sched_getaffinity(0)
ps_kernels.set_threads(2)
step()
assert bound() == [], bound()
assert seen == {{frozenset(whole)}}, seen
for first, second in (cores, cores[::-1]):
    seen.clear()
    ps_kernels.set_threads(2, cores=(first, second))
    step()
    assert bound() == [[second]], bound()
    assert frozenset([first]) in seen, seen
    assert os.sched_getaffinity(0) == whole
ps_kernels.set_threads(2)
seen.clear()
step()
assert bound() == [], bound()
assert seen == {{frozenset(whole)}}, seen
"""


@compiled
@two_cores
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no list of threads here")
def test_threads_run_on_the_cores_named() -> None:
    """In another process, where nobody else binds threads."""
    done = subprocess.run([sys.executable, "-c", WATCH], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@compiled
@pytest.mark.parametrize("cores", [(), (CORES[0],) if CORES else (0,), (0, 0), (0, 99_999), (-1, 0)])
def test_cores_that_cannot_be(cores: tuple[int, ...]) -> None:
    with pytest.raises(ps_kernels.InvalidArgument, match=r"cores: expected 2 different ones of \[.*found"):
        ps_kernels.set_threads(2, cores=cores)


def test_cores_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api, "native", lambda: {"scalar": "not compiled: no C compiler found"})
    with pytest.raises(ps_kernels.BackendMissing, match="only the compiled backends bind their threads; not compiled"):
        ps_kernels.set_threads(1, cores=CORES[:1] or [0])
    ps_kernels.set_threads(torch.get_num_threads())


@compiled
@pytest.mark.parametrize("held", [False, True], ids=["let go", "held"])
def test_the_interpreter_runs_on_during_a_step(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's steps of Python fall into the middle of a call; into none whose lock is held, to be sure."""
    scalar = _native.native()["scalar"]
    assert isinstance(scalar, _native.NativeBackend)
    if held:
        library = ctypes.PyDLL(str(_native.library()))
        monkeypatch.setitem(scalar._call, "adam", library.ps_scalar_adam)
    monkeypatch.setattr(scalar._threads, "count", 1)
    arrays = [np.ones(NUMEL, np.float32) for _ in range(4)]
    ps_kernels.adam_step(*arrays, step=1, lr=0.1, backend="scalar")
    stamps, stop = [], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0)

    ticker = threading.Thread(target=tick)
    ticker.start()
    calls = []
    for _ in range(5):
        start = time.perf_counter()
        ps_kernels.adam_step(*arrays, step=1, lr=0.1, backend="scalar")
        calls.append((start, time.perf_counter()))
    stop.set()
    ticker.join()
    inside = [sum(a + (b - a) / 4 < stamp < b - (b - a) / 4 for stamp in stamps) for a, b in calls]
    assert (max(inside) == 0) if held else (max(inside) > 0)

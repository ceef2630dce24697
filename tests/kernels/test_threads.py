"""Threads of the compiled kernels: which cores they run on, and that Python runs on meanwhile."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
import contextlib, os, threading, numpy as np, ps_kernels
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
    found = []
    for other in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if other != main and (cores := os.sched_getaffinity(other)) != whole:
                found.append(sorted(cores))
    return found

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


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A call that runs each kernel, and returns the number of threads that was passed to all of them."""
    scalar = _native.native()["scalar"]
    assert isinstance(scalar, _native.NativeBackend)
    counts: list[int] = []
    for name in scalar._call:
        place = -2 if name == "sumsq_spans" else -1
        monkeypatch.setitem(scalar._call, name, lambda *args, place=place: counts.append(args[place]))
    monkeypatch.setattr(scalar, "_cross_entropy", lambda *args: counts.append(args[-1]) or -1)
    monkeypatch.setattr(scalar._threads, "cores", 8)
    monkeypatch.setattr(scalar._threads, "default", 5)
    monkeypatch.setattr(scalar._threads, "count", None)

    def run() -> int:
        counts.clear()
        p, m, v, g = (np.ones(NUMEL, np.float32) for _ in range(4))
        ps_kernels.adam_step(p, m, v, g, step=1, lr=0.1, backend="scalar")
        ps_kernels.sgd_step(p, m, g, lr=0.1, momentum_decay=0.1, backend="scalar")
        ps_kernels.sumsq_finite(g, np.zeros(2, np.float32), backend="scalar")
        ps_kernels.sumsq_finite(g, np.zeros((1, 2), np.float32), spans=[(0, g.size)], backend="scalar")
        ps_kernels.accumulate(p, g, backend="scalar")
        ps_kernels.gather([p], g, [0], backend="scalar")
        logits, labels = g.reshape(64, -1), np.zeros(64, np.int64)
        scalar.cross_entropy(logits, labels, p[:64], ignored=-100, factor=1.0, gradient=True)
        assert len(counts) == 7
        (count,) = set(counts)
        return count

    return run


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@compiled
@pytest.mark.usefixtures("torch_threads")
def test_kernels_follow_the_number_of_threads_of_pytorch(passed: Callable[[], int]) -> None:
    for count in (1, 3, 8):
        torch.set_num_threads(count)
        assert passed() == count
    torch.set_num_threads(9)
    assert passed() == 8, "more than there are cores would wait for each other"


@compiled
@pytest.mark.usefixtures("torch_threads")
def test_each_thread_follows_its_own_number(passed: Callable[[], int]) -> None:
    """PyTorch has one for each thread: a thread begins with the number that was set last, and keeps it."""
    found, asked, changed = [], threading.Event(), threading.Event()

    def other() -> None:
        found.append(passed())
        asked.set()
        changed.wait(60)
        found.append(passed())
        torch.set_num_threads(4)
        found.append(passed())

    torch.set_num_threads(3)
    thread = threading.Thread(target=other)
    thread.start()
    asked.wait(60)
    torch.set_num_threads(2)
    changed.set()
    thread.join()
    assert found == [3, 3, 4]
    assert passed() == 2


@compiled
@pytest.mark.usefixtures("torch_threads")
def test_the_number_of_set_threads_holds(passed: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api, "backends", lambda: {"scalar": "available"})
    ps_kernels.set_threads(6)
    for count in (1, 7):
        torch.set_num_threads(count)
        assert passed() == 6


@compiled
def test_without_pytorch_the_number_is_that_of_the_start(
    passed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert passed() == 5


@compiled
def test_kernels_do_not_import_pytorch(tmp_path: Path) -> None:
    """Also where CuPy is installed, whose backend needs it."""
    (tmp_path / "cupy.py").write_text("raise ImportError", encoding="utf-8")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import numpy as np, ps_kernels\n"
        "x = np.ones(1 << 20, np.float32)\n"
        "ps_kernels.sumsq_finite(x, np.zeros(2, np.float32), backend='scalar')\n"
        "from ps_kernels._native import native\n"
        "threads = native()['scalar']._threads\n"
        "assert threads.most(x.size) == min(threads.cores, 2), threads\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


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

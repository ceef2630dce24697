"""What starts the kernels, with a stand-in for CuPy; and the script that runs all this on a device."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from ps_kernels import _backends, _cuda
from ps_kernels._compile import cache_folder
from ps_kernels._cuda_source import KERNELS, OPTIONS, source
from ps_kernels._errors import InvalidArgument

ROOT = Path(__file__).parents[2]


class StandIn:
    """The part of CuPy that is used, writing down what it is asked for."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cuda = SimpleNamespace(
            Device=self.device,
            Stream=SimpleNamespace(from_external=self.stream),
            compiler=SimpleNamespace(compile_using_nvrtc=self.compile),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
        )
        self.RawModule = self.module

    def device(self, index: int) -> Any:
        return Device(self.calls, index)

    def stream(self, external: Any) -> Any:
        return Stream(self.calls, external.__cuda_stream__())

    def compile(self, text: str, options: tuple[str, ...]) -> tuple[bytes, None]:
        self.calls.append(("compile", text, options))
        return f"binary {len(self.calls)}".encode(), None

    def module(self, *, path: str) -> Any:
        self.calls.append(("load", Path(path).name, Path(path).read_bytes()))
        return SimpleNamespace(get_function=self.function)

    def function(self, name: str) -> Any:
        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            self.calls.append((name, grid, block, arguments))

        self.calls.append(("function", name))
        return launch


class Stream:
    """A stream that may be entered more than once."""

    def __init__(self, calls: list[Any], stream: tuple[int, int]) -> None:
        self.calls, self.stream = calls, stream
        calls.append(("made", calls[-1]))

    def __enter__(self) -> None:
        self.calls.append(("stream", self.stream))

    def __exit__(self, *_: object) -> None: ...


class Device:
    """What is current while it is entered."""

    def __init__(self, calls: list[Any], index: int) -> None:
        self.calls, self.index = calls, index
        self.compute_capability = "90" if index == 1 else "80"

    def __enter__(self) -> None:
        self.calls.append(("device", self.index))

    def __exit__(self, *_: object) -> None:
        self.calls.append(("left", self.index))


@pytest.fixture(autouse=True)
def _looked_for_anew() -> Iterator[None]:
    """What was found out about this process is forgotten, before and after."""
    _backends._cuda.cache_clear()
    yield
    _backends._cuda.cache_clear()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setenv("PS_KERNELS_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return stand_in


def launched(launcher: _cuda.CupyLauncher, index: int = 1) -> None:
    on: Any = SimpleNamespace(get_device=lambda: index, device=f"cuda:{index}")
    launcher.launch(("step", "accumulate_float32"), (3, 256), (1 << 40, 2.5), on)


def test_a_launch(cupy: StandIn) -> None:
    launcher = _cuda.CupyLauncher()
    for _ in range(2):
        launched(launcher)
    assert [call[0] for call in cupy.calls].count("load") == 1, "a module is loaded once"
    assert ("compile", source("step"), OPTIONS) in cupy.calls, "by the compiler that appends no option about denormals"
    current = cupy.calls.index(("device", 1)), cupy.calls.index(("left", 1))
    assert all(
        current[0] < cupy.calls.index(call) < current[1] for call in cupy.calls if call[0] in ("compile", "load")
    )
    assert cupy.calls.count(("stream", (0, 77))) == 2, "both launches are on PyTorch's stream"
    assert cupy.calls.count(("made", ("device", 1))) == 1, "CuPy's stream is made once, for the launch's device"
    name, grid, block, arguments = cupy.calls[-2]
    assert (name, grid, block) == ("accumulate_float32", (3,), (256,))
    assert [(type(x), x) for x in arguments] == [(np.int64, 1 << 40), (np.float32, 2.5)]


def test_what_was_compiled_is_kept_for_its_kind_of_device(cupy: StandIn, tmp_path: Path) -> None:
    for index in (1, 0, 1):
        launched(_cuda.CupyLauncher(), index)
    compiled = [call for call in cupy.calls if call[0] == "compile"]
    first, other, again = (call for call in cupy.calls if call[0] == "load")
    assert len(compiled) == 2
    assert first == again
    assert first[1].startswith("step-sm90-")
    assert other[1].startswith("step-sm80-")
    assert first[2] != other[2]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {first[1], other[1]}
    cupy.cuda.nvrtc.getVersion = lambda: (13, 1)
    launched(_cuda.CupyLauncher())
    assert [call[0] for call in cupy.calls].count("compile") == 3, "another compiler"


def test_a_cache_that_cannot_be_written(cupy: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_text("a file where a folder should be", "utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher = _cuda.CupyLauncher()
    launched(launcher)
    assert cupy.calls[-2][0] == "accumulate_float32"
    assert len(list(tmp_path.glob("ps_kernels-*/step-sm90-*.cubin"))) == 1
    del launcher
    gc.collect()
    assert not list(tmp_path.glob("ps_kernels-*"))


def test_warming_compiles_every_kernel_for_every_device(
    cupy: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"device {index}")
    lines = _cuda.warm()
    assert [lines[0], lines[len(lines) // 2]] == ["device 0:", "device 1:"]
    assert lines[-1] == f"kept in {tmp_path / 'kept'}"
    every = [name for names in KERNELS.values() for name in names]
    assert [line.split()[0] for line in lines[1 : len(lines) // 2]] == every
    assert [call[1] for call in cupy.calls if call[0] == "function"] == every * 2
    assert [call[0] for call in cupy.calls].count("compile") == 2 * len(KERNELS)


def test_which_backend_a_cuda_tensor_goes_to(cupy: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "find_spec", lambda name: name)
    like = ("x", "torch", "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _backends.backends()["cuda"] == "torch finds no CUDA device"
    with pytest.warns(UserWarning, match="torch does the work on CUDA tensors.*: torch finds no CUDA device"):
        assert type(_backends.choose(*like, None)).__name__ == "TorchBackend"
    assert type(_backends.choose(*like, None)).__name__ == "TorchBackend", "said once: warnings are errors here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _backends._cuda.cache_clear()
    _backends.choose.cache_clear()
    _cuda.make_backend.cache_clear()
    assert _backends.backends()["cuda"] == "available"
    assert isinstance(_backends.choose(*like, None), _cuda.CudaBackend)
    assert _backends.choose(*like, "cuda") is _backends.choose(*like, None)
    assert type(_backends.choose(*like, "torch")).__name__ == "TorchBackend"
    with pytest.raises(InvalidArgument, match="backend 'numpy': cannot work on x, which is a torch array on cuda:0"):
        _backends.choose(*like, "numpy")
    _cuda.make_backend.cache_clear()


def test_a_cupy_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_backends, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert _backends.backends()["cuda"].startswith("cupy cannot be imported: import of cupy halted")
    assert _backends.warm()[1].startswith("no CUDA kernels to compile: cupy cannot be imported")


def test_packages_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    monkeypatch.setattr(_backends, "find_spec", searched.append)
    assert _backends._cuda() == _backends._cuda() == "torch is not installed: pip install torch"
    assert searched == ["torch"]


def run_script(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "gpu" / "run.sh"
    environment = {**os.environ, "OUT": str(folder / "out"), "LIMIT": "3000", **environment}
    return subprocess.run(["sh", script], env=environment, capture_output=True, text=True, check=False, timeout=3000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device: run the script itself")
@pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout command")
def test_the_script_runs_dry_where_there_is_no_device(tmp_path: Path) -> None:
    """Every part of it that needs none, on the CPU with small arrays."""
    done = run_script(tmp_path, PYTHON=sys.executable, PS_KERNELS_CACHE=str(cache_folder()))
    # What a busy computer cannot measure, it says; all else has to work there, too.
    busy = "the machine is too busy to measure it" in done.stdout
    assert done.returncode == busy, done.stdout + done.stderr
    assert "NO GPU: torch finds no CUDA device here" in done.stdout
    assert "every kernel ran" in done.stdout
    names = (
        *("ladder", "calibration", "sizes", "training", "compared"),
        *("tests", "exercise", "kernels", "engine", "ranks", "sanitizer"),
    )
    log = (tmp_path / "out/log.txt").read_text("utf-8")
    assert "ladder: all 16 rungs hold" in log
    assert json.loads((tmp_path / "out/summary.json").read_text("utf-8")) == {
        "device": False,
        "exit_status": {**dict.fromkeys(names, 0), "calibration": int(busy)},
    }
    trained = json.loads((tmp_path / "out/training.json").read_text("utf-8"))
    contenders = ["engine", "FSDP2 with CPU offload", "FSDP2 so", "plain"]
    assert [each["name"].partition(",")[0] for each in trained] == contenders
    assert all(each["tokens_per_s"] > 0 and len(each["turns_s"]) == 2 for each in trained)
    assert trained[1]["first_over_this"]
    rows = json.loads((tmp_path / "out/kernels.json").read_text("utf-8"))["rows"]
    table = done.stdout.partition("\n== table\n")[2].partition("TABLE ")[2].splitlines()
    assert [line[:62].strip() for line in table[1 : 1 + len(rows)]] == [each["name"] for each in rows]
    for name in ("adam, bf16 in and out", "sum of squares, torch.bfloat16", "Pieces.gather 1,000 tensors"):
        assert name in {each["name"] for each in rows}
    assert {path.name for path in (tmp_path / "out").iterdir()} | {"machine.toml"} == {
        "compared.json", "kernels.json", "log.txt", "machine.toml", "machine.txt", "report.md", "sizes.json",
        "summary.json", "timelines.zip", "training.json",
    }  # fmt: skip
    with ZipFile(tmp_path / "out/timelines.zip") as packed:
        assert set(packed.namelist()) == {f"timeline-{index}.{kind}" for index in (0, 1) for kind in ("json", "svg")}
    sizes = json.loads((tmp_path / "out/sizes.json").read_text("utf-8"))
    engines = [each for each in sizes if each["name"].startswith("engine")]
    assert (len(engines), len(sizes)) == (2, 3)
    assert all({"measured", "planned"} == each["profile"].keys() for each in engines)
    assert (tmp_path / "out/machine.toml").exists() is not busy
    report = (tmp_path / "out/report.md").read_text("utf-8")
    assert "DRY RUN" in report
    assert "| adam, bf16 in and out |" in report
    assert "ladder: all 16 rungs hold" in report
    assert re.search(r"^\| engine, dry, steps within backward \| planned \| [\d.]+ \|", report, re.MULTILINE)
    assert "| FSDP2 with CPU offload, dry |" in report


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """An interpreter that only writes down how it was called, and fails the tests."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\ncase "$*" in *"-m pytest"*) exit 3 ;; esac\n', "utf-8")
    python.chmod(0o755)
    return python


@pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout command")
def test_the_script_runs_every_part_where_there_is_one(tmp_path: Path, recorder: Path) -> None:
    done = run_script(tmp_path, PYTHON=str(recorder), CALLS=str(tmp_path / "calls"))
    assert done.returncode == 1, "a part that fails is not forgotten"
    assert "tests: exit status 3" in done.stdout
    calls = (tmp_path / "calls").read_text("utf-8")
    parts = (
        "gpu/ladder.py", "doctor --calibrate", "gpu/engine.py --seconds 225 --sizes --json",
        "gpu/engine.py --seconds 490 --json", "gpu/engine.py --seconds 520 --compared --json", "gpu/test_cuda.py",
        "gpu/kernels.py --json", "gpu/test_engine.py", "gpu/test_ranks.py", "gpu/test_sanitizer.py",
        "gpu/engine.py --seconds 485 --largest --json",
    )  # fmt: skip
    where = [calls.index(each) for each in parts]
    assert where == sorted(where)
    summary = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))
    failing = ("tests", "engine", "ranks", "sanitizer")
    measured = "ladder", "calibration", "sizes", "training", "compared", "kernels", "largest"
    statuses = dict.fromkeys(measured, 0)
    assert summary == {"device": True, "exit_status": {**statuses, **dict.fromkeys(failing, 3)}}
    (tmp_path / "calls").unlink()
    run_script(tmp_path, PYTHON=str(recorder), CALLS=str(tmp_path / "calls"), PARTS="training")
    calls = (tmp_path / "calls").read_text("utf-8")
    assert "engine.py" in calls
    assert "-m pytest" not in calls
    assert json.dumps(str(tmp_path)).strip('"') in calls


@pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout command")
def test_the_script_reports_what_is_known_when_it_is_told_to_end(tmp_path: Path) -> None:
    python, out = tmp_path / "python", tmp_path / "out"
    hanging = "import time; print('begun', flush=True); time.sleep(600)"
    cases = f'*ladder.py*) exec "{sys.executable}" -c "{hanging}" ;; *report.py*) exec "{sys.executable}" "$@" ;;'
    told = f'#!/bin/sh\ncase "$*" in {cases} esac\n'
    python.write_text(told, "utf-8")
    python.chmod(0o755)
    environment = {**os.environ, "OUT": str(out), "PYTHON": str(python), "LIMIT": "3000"}
    with subprocess.Popen(
        ["sh", ROOT / "benchmarks" / "gpu" / "run.sh"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        log, end = out / "log.txt", time.monotonic() + 300
        while not (log.is_file() and "begun" in log.read_text("utf-8")) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "no time was left for:" not in said, "no part comes after a ladder that does not hold"
    report = (out / "report.md").read_text("utf-8")
    assert "begun\nTraceback" in report
    assert "KeyboardInterrupt" in report
    assert json.loads((out / "summary.json").read_text("utf-8"))["exit_status"].keys() == {"ladder"}


@pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout command")
def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path, recorder: Path) -> None:
    calls = str(tmp_path / "calls")
    done = run_script(tmp_path, PYTHON=str(recorder), CALLS=calls, LIMIT="0", PARTS="kernels largest")
    assert done.returncode == 0
    assert 'no time was left for: kernels largest; in another call: PARTS="kernels largest"' in done.stdout
    assert "kernels.py" not in Path(calls).read_text("utf-8")

"""What the script for a CUDA device decides and writes, without one."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
GIB = 2**30


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scripts by name; they import each other as what lies beside them."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("engine", "trainer", "report", "ladder", "rung_process", "regime"):
        if name not in before:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("device_gib", "fits", "tried"), [(79, 39, [35, 38, 42]), (139, 43, [46, 40]), (79, 0, [35, 30, 26])]
)
def test_the_largest_model_is_looked_for_from_where_the_bytes_end(
    script: Any, monkeypatch: pytest.MonkeyPatch, device_gib: int, fits: int, tried: list[int]
) -> None:
    engine, clock = script("engine"), [0.0]
    kept: list[int] = []
    layers: list[int] = []

    def together(group: Any, limit_s: float) -> list[Any]:
        (case,) = group.cases
        layers.append(case.layers)
        if len(layers) == 3:
            clock[0] = 450.0  # what is left is no use
        return [{"name": case.name} | ({} if case.layers <= fits else {"failed": "DoesNotFit"})]

    monkeypatch.setattr(engine, "together", together)
    monkeypatch.setattr(engine, "host_bytes", lambda: 120 * GIB)
    monkeypatch.setattr(engine, "device_bytes", lambda: device_gib * GIB)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    rows = engine.largest(500.0, lambda found: kept.append(len(found)))
    assert layers == tried
    assert ["failed" in row for row in rows] == [each > fits for each in tried]
    assert kept == [1, 2, 3][: len(tried)], "what was measured is written at once"


@pytest.mark.parametrize(("part", "groups"), [("training", "GROUPS"), ("compared", "COMPARED")])
def test_a_part_has_time_for_all_of_its_groups(script: Any, part: str, groups: str) -> None:
    """A call has time for the part, by default, and for looking at the machine before it."""
    text = (FOLDER / "run.sh").read_text("utf-8")
    limit, ending = (
        int(re.findall(pattern, text)[0]) for pattern in (rf"&& part {part} (\d+) ", r'"\$\(\(limit - (\d+)\)\)"')
    )
    (call,) = set(re.findall(r"\$\{LIMIT:-(\d+)\}", text))
    assert sum(group.limit_s for group in getattr(script("engine"), groups)) <= limit - ending
    assert limit + 30 <= int(call)


A_PARAMETER = {"plain": 18, "masters": 18, "fsdp2": 6, "torchao": 4, "deepspeed": 4}
"""Bytes on the card at once: weights, gradients, and optimizer states where these are there."""


def needed_bytes(case: Any) -> float:
    """About the most that a training takes of the card."""
    tokens = case.batch * case.length
    parameters = 12 * case.layers * case.hidden**2 + (case.vocabulary + case.length) * case.hidden
    activations = 10 * tokens * case.vocabulary + (2 if case.checkpoint else 34) * case.layers * tokens * case.hidden
    context = GIB // 2
    return context + (case.device_bytes or A_PARAMETER[case.how] * parameters + activations)


def test_trainings_that_take_turns_fit_an_80_gb_card_together(script: Any) -> None:
    engine = script("engine")
    for group in (*engine.GROUPS, *engine.SIZES, *engine.COMPARED):
        assert sum(map(needed_bytes, group.cases)) < 72 * GIB, [case.name for case in group.cases]


def test_an_error_is_named_by_its_own_line(script: Any) -> None:
    engine = script("engine")
    lines = ["Traceback", "ps_core._errors.DoesNotFit: does not fit: host needs 7 bytes", "  try: half the batch"]
    assert engine.blamed(lines) == lines[1]
    assert engine.blamed(["[rank0]: RuntimeError: no NCCL", "[rank0]: more"]) == "[rank0]: RuntimeError: no NCCL"
    assert engine.blamed(["Killed"]) == "Killed"


@pytest.mark.parametrize("failing", ["order", "links"])
def test_the_ladder_looks_closer_at_what_fails_and_goes_on_where_that_tells_more(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    ladder = script("ladder")
    began: list[tuple[list[str], str, int]] = []

    def attempt(row: list[list[str]], dry: bool, environment: Any, patience: int = 1) -> list[tuple[int, list[str]]]:
        began.append(([name for (name,) in row], environment.get("CUDA_LAUNCH_BLOCKING", ""), patience))
        return [(int(name == failing), [f"said by {name}"]) for (name,) in row]

    monkeypatch.setattr(ladder, "attempt", attempt)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert ladder.climb(False, list(ladder.RUNGS)) == 1
    rows = [(list(row), "", 1) for row in ladder.ROWS]
    assert sorted(name for row, *_ in rows for name in row) == sorted(ladder.RUNGS)
    at = next(index for index, (row, *_) in enumerate(rows) if failing in row) + 1
    rest = [] if failing in ladder.NEEDED else rows[at:]
    assert began == [*rows[:at], ([failing], "1", 2), *rest]
    said = capsys.readouterr().out
    assert "ok versions" in said
    assert said.index(f"FAILED {failing}") < said.index(f"{failing} again, with launches that wait")
    assert f"ladder: FAILED: {failing}" in said
    assert ladder.climb(False, ["tiny"]) == 0


def test_a_rung_that_hangs_is_stopped(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ladder, stuck = script("ladder"), tmp_path / "stuck.py"
    stuck.write_text(STUCK, "utf-8")
    monkeypatch.setattr(ladder, "__file__", str(stuck))
    monkeypatch.setitem(ladder.RUNGS, "links", (ladder.links, 5))
    ((status, said),) = ladder.attempt([["links"]], False, dict(os.environ))
    assert status != 0
    assert (said[0], said[-1]) == ("begun", "stopped after 5 s")
    assert any("stuck.py" in line and "in wait_for_ever" in line for line in said), "it says where it was"


STUCK = """import faulthandler, signal, time
def wait_for_ever():
    print("begun", flush=True)
    time.sleep(600)
faulthandler.register(signal.SIGUSR1, chain=True)
wait_for_ever()
"""


def test_a_rung_that_is_interrupted_is_not_run_again(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder, stuck = script("ladder"), tmp_path / "stuck.py"
    stuck.write_text(STUCK.replace("time.sleep", "signal.raise_signal(signal.SIGSTOP); time.sleep"), "utf-8")
    wait = subprocess.Popen.wait

    def interrupted(process: Any, limit_s: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(signal.SIGCONT)
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "__file__", str(stuck))
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    assert ladder.climb(False, ["kernels", "order", "tiny"]) == 1
    said = capsys.readouterr().out
    assert "FAILED kernels" in said
    assert "FAILED order" in said
    assert "begun" in said
    assert "interrupted" in said
    assert "again" not in said
    assert "tiny" not in said


class DeepSpeedEngine:
    """As DeepSpeed's engine is called; it trains in the model's own precision."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
        self._model, told = model, config["optimizer"]
        self._optimizer = getattr(torch.optim, told["type"])(model.parameters(), **told["params"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


@pytest.mark.parametrize("way", ["masters", "torchao", "deepspeed"])
def test_other_ways_to_train_lower_the_loss(script: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """torchao's optimizer, which needs a card, is played by the one that it wraps; DeepSpeed by a plain loop."""
    trainer = script("trainer")

    def initialize(*, model: Any, model_parameters: list[Any], config: dict[str, Any]) -> tuple[Any, ...]:
        return DeepSpeedEngine(model, config), None, None, None

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what the script sets is undone
    optim = SimpleNamespace(CPUOffloadOptimizer=lambda parameters, kind, **options: kind(parameters, **options))
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(optim=optim))
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    case = trainer.Case(name=way, how=way, layers=1, hidden=32, batch=2, length=16, vocabulary=64, on="cpu")
    training = trainer.WAYS[way](case, torch.device("cpu"))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = [training.step(tokens) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.005


def test_tiled_weights_repeat_one_block_and_no_row(script: Any) -> None:
    trainer = script("trainer")
    numel = len(trainer.numbers())
    torch.manual_seed(0)
    first, second = (trainer.tile(torch.empty(3, numel // 2), std=0.02) for _ in range(2))
    assert torch.equal(first.view(-1)[numel:], first.view(-1)[: numel // 2 - 1])
    assert not torch.equal(first, second), "each begins elsewhere"
    rows = trainer.tile(torch.empty(4096, 2048)).unique(dim=0)
    assert len(rows) == 4096, "no row is there twice"
    assert abs(float(first.std()) - 0.02) < 1e-4
    assert abs(float(first.mean())) < 1e-4


ROWS = [
    {"name": "a copy of as many bytes", "ms": 2.5, "ms_range": [2.4, 2.6], "GB/s": 3000.0, "ratio": 1.0},
    {"name": "adam, bf16 in and out", "ms": 2.7, "ms_range": [2.6, 3], "GB/s": 2778.0, "ratio": 0.926,
     "ratio_range": [0.92, 0.93]},
    {"name": "adam, 4 elements, 256 threads, 64 blocks", "ms": 2.7, "GB/s": 2778.0, "ratio": 0.925},
    {"name": "adam, 8 elements, past caches, 256 threads, 64 blocks", "ms": 2.6, "GB/s": 2884.0, "ratio": 0.961},
    {"name": "RuntimeError: no | link"},
]  # fmt: skip


def test_the_report_says_what_was_measured_and_what_was_not(script: Any, tmp_path: Path) -> None:
    report = script("report")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    facts = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "parameters": 5, "rows": ROWS}
    (first / "kernels.json").write_text(json.dumps(facts), "utf-8")
    (first / "summary.json").write_text(json.dumps({"device": True, "exit_status": {"kernels": 1}}), "utf-8")
    (first / "machine.txt").write_text("driver 580\n", "utf-8")
    (second / "kernels.json").write_text("{half", "utf-8")
    trained = [
        {"name": "engine", "parameters": 13e8, "turns_s": [0.4, 0.6, 0.5], "step_s": 0.5, "tokens_per_s": 16384.0,
         "tflops": 170.4, "reserved_peak_bytes": 12 * GIB},
        {"name": "FSDP2", "turns_s": [], "failed": "not done in time", "first_over_this": None},
    ]  # fmt: skip
    (second / "training.json").write_text(json.dumps(trained), "utf-8")
    text = report.report([first, second, tmp_path / "absent"], "2026-01-31")
    lines = text.splitlines()
    assert lines[0] == "# NVIDIA H100 80GB HBM3, 2026-01-31"
    assert "DRY RUN" not in text
    assert "Versions: torch 2.11.0." in lines
    assert "driver 580" in lines
    assert "Parts: kernels ended with 1." in lines
    assert "Adam's rate over a copy's of as many bytes: 0.926 (0.920 to 0.930); the aim of 0.90 is met." in lines
    assert "Best way through memory: 8 elements, past caches, 256 threads, 64 blocks, 0.961; by itself" in text
    assert "| adam, bf16 in and out | 2.700 (2.600 to 3.000) | 2778.0 | 0.926 (0.920 to 0.930) |" in lines
    assert "- FAILED: RuntimeError: no | link" in lines
    assert "| engine | 1.30 | 0.500 (0.400 to 0.600) | 16384 | 170.4 |  | 12.0 |  |" in lines
    assert "| FSDP2 | 0.00 |  |  |  |  |  | not done in time |" in lines
    assert "How large a model can be" not in text
    (first / "summary.json").write_text(json.dumps({"device": False, "exit_status": {}}), "utf-8")
    assert "DRY RUN" in report.report([first], "2026-01-31")
    assert report.report([tmp_path / "absent"], "2026-01-31").startswith("# No figures of kernels")

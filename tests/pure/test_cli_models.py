"""Models that the command is given by a name, a config file or a trace."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ps_core._workloads.named_shapes import gpt
from ps_core._workloads.traces_from_shapes import analytic_trace
from ps_core._workloads.workload import Workload
from test_cli import SMALL, document, run


def test_models_from_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    _, plain = document(capsys, "plan", "--hf", str(path), *SMALL)
    _, more = document(capsys, "plan", "--hf", str(tmp_path), *SMALL, "--vocab", "1024")
    assert more["parameters"] - plain["parameters"] == 512 * 64
    trace = analytic_trace(gpt(2, 64, vocabulary=512), Workload(batch=1, seq=64))
    (tmp_path / "t.json").write_text(trace.to_json(), encoding="utf-8")
    _, recorded = document(capsys, "plan", "--trace", str(tmp_path / "t.json"), *SMALL)
    assert recorded["model"] == trace.model
    _, out, _ = run(capsys, "plan", "--trace", str(tmp_path / "t.json"), *SMALL)
    assert "64 tokens each" in out


@pytest.mark.parametrize("name", ["v100", "t4"])
def test_a_machine_without_fast_bf16_is_told_of(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "gpt-10m", "--machine", name, "--brief")
    status, _, err = run(capsys, *words)
    assert status == 0
    assert err == f"pstar: warning: {name} is not made for bf16: these are the figures of --precision fp16\n"
    assert run(capsys, *words, "--precision", "fp16")[::2] == (0, "")


def test_a_path_that_is_not_there_is_not_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", "--hf", "Qwen/Qwen2.5-7B")
    assert status == 2
    assert err.endswith("No such file or directory (a local file or folder is expected: nothing is downloaded)\n")


def test_a_config_is_suggested_for_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt-neox-20b", "mistral-7b"):
        assert "(for a Hugging Face model: --hf config.json)" in run(capsys, "plan", name)[2]


def test_a_trace_without_tokens_has_no_rate_of_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traced = analytic_trace(gpt(2, 64, vocabulary=512), Workload(batch=1, seq=64))
    words = ("plan", "--trace", str(tmp_path / "t.json"), *SMALL)
    (tmp_path / "t.json").write_text(replace(traced, tokens=0).to_json(), encoding="utf-8")
    for more in ((), ("--brief",), ("--accumulate", "3")):
        _, out, _ = run(capsys, *words, *more)
        assert "token" not in out
        assert re.search(r"\d  ?TFLOPS per GPU of model FLOPs", out)
        heading, middle = out.splitlines()[0], ", 3 micro-batches" * ("--accumulate" in more)
        assert re.fullmatch(rf".*: \S+ parameters, 1 GPU \([^)]+\){middle}, bf16", heading)
    status, found = document(capsys, *words)
    assert (status, found["tokens_per_s"], found["tflops_per_gpu"]) == (0, None, None)
    assert found["model_tflops_per_gpu"] > 0
    _, out, _ = run(capsys, *words, "--device-memory", "600.1MB")
    assert "it does not fit" in out
    assert "token" not in out
    (tmp_path / "t.json").write_text(traced.to_json(), encoding="utf-8")
    _, out, _ = run(capsys, *words, "--accumulate", "3")
    assert ", 64 tokens each in a micro-batch, 3 micro-batches, bf16" in out


@pytest.mark.parametrize(
    ("recorded", "planned", "warns"),
    [
        ("fp32", "bf16", True),
        ("fp32", "fp16", True),
        ("bf16", "fp32", True),
        ("fp32", "fp32", False),
        ("bf16", "bf16", False),
        ("bf16", "fp16", False),
        ("", "bf16", False),
        ("", "fp32", False),
    ],
)
def test_a_trace_of_another_precision_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str, planned: str, warns: bool
) -> None:
    traced = replace(analytic_trace(gpt(2, 64, vocabulary=512), Workload(batch=1, seq=64)), precision=recorded)
    (tmp_path / "t.json").write_text(traced.to_json(), encoding="utf-8")
    words = ("plan", "--trace", str(tmp_path / "t.json"), "--precision", planned, *SMALL)
    for more in ((), ("--json",), ("--device-memory", "600.1MB")):
        _, _, err = run(capsys, *words, *more)
        assert err.count("\n") == warns
        if warns:
            assert err.startswith(f"pstar: warning: the trace was recorded in {recorded}, ")
            assert f'trace(..., precision="{planned}"), or use --precision {recorded}' in err

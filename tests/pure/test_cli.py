"""The command: documents, exit status, and one line for every mistake."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ps_core import cli
from ps_core._command.doctor import Accelerator
from ps_core._errors import DoesNotFit
from ps_core._simulate.machine import MACHINES, UNSTEADY
from ps_core._workloads.named_shapes import shape
from ps_core.cli import main

SMALL = ("--seq", "128", "--batch", "2", "--device-memory", "1GiB", "--host-memory", "8GiB", "--gpus", "1")
TINY = ("--seq", "128", "--batch", "2", "--device-memory", "60MiB", "--host-memory", "100MiB", "--gpus", "1")
NO_RESERVE = ("--reserve-device", "0", "--reserve-host", "0", "--reserve-host-rank", "0")


@pytest.fixture(autouse=True)
def no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "accelerators", lambda: ())


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def document(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status, out, err = run(capsys, *words, "--json")
    assert err == ""
    found = json.loads(out)
    assert isinstance(found, dict)
    return status, found


def test_what_gpus_send_by_and_what_crosses_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    two = ("plan", "gpt-1b", "--batch", "4", "--gpus", "2", "--machine")
    _, pcie, _ = run(capsys, *two, "rtx4090")
    assert "  sent by               NCCL at 10 GB/s a process, host memory that all processes share at 4.17\n" in pcie
    _, links, _ = run(capsys, *two, "a100-40", "--nodes", "2")
    assert "  sent by               NCCL at 220 GB/s a process\n" in links
    assert re.search(r"^  to other processes +(.*)\n  between nodes +\1$", links, re.MULTILINE), "all of it crosses"
    _, alone, _ = run(capsys, "plan", "gpt-1b", "--batch", "4", "--machine", "a100-40")
    assert "sent by" not in alone


@pytest.mark.parametrize("before", [True, False])
def test_no_garbage_is_collected_amid_a_search(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """Pause the collector during the search, and leave it afterwards as it was before."""
    seen: list[bool] = []
    monkeypatch.setattr(cli, "accelerators", lambda: seen.append(gc.isenabled()) or ())
    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        main(("plan", "gpt2", *SMALL[:4]))
        after = gc.isenabled()
    finally:
        (gc.enable if enabled else gc.disable)()
    assert seen == [False]
    assert after is before


def test_a_brief_plan_searches_for_no_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A brief plan prints no advice. Searching for advice took a quarter of the time."""
    monkeypatch.setattr(cli, "advice", lambda *_: pytest.fail("nobody asked for advice"))
    status, out, _ = run(capsys, "plan", "gpt2", *SMALL, "--brief")
    assert status == 0
    assert "tokens/s" in out


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = document(capsys, "plan", "gpt-10m", *SMALL)
    assert status == 0
    assert (found["model"], found["fits"], found["missing_bytes"]) == ("gpt-10m", True, 0)
    assert found["parameters"] == shape("gpt-10m").parameters
    assert set(found["tiers"]) == {"device", "host"}
    for tier in found["tiers"].values():
        assert 0 <= tier["peak_bytes"] <= tier["budget_bytes"]
    assert found["tiers"]["device"]["peak_bytes"] > 14 * found["parameters"]
    assert set(found["moved_bytes"]) == {"host->device", "device->host", "wire"}
    assert found["step_time_s"] > 0
    assert found["tflops_per_gpu"] == pytest.approx(8 * found["parameters"] * 256 / found["step_time_s"] / 1e12)
    assert isinstance(found["advice"], list)
    assert found["assumed"] == ["the rates of 'laptop' (--machine)"]


def test_positions_added_for_a_long_sequence_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, longer = document(capsys, "plan", "gpt-10m", *SMALL[2:])
    assert "1024 positions (--seq)" in longer["assumed"]
    _, fits = document(capsys, "plan", "gpt-10m", *SMALL)
    assert not any("positions" in said for said in fits["assumed"])


def test_memory_that_the_reserve_takes_whole_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    little = ("--device-memory", "300MiB", "--host-memory", "8GiB", "--gpus", "1")
    status, out, err = run(capsys, "plan", "gpt-50m", *little)
    assert (status, err) == (3, "")
    assert "reserve takes all device memory (--reserve-device sets less)" in out
    assert run(capsys, "scale", *little)[0] == 3


def test_no_host_memory_left_is_no_matter_if_nothing_goes_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "gpt-10m", "--device-memory", "8GiB", "--host-memory", "4GB", "--gpus", "1")
    assert status == 0
    assert "host                         0 B         0 B" in out


def test_a_plan_names_its_packing(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--gpus", "3", "--device-memory", "2GiB", "--host-memory", "14GiB")
    _, found = document(capsys, "plan", "gpt-10m", "--seq", "128", *where)
    assert 0 < found["padding_bytes"] < found["groups"] * 14 * 3 * 64
    assert found["padding_bytes"] % 14 == 0
    assert 0 < found["resident_groups"] <= found["groups"]
    _, out, _ = run(capsys, "plan", "gpt-10m", "--seq", "128", *where)
    assert f"{found['groups']}  groups, {found['resident_groups']} of them wholly on device" in out


@pytest.mark.slow
def test_both_step_times_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that governs is the engine's, and what the plan would allow stands beside it."""
    where = ("--device-memory", "7GiB", "--host-memory", "32GiB", "--machine", "rtx4060", "--gpus", "1")
    _, found = document(capsys, "plan", "gpt-1b", *where)
    assert 1.09 * found["bound_step_time_s"] < found["step_time_s"]
    assert found["tokens_per_s"] == pytest.approx(4096 / found["step_time_s"])
    assert sum(found["phases_s"].values()) == pytest.approx(found["step_time_s"])
    _, out, _ = run(capsys, "plan", "gpt-1b", *where)
    assert f"{found['bound_step_time_s']:.3g} s  if the step overlapped backward too" in out
    _, out, _ = run(capsys, "plan", "gpt-10m", "--seq", "64", "--device-memory", "8GiB", *where[2:])
    assert "bound of the plan" not in out, "the same figure twice says nothing"


def test_a_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = document(capsys, "plan", "gpt-50m", *TINY, *NO_RESERVE)
    assert status == 3
    assert found["fits"] is False
    assert found["missing_bytes"] == found["needed_bytes"] - found["available_bytes"] > 0
    assert (found["step_time_s"], found["tflops_per_gpu"], found["moved_bytes"]) == (None, None, {})
    assert 1 <= len(found["advice"]) <= 3
    assert found["moment"]
    status, out, err = run(capsys, "plan", "gpt-50m", *TINY, *NO_RESERVE)
    assert (status, err) == (3, "")
    assert "it does not fit." in out
    assert "missing" in out
    assert "predicted: fits" in out


def test_every_key_of_the_contract_is_there_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"model", "parameters", "fits", "missing_bytes", "tiers", "moved_bytes", "step_time_s", "tflops_per_gpu"}
    for words in (SMALL, (*TINY, *NO_RESERVE)):
        _, found = document(capsys, "plan", "gpt-50m", *words)
        assert keys | {"advice"} <= found.keys()


def test_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "plan", "gpt-10m", *SMALL, "--tide", "--accumulate", "2")
    assert status == 0
    for wanted in ("it fits", "predicted", "device", "host->device", "TFLOPS per GPU", "tokens/s", "assumed: ", "█"):
        assert wanted in out
    assert "2 micro-batches" in out
    assert "what fills the device at each moment" in out


def test_plan_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _, long, _ = run(capsys, "plan", "gpt-10m", *SMALL)
    status, out, _ = run(capsys, "plan", "gpt-10m", *SMALL, "--brief")
    assert status == 0
    first, assumed, peaks, speed = out.splitlines()
    assert [first, assumed] == long.splitlines()[:2]
    assert assumed.startswith("assumed: ")
    assert peaks.startswith("  it fits, as predicted: at most device ")
    (rate,) = re.findall(r"([\d,]+)  tokens/s", long)
    assert f" a step, {rate} tokens/s, " in speed
    status, out, _ = run(capsys, "plan", "gpt-50m", *TINY, *NO_RESERVE, "--brief")
    assert status == 3
    assert "it does not fit." in out


def test_plan_for_several_gpus_and_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "gpt-10m", "--seq", "128", "--host-memory", "64GiB")
    _, out, _ = run(capsys, *words, "--device-memory", "4GiB", "--gpus", "4", "--nodes", "2")
    assert "4 GPUs in 2 nodes" in out
    _, out, _ = run(capsys, *words, "--device-memory", "0", "--gpus", "2")
    assert "2 processes without GPU (cpu)" in out
    _, found = document(capsys, *words, "--machine", "cpu", "--disk", "1TiB")
    assert list(found["tiers"]) == ["host", "disk"]


def test_plain_letters_where_nothing_else_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("ascii", "cp1252"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(("plan", "gpt-10m", *SMALL, "--tide")) == 0
        stream.flush()
        stream.seek(0)
        assert "#" in stream.read()


def test_the_picture_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, begin in (("timeline.svg", "<svg"), ("timeline.json", '{"traceEvents"')):
        assert run(capsys, "plan", "gpt-10m", *SMALL, "--timeline", str(tmp_path / name))[0] == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(begin)
    path = tmp_path / "tide.svg"
    assert run(capsys, "plan", "gpt-10m", *SMALL, "--svg", str(path))[0] == 0
    assert path.read_text(encoding="utf-8").startswith("<svg")


def test_long_sequences_get_positions(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = document(capsys, "plan", "gpt-10m", *SMALL, "--seq", "1024", "--vocab", "512")
    _, short = document(capsys, "plan", "gpt-10m", *SMALL, "--seq", "512", "--vocab", "512")
    assert found["parameters"] - short["parameters"] == 512 * 256


def test_scale(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_core._command.largest_model.HIDDEN", (256,))
    monkeypatch.setattr("ps_core._command.largest_model.names", tuple)
    words = ("scale", *TINY, *NO_RESERVE, "--vocab", "1024")
    status, found = document(capsys, *words, "--min-tflops", "0")
    assert status == 0
    assert found["model"] == f"gpt-{found['layers']}x{found['hidden']}"
    assert found["plan"]["parameters"] == found["parameters"] > 9_000_000
    assert found["plan"]["fits"] is True
    status, out, _ = run(capsys, *words, "--min-tflops", "0")
    assert (status, out.startswith(f"largest: {found['model']}")) == (0, True)
    assert "it fits" in out
    assert document(capsys, *words, "--min-tflops", "1e6") == (
        3,
        {"model": None, "parameters": 0, "layers": 0, "hidden": 0, "plan": None},
    )
    assert run(capsys, *words, "--min-tflops", "1e6")[0] == 3


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "examine", lambda: {"python": "3", "host memory": "4 GiB"})
    assert document(capsys, "doctor") == (0, {"python": "3", "host memory": "4 GiB"})
    assert run(capsys, "doctor") == (0, "python       3\nhost memory  4 GiB\n", "")
    monkeypatch.setattr(cli, "warm", lambda: ("compiled C: avx2", "no CUDA kernels to compile: torch is not installed"))
    lines = ["compiled C: avx2", "no CUDA kernels to compile: torch is not installed"]
    assert document(capsys, "doctor", "--warm") == (0, {"python": "3", "host memory": "4 GiB", "kernels": lines})
    text = "python       3\nhost memory  4 GiB\n\nkernels\n" + "".join(f"{line}\n" for line in lines)
    assert run(capsys, "doctor", "--warm") == (0, text, "")


def test_calibrate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "# norm: 3 GB/s\n" + MACHINES["laptop"].to_toml().replace("laptop", "mine")
    monkeypatch.setattr(cli, "calibrate", lambda: text)
    assert run(capsys, "doctor", "--calibrate") == (0, text, "")
    file = str(tmp_path / "mine.toml")
    said = f"{file}: mine; use it with pstar plan NAME --machine {file}\n"
    assert run(capsys, "doctor", "--calibrate", "--out", file) == (0, said, "")
    status, found = document(capsys, "doctor", "--calibrate", "--out", file)
    assert (status, found["file"], found["machine"]["name"]) == (0, file, "mine")
    assert found["notes"] == ["norm: 3 GB/s"]
    unsteady = f"# {UNSTEADY[0]}some\n# {UNSTEADY[1]}again\n"
    monkeypatch.setattr(cli, "calibrate", lambda: unsteady + text)
    told = f"{said}{unsteady.replace('# ', '')}"
    assert run(capsys, "doctor", "--calibrate", "--out", file) == (0, told, "")
    status, planned = document(capsys, "plan", "gpt-1x64", "--machine", file)
    assert (status, planned["machine"]) == (0, "mine")
    assert run(capsys, "doctor", "--out", file)[0] == 2
    monkeypatch.setattr(cli, "calibrate", lambda: pytest.fail("this takes a minute"))
    for place in (str(tmp_path / "absent" / "a.toml"), str(tmp_path)):
        status, _, error = run(capsys, "doctor", "--calibrate", "--out", place)
        assert (status, error.startswith(f"pstar: cannot write {place!r}")) == (2, True)
    monkeypatch.setattr(cli, "calibrate", lambda: "name = 3")
    assert run(capsys, "doctor", "--calibrate")[0] == 2


def test_what_is_here_is_the_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(cli, "accelerators", lambda: (Accelerator("A", 16 * gib), Accelerator("B", 15 * gib)))
    monkeypatch.setattr(cli, "host_memory", lambda: (200 * gib, 100 * gib, 50 * gib))
    words = ("plan", "gpt-10m", "--seq", "128")
    _, found = document(capsys, *words)
    assert (found["machine"], found["gpus"]) == ("t4", 2)
    assert found["tiers"]["device"]["budget_bytes"] == pytest.approx(15 * gib - 1.2e9, abs=128)
    assert found["tiers"]["host"]["budget_bytes"] == pytest.approx((45 * gib - 9e9) / 2, abs=128)
    assert len(found["assumed"]) == 4
    monkeypatch.setattr(cli, "host_memory", lambda: (0, 0, 0))
    _, found = document(capsys, *words)
    assert found["tiers"]["host"]["budget_bytes"] == pytest.approx((48 * gib - 9e9) / 2, abs=128)
    monkeypatch.setattr(cli, "accelerators", lambda: (Accelerator("NVIDIA H100 80GB HBM3", 80 * gib),))
    assert document(capsys, *words)[1]["machine"] == "h100"
    monkeypatch.setattr(cli, "accelerators", lambda: (Accelerator("A", 16 * gib), Accelerator("B", 15 * gib)))
    _, found = document(capsys, *words, "--machine", "v100", "--nodes", "2", "--precision", "fp16")
    assert (found["machine"], found["gpus"], found["nodes"]) == ("v100", 2, 2)
    assert found["tiers"]["device"]["budget_bytes"] == pytest.approx(32 * gib - 1.2e9, abs=128)


def test_nothing_here_and_nothing_said_assumes_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = document(capsys, "plan", "gpt-10m", "--seq", "128")
    assert found["machine"] == cli.ASSUMED_MACHINE
    assumed = MACHINES[cli.ASSUMED_MACHINE]
    assert found["tiers"]["device"]["budget_bytes"] == pytest.approx(assumed.memory_bytes - 0.6e9, abs=128)


MISTAKES = [
    ((), "arguments are required: COMMAND"),
    (("paln",), "invalid choice: 'paln'"),
    (("plan",), "one of the arguments NAME --hf --trace is required"),
    (("plan", "gpt2", "--hf", "x"), "not allowed with"),
    (("plan", "gpt-18x"), "did you mean gpt-18b"),
    (("plan", "gpt-1.3b"), "did you mean gpt-1b or gpt2-xl? gpt-LAYERSxHIDDEN"),
    (("plan", "llama-3-8b"), "did you mean llama-8b or llama-1b? (for a Hugging Face model: --hf config.json)"),
    (("plan", "qwen2.5-7b"), "docs/sizes.md has the names (for a Hugging Face model: --hf config.json)"),
    (("plan", "meta-llama/Llama-3.1-8B"), " (for a Hugging Face model: --hf config.json)"),
    (("plan", "gpt2", "--device-memory", "20Gb?"), "not a size: '20Gb?'"),
    (("plan", "gpt2", "--gpus", "0"), "'0' is not a whole number of at least 1"),
    (("plan", "gpt2", "--seq", "1000000000"), "--seq: at most 999999999 is allowed, found '1000000000'"),
    (("plan", "gpt-99999999x64"), "gpt-99999999x64: at most 10000 layers"),
    (("plan", "gpt2", "--machine", ""), "unknown machine ''"),
    (("plan", "gpt2", "--gpus", "two"), "'two' is not a whole number"),
    (("plan", "gpt2", "--gpus", "3", "--nodes", "2"), "3 GPUs cannot be spread evenly over 2 nodes"),
    (("plan", "gpt2", "--precision", "fp8"), "invalid choice: 'fp8'"),
    (("plan", "gpt2", "--reserve-fragmentation", "nan"), "nonmodel_overhead"),
    (("plan", "gpt2", "--frob"), "unrecognized arguments: --frob (pstar plan --help lists the options)"),
    (("plan", "gpt2", "--dev", "1GiB"), "unrecognized arguments: --dev 1GiB; did you mean --device-memory?"),
    (("plan", "gpt2", "--devise-memory=1GiB"), "--devise-memory=1GiB; did you mean --device-memory"),
    (("plan", "gpt2", "--btach", "4"), "unrecognized arguments: --btach 4; did you mean --batch?"),
    (("scale", "--btach", "4"), "unrecognized arguments: --btach 4; did you mean --batch?"),
    (("doctor", "--calibrat"), "unrecognized arguments: --calibrat; did you mean --calibrate?"),
    (("export", "a", "b", "--overwirte"), "unrecognized arguments: --overwirte; did you mean --overwrite?"),
    (("scale", "--min-tflop", "3"), "did you mean --min-tflops?"),
    (("plan", "gpt2", "--device-memory", "64"), "64 without a unit is 64 bytes; did you mean 64GiB?"),
    (("plan", "xyzzy"), "gpt-LAYERSxHIDDEN or bert-LAYERSxHIDDEN is any size"),
    (("plan", "gpt2", "--no-checkpointing", "--offload-checkpoints"), "needs --checkpointing"),
    (("plan", "gpt2", "--machine", "abacus"), "unknown machine 'abacus'"),
    (("plan", "--hf", "missing.json"), "cannot read 'missing.json'"),
    (("plan", "--hf", "damaged.json"), "damaged.json: not JSON"),
    (("plan", "--trace", "missing.json"), "cannot read 'missing.json': No such file"),
    (("plan", "--trace", "damaged.json"), "damaged.json: not a trace"),
    (("plan", "--trace", "binary"), "binary: "),
    (("plan", "gpt2", "--machine", "damaged.toml"), "damaged.toml: not TOML"),
    (("plan", "gpt-10m", *SMALL, "--svg", "no/such/folder.svg"), "cannot write"),
    (("plan", "gpt-10m", *SMALL, "--timeline", "no/such/folder.svg"), "cannot write"),
    (("scale", "--min-tflops", "many"), "invalid float value: 'many'"),
    (("scale", "--min-tflops", "-3", *SMALL), "--min-tflops must be"),
    (("doctor", "--gpus", "1"), "unrecognized arguments"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=lambda value: " ".join(value)[:40] if value else "nothing")
def test_mistakes_get_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Any, says: str
) -> None:
    (tmp_path / "damaged.json").write_text('{"format": ', encoding="utf-8")
    (tmp_path / "damaged.toml").write_text("name = [", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert says in err
    assert err.startswith("pstar: ")
    assert err.count("\n") == 1
    assert len(err) < 250, "one line that can be read"


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--help",), ("plan", "--help"), ("--version",)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert "pstar" in capsys.readouterr().out


def test_other_failures_get_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, str]:
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(cli, "examine", broken)
    assert run(capsys, "doctor") == (1, "", "pstar: the disk is gone\n")


def test_a_plan_not_found_is_told_from_one_that_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for proven, words in ((True, "at least 1.0 KiB needed at 'm'"), (False, "no plan found for 1.0 KiB at 'm'")):

        def refuse(subject: object, training: object, proven: bool = proven) -> None:
            raise DoesNotFit(tier="device", moment="m", needed_bytes=1024, available_bytes=1024, proven=proven)

        monkeypatch.setattr(cli, "forecast", refuse)
        monkeypatch.setattr(cli, "remedies", lambda subject, training: ())
        status, out, _ = run(capsys, "plan", "gpt-10m", *SMALL)
        assert status == 3
        assert words in out
        assert "no change this command knows of would" in out
        assert document(capsys, "plan", "gpt-10m", *SMALL)[1]["missing_bytes"] == 1


def test_output_nobody_reads_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> dict[str, str]:
        raise BrokenPipeError

    moved: list[int] = []
    monkeypatch.setattr(cli, "examine", gone)
    monkeypatch.setattr(os, "dup2", lambda source, target: moved.append(target))
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert main(("doctor",)) == 1
    assert moved == [1]


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            (sys.executable, "-m", "ps_core.cli", "plan", "gpt-10m", *SMALL),
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_cannot_be_printed_is_spelled_out(tmp_path: Path) -> None:
    config = tmp_path / "ß☃.json"
    config.write_text("{", encoding="utf-8")
    words = [sys.executable, "-m", "ps_core.cli", "plan", "--hf", str(config), *SMALL]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_without_an_output_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plan", "gpt-10m", *SMALL]) == 1
    monkeypatch.undo()
    assert "no output" in capsys.readouterr().err


def test_an_interruption_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "forecast", interrupted)
    assert run(capsys, "plan", "gpt-10m", *SMALL) == (130, "", "")


def test_scale_says_how_to_plan_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--device-memory", "2GiB", "--host-memory", "9GiB", "--gpus", "1", "--min-tflops", "0.1", "--seq", "128")
    status, out, _ = run(capsys, "scale", *where)
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("with a longer search: pstar plan"))
    words = line.split("pstar ")[1].split(",")[0].split()
    assert run(capsys, *words, *where[:6], *where[8:])[0] == 0


def test_any_text_stream_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["plan", "gpt-10m", *SMALL]) == 0
    assert "it fits" in out.getvalue()


def test_copies_of_a_model_gather_within_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Each process has more of the model, and sums go between the copies besides."""
    where = ("--device-memory", "16GiB", "--host-memory", "128GiB", "--gpus", "16", "--nodes", "2", "--machine", "v100")
    where += ("--precision", "fp16")
    where += ("--batch", "1", "--seq", "64")
    _, one = document(capsys, "plan", "gpt-1b", *where)
    _, two = document(capsys, "plan", "gpt-1b", *where, "--replicate", "2")
    _, out, _ = run(capsys, "plan", "gpt-1b", *where, "--replicate", "2")
    assert "16 GPUs in 2 nodes, 2 copies" in out
    assert (one["replicate"], two["replicate"]) == (1, 2)
    assert two["step_time_s"] < one["step_time_s"], "gathers do not cross the network"
    status, _, err = run(capsys, "plan", "gpt-1b", *where, "--replicate", "3")
    assert status
    assert "16 GPUs cannot have 3 copies of a model, of equally many each" in err


@pytest.mark.slow
def test_the_largest_model_of_copies_is_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--device-memory", "2GiB", "--host-memory", "24GiB", "--gpus", "4", "--nodes", "2", "--machine", "v100")
    options = (*where, "--precision", "fp16", "--seq", "128", "--batch", "1", "--min-tflops", "0.1")
    _, one = document(capsys, "scale", *options)
    _, two = document(capsys, "scale", *options, "--replicate", "2")
    assert 0 < two["parameters"] < one["parameters"]

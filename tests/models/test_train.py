"""The trainer: it learns, resumes to the bit, stops when told, and says what it did."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ps_kernels
from _trainer import TINY, data, numbers, rows, train
from ps_core.engine._support.log import LOGGER
from ps_models.train import _loop, main
from ps_models.train._option_files import from_file

Capture = pytest.CaptureFixture[str]
BUDGET = ("--device", "emulated", "--device-memory", "400KB")
WAYS = {
    "fp32": ("--precision", "fp32", "--device", "emulated", "--device-memory", "600KB"),
    "bf16": BUDGET,
    "bf16 accumulated": (*BUDGET, "--accumulate", "3"),
    "fp16": (*BUDGET, "--precision", "fp16"),
    "cpu": ("--device", "cpu"),
    "disk": (*BUDGET, "--host-memory", "600KB", "--disk", "10MB"),
}


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first pass of a process may choose other kernels than the next ones; threads are put back."""
    threads = torch.get_num_threads()
    assert train(tmp_path_factory.mktemp("warm") / "run", "--steps", 1) == 0
    yield
    ps_kernels.set_threads(threads)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, do: Callable[[], object]) -> None:
    """Do something at the beginning of a step."""
    rate = _loop.learning_rate

    def learning_rate(options: Any, at: int) -> float:
        if at == step:
            do()
        return rate(options, at)

    monkeypatch.setattr(_loop, "learning_rate", learning_rate)


def kill_softly(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_the_uninterrupted_one(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*WAYS[way], "--steps", 7, "--eval-every", 3, "--lr", "1e-2")
    assert train(tmp_path / "whole", *words) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, kill_softly(signal.SIGTERM))
        assert train(tmp_path / "cut", *words) == 0
    assert [row["step"] for row in rows(tmp_path / "cut")] == [1, 2, 3, 4]
    assert train(tmp_path / "cut", *words) == 0
    whole = numbers(tmp_path / "whole")
    assert [row[0] for row in whole] == list(range(1, 8))
    assert numbers(tmp_path / "cut") == whole
    assert len({row[1] for row in whole}) == 7, "each step's loss is another"


def test_the_optimizers_numbers_may_change(tmp_path: Path) -> None:
    words = (*WAYS["cpu"], "--lr", "1e-2", "--schedule", "constant")
    for folder in ("same", "other"):
        assert train(tmp_path / folder, *words, "--steps", 3) == 0
    assert train(tmp_path / "same", *words, "--steps", 6) == 0
    assert train(tmp_path / "other", *words, "--steps", 6, "--weight-decay", 50) == 0
    same, other = numbers(tmp_path / "same"), numbers(tmp_path / "other")
    assert same[:4] == other[:4]  # a loss is taken before its update
    assert all(one[1] != two[1] for one, two in zip(same[4:], other[4:], strict=True))


def test_after_an_epoch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The position in the data is that of the uninterrupted run, also where the data have been gone through."""
    words = (*WAYS["cpu"], "--steps", 12, "--batch", 20)
    assert train(tmp_path / "whole", *words) == 0
    for _ in range(3):
        with monkeypatch.context() as patch:
            step = len(rows(tmp_path / "cut")) + 3 if (tmp_path / "cut").exists() else 3
            at_step(patch, step, kill_softly(signal.SIGINT))
            assert train(tmp_path / "cut", *words) == 0
    assert train(tmp_path / "cut", *words) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert (tmp_path / "words.txt").stat().st_size < 20 * 16 * 12 / 1.3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    before = signal.getsignal(number)
    at_step(monkeypatch, 2, kill_softly(number))
    assert train(tmp_path / "run", "--steps", 9) == 0
    assert signal.getsignal(number) is before
    told = capsys.readouterr().out
    assert f"{number.name}: step 2 of 9 is saved; the same command goes on from there" in told
    assert len(rows(tmp_path / "run")) == 2
    assert checkpoints(tmp_path / "run") == ["step-00000002"]


def test_a_second_signal_is_not_asked_for_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 2, lambda: [kill_softly(signal.SIGINT)() for _ in range(2)])
    assert train(tmp_path / "run", "--steps", 9, "--checkpoint-every", 1) == 130
    assert checkpoints(tmp_path / "run") == ["step-00000001"]


def checkpoints(out: Path) -> list[str]:
    return sorted(each.name for each in (out / "checkpoints").iterdir() if each.is_dir())


def test_more_steps_go_on_and_a_finished_run_is_left_alone(tmp_path: Path, capsys: Capture) -> None:
    words = ("--schedule", "constant", "--warmup", 2)
    assert train(tmp_path / "run", *words, "--steps", 3) == 0
    once = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(tmp_path / "run", *words, "--steps", 3) == 0
    assert "step 3 of 3 is done; nothing is left to train" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == once
    assert train(tmp_path / "run", *words, "--steps", 5) == 0
    assert train(tmp_path / "whole", *words, "--steps", 5, "--eval-every", 3) == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_rows_beyond_the_checkpoint_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, out = ("--steps", 6, "--checkpoint-every", 2), tmp_path / "run"
    assert train(tmp_path / "whole", *words) == 0
    at_step(monkeypatch, 6, kill_at_once)
    with pytest.raises(RuntimeError, match="gone"):
        train(out, *words)
    monkeypatch.undo()
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5]
    assert (out / "checkpoints" / "latest").read_text() == "step-00000004\n"
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1')
    assert train(out, *words) == 0
    assert numbers(out) == numbers(tmp_path / "whole")


def kill_at_once() -> None:
    raise RuntimeError("gone")


CHANGES = {
    "--model gpt-1x32": "--model gpt-2x32 there, gpt-1x32 now",
    "--seq 17": "--seq 16 there, 17 now",
    "--batch 3": "--batch 2 there, 3 now",
    "--accumulate 2": "--accumulate 1 there, 2 now",
    "--seed 1": "--seed 0 there, 1 now",
    "--precision fp32 --vocab 300": "--vocab none there, 300 now, --precision bf16 there, fp32 now",
    "--validation 0.2": "--validation 0.05 there, 0.2 now, --data other there than now",
}


def test_another_model_or_other_data_are_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    assert train(out, "--steps", 1) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    for words, told in CHANGES.items():
        assert train(out, "--steps", 1, *words.split()) == 2
        said = capsys.readouterr().err
        assert said == (
            f"pstar-train: --out: {str(out)!r} holds another run: {told}; allowed are the same model and data options, "
            "or another --out\n"
        )
    other = tmp_path / "other.txt"
    other.write_text("other words " * 99)
    assert train(out, "--steps", 1, "--data", other) == 2
    assert "holds another run: --data other there than now;" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_without_its_description_is_not_taken_for_a_new_one(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--steps", 1) == 0
    (tmp_path / "run" / "run.json").unlink()
    assert train(tmp_path / "run", "--steps", 1) == 2
    assert "holds a run without run.json; allowed is a new folder" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").write_text("[")
    assert train(tmp_path / "run", "--steps", 1) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_run_that_is_older_than_an_option_goes_on(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--steps", 1) == 0
    written = tmp_path / "run" / "run.json"
    told = json.loads(written.read_text())
    for name in ("hf", "lora", "lora_targets", "lora_alpha", "pack"):
        del told["options"][name]
    written.write_text(json.dumps(told))
    assert train(tmp_path / "run", "--steps", 2) == 0
    assert len(rows(tmp_path / "run")) == 2


# ---------------------------------------------------------------- checkpoints


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("--eval-every", 1, "--keep-best", "--keep", 2, "--checkpoint-every", 2, "--lr", "3e-2", "--warmup", 1)
    assert train(out, "--steps", 3, *words) == 0
    assert train(out, "--steps", 9, *words, "--lr", 9) == 0  # so that it gets worse
    losses = {row["step"]: row["val_loss"] for row in rows(out)}
    best = min(losses, key=losses.__getitem__)
    assert best <= 4
    name, loss = (out / "checkpoints" / "best").read_text().split()
    assert (name, float(loss)) == (f"step-{best:08d}", losses[best])
    assert checkpoints(out) == [f"step-{step:08d}" for step in (best, 8, 9)]
    assert (out / "checkpoints" / "latest").read_text() == "step-00000009\n"


def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path: Path, capsys: Capture) -> None:
    out, words = tmp_path / "run", ("--steps", 4, "--checkpoint-every", 2)
    assert train(out, *words) == 0
    whole = numbers(out)
    largest = max((out / "checkpoints" / "step-00000004").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-9] ^= 1
    largest.write_bytes(content)
    capsys.readouterr()
    assert train(out, *words) == 0
    told = capsys.readouterr().out
    assert "step 4 is passed over, and kept as" in told
    assert "step 2 of 4 is done; going on from there" in told
    assert numbers(out) == whole
    assert checkpoints(out) == ["damaged-step-00000004", "step-00000002", "step-00000004"]


def test_the_last_sound_one_gone_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    assert train(out, "--steps", 1) == 0
    for path in (out / "checkpoints" / "step-00000001").iterdir():
        path.write_bytes(b"")
    capsys.readouterr()
    assert train(out, "--steps", 2) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert len(rows(out)) == 1


# ---------------------------------------------------------------- memory


def test_out_of_memory_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """In the second of three micro-batches: the first one's gradients must not count twice."""
    words = (*BUDGET, "--accumulate", 3, "--steps", 4)
    assert train(tmp_path / "whole", *words) == 0
    failing = once_failing(monkeypatch, passes={4})
    assert train(tmp_path / "run", *words) == 0
    assert len(failing) == 4 * 3 + 2 + 2, "and those of the validation"
    assert "step 2 ran out of memory (no room at all); trying it once more" in capsys.readouterr().out
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_out_of_memory_twice_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    once_failing(monkeypatch, passes={2, 3})
    assert train(tmp_path / "run", *BUDGET, "--steps", 4, "--checkpoint-every", 1) == 1
    assert capsys.readouterr().err == "pstar-train: no room at all\n"
    monkeypatch.undo()
    assert train(tmp_path / "run", *BUDGET, "--steps", 4) == 0
    assert "step 2 of 4 is done" in capsys.readouterr().out


def once_failing(monkeypatch: pytest.MonkeyPatch, passes: set[int]) -> list[int]:
    """The model's passes are counted, from 0; these fail after their backward pass has begun."""
    loss_of, seen = _loop.Loop._loss, list[int]()

    def loss(self: _loop.Loop, batch: torch.Tensor) -> torch.Tensor:
        found = loss_of(self, batch)
        seen.append(len(seen))
        if seen[-1] in passes:
            found.register_hook(lambda grad: (_ for _ in ()).throw(torch.OutOfMemoryError("no room at all")))
        return found

    monkeypatch.setattr(_loop.Loop, "_loss", loss)
    return seen


def test_what_cannot_fit_is_status_3(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--device", "emulated", "--device-memory", "1KB", "--steps", 1) == 3
    said = capsys.readouterr().err
    assert said.startswith("pstar-train: does not fit: device needs ")
    assert said.count("\n") == 1


# ---------------------------------------------------------------- what it says


def test_metrics_hold_what_is_promised(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(out, *BUDGET, "--steps", 4, "--eval-every", 2, "--warmup", 2, "--lr", "1e-2") == 0
    found = rows(out)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for row in found:
        assert 2 < row["loss"] < 8
        assert row["tokens_per_s"] > 0
        assert row["grad_norm"] > 0
        assert set(row["memory"]) == {"device", "host"}
        assert row["memory"]["device"]["budget_bytes"] == 400_000
        assert 0 < row["memory"]["device"]["current_bytes"] <= row["memory"]["device"]["peak_bytes"] <= 400_000
        assert set(row["moved_bytes"]) <= {"device->host", "host->device"}
    assert found[0]["lr"] == 0.005
    assert [("val_loss" in row) for row in found] == [False, True, False, True]
    moved = [sum(row["moved_bytes"].values()) for row in found]
    assert moved[2] == moved[3] > 0, "once the plan runs, every step moves the same"


def test_the_summary_and_the_sample(tmp_path: Path, capsys: Capture) -> None:
    words = (*BUDGET, "--steps", 3, "--sample", 9, "--prompt", "train", "--peak-tflops", "1")
    assert train(tmp_path / "run", *words) == 0
    told = capsys.readouterr().out
    assert re.match(r"reading .*\ngpt-2x32: 66.7K parameters, 2 layers of 32, 264 tokens; bf16 on emulated, 32 t", told)
    assert re.search(r"^ *step +loss +norm +lr +tokens/s +TFLOPS +MFU +device of 390.6 KiB +host of ", told, re.M)
    ends = re.findall(r"^ *[13]/3 .* (\S+)$", told, re.M)
    assert [end[-1] for end in ends] == ["B", "s"], "the first step, which also plans, says nothing of the time left"
    assert re.search(r"^trained 3 steps, 96 tokens in \d+s, [\d,]+ tokens/s$", told, re.M)
    model_data = re.search(r"^  model data +([\d.]+) KiB  14\.\d bytes each of \d+\.?\d*K$", told, re.M)
    assert model_data is not None
    assert float(model_data[1]) > 2 * 390, "the budget is less than half of it"
    assert re.search(r"^  device, at most +[\d.]+ KiB  of 390.6 KiB: kept$", told, re.M)
    assert re.search(r"^  moved host->device +[\d.]+ [KM]iB  [\d.]+ KiB a step$", told, re.M)
    assert re.search(
        r"^  plain PyTorch needs +[\d.]+ MiB  .* of model data, about .* of activations, all on", told, re.M
    )
    assert re.search(r"^validation loss \d\.\d{4} nats a byte$", told, re.M)
    assert re.search(r"^sample:\ntrain", told, re.M)
    again = run_again(tmp_path, words, capsys)
    assert again == told[told.index("sample:") :], "the sample is the seed's"


def run_again(tmp_path: Path, words: tuple[object, ...], capsys: Capture) -> str:
    assert train(tmp_path / "run", *map(str, words)) == 0
    told = capsys.readouterr().out
    return told[told.index("sample:") :]


def test_what_was_used_is_written_down(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--steps", 1, "--lr", "1e-2") == 0
    found = from_file(tmp_path / "run" / "options.toml")
    assert (found["steps"], found["lr"], found["model"]) == (1, 0.01, "gpt-2x32")
    assert main(["--config", str(tmp_path / "run" / "options.toml"), "--steps", "2"]) == 0
    assert len(rows(tmp_path / "run")) == 2


def test_token_files_train_too(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"".join((index % 300).to_bytes(2, "little") for index in range(2000)))
    words = [*TINY, "--data", str(path), "--out", str(tmp_path / "run"), "--steps", "2", "--sample", "3"]
    assert main([*words, "--vocab", "300"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"validation loss [\d.]+ nats a token\nmaking .*\nsample:\n\d+ \d+ \d+ \d+\n", told)
    words[words.index(str(tmp_path / "run"))] = str(tmp_path / "other")
    assert main([*words, "--vocab", "200"]) == 2
    assert re.search(r"--data: found token \d+, allowed is 0 to 199 ", capsys.readouterr().err)


def test_several_processes_need_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train(tmp_path / "run") == 2
    assert "not started by torchrun: RANK, MASTER_ADDR, MASTER_PORT not set" in capsys.readouterr().err


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--steps", 1) == 0
    held = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    lock = str(tmp_path / "run" / ".lock")
    with subprocess.Popen([sys.executable, "-c", held, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert train(tmp_path / "run", "--steps", 2) == 2
        assert "is in use by another process" in capsys.readouterr().err
        other.communicate(b"\n")
    assert train(tmp_path / "run", "--steps", 2) == 0


def test_a_terminal_gets_a_display_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: bool(LOGGER.handlers))  # as without pytest's own
    assert train(tmp_path / "run", *BUDGET, "--steps", 3, "--eval-every", 2) == 0
    assert (LOGGER.handlers, LOGGER.level) == ([], logging.NOTSET)
    told, clear = terminal.getvalue(), "\r\x1b[K"
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    for step, cells in ((1, 8), (2, 16), (3, 24)):
        bar = f"step {step}/3 [{'#' * cells}{'.' * (24 - cells)}] loss {losses[step - 1]:.4f}, "
        assert clear + bar in told
    assert told.index(f"{clear}step 0/3  the first step also plans memory") < told.index("step 1/3")
    shown = [line.rpartition(clear)[2] for line in told.split("\n")]
    assert not any("#" in line for line in shown), "no line has a bar in it, and none is left at the end"
    assert sum(line.startswith("validation loss after step ") for line in shown) == 2
    assert any(line.startswith("ps_core: GPT: planned ") for line in shown), "the engine's lines come above the bar"
    bars = [line for line in re.split(r"[\r\n]", told) if " tokens/s" in line and "#" in line]
    assert ["left" in bar for bar in bars[:1] + bars[-1:]] == [False, True]
    assert max(map(len, bars)) <= len("\x1b[K") + 99, "a bar has no second line"


def test_a_llama_trains_too(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--model", "llama-10m", "--steps", 1, "--checkpoint-every", 0) == 0
    assert "\nllama-10m: 7.45M parameters, 10 layers of 256, 264 tokens; bf16 on cpu" in capsys.readouterr().out
    assert 5 < rows(tmp_path / "run")[0]["loss"] < 6


def test_where_the_token_table_is_changes_no_number_nor_the_run(tmp_path: Path) -> None:
    way = (*BUDGET, "--untied-head", "--schedule", "constant", "--warmup", 1, "--eval-every", 0)
    assert train(tmp_path / "one", *way, "--steps", 3) == 0
    assert train(tmp_path / "other", *way, "--steps", 2, "--cpu-embedding") == 0
    assert train(tmp_path / "other", *way, "--steps", 3) == 0
    found = [[row[:4] for row in numbers(tmp_path / name)] for name in ("one", "other")]
    assert found[0] == found[1]


def test_a_head_in_tiles(tmp_path: Path, capsys: Capture) -> None:
    way = (*BUDGET, "--untied-head", "--cpu-embedding", "--eval-every", 0)
    assert train(tmp_path / "run", *way, "--head-tiles", 3, "--steps", 2) == 0
    kept = (tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json").read_text("utf-8")
    assert [f"lm_head.tiles.{index}.weight" in kept for index in range(4)] == [True, True, True, False]
    assert train(tmp_path / "run", *way, "--head-tiles", 2, "--steps", 3) == 2
    assert "holds another run: --head-tiles 3 there, 2 now" in capsys.readouterr().err
    assert train(tmp_path / "other", *way, "--head-tiles", 1000, "--steps", 1) == 2
    assert "--head-tiles: found 1000, allowed is at most 264, the model's tokens" in capsys.readouterr().err


def test_a_logger_is_told_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for wandb: the same three calls."""
    (tmp_path / "wandb.py").write_text(
        "import json\nclass Run:\n"
        "    def log(self, row, step): print(json.dumps([step, row]), file=self.file)\n"
        "    def finish(self): self.log({}, 0); self.file.close()\n"
        "def init(project, name, dir, config, resume):\n"
        "    run = Run(); run.file = open(dir + '/told', 'w'); assert config['steps'] == 2; return run\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert train(tmp_path / "run", *BUDGET, "--steps", 2, "--log", "wandb") == 0
    told = [json.loads(line) for line in (tmp_path / "run" / "told").read_text().splitlines()]
    assert [step for step, _ in told] == [1, 2, 0]
    row = rows(tmp_path / "run")[1]
    assert told[1][1]["loss"] == row["loss"]
    assert told[1][1]["memory.device.peak_bytes"] == row["memory"]["device"]["peak_bytes"]
    assert told[1][1]["val_loss"] == row["val_loss"]


def test_tensorboard_is_told_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            told.append((Path(folder), purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def close(self) -> None:
            told.append(())

    (tmp_path / "tensorboard.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert train(tmp_path / "run", "--steps", 1, "--log", "tensorboard") == 0
    assert train(tmp_path / "run", "--steps", 2, "--log", "tensorboard") == 0
    found = rows(tmp_path / "run")
    assert told[0] == (tmp_path / "run" / "tensorboard", 1)
    assert told[told.index(()) + 1] == (tmp_path / "run" / "tensorboard", 2)
    assert ("memory/host/peak_bytes", found[0]["memory"]["host"]["peak_bytes"], 1) in told
    assert ("loss", found[1]["loss"], 2) in told


def test_data_is_the_same_each_time(tmp_path: Path) -> None:
    assert data(tmp_path).read_bytes() == data(tmp_path).read_bytes()

"""The trainer's folder: who may have it, what happens to a best checkpoint that broke, and how refusals are worded."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from _trainer import data, numbers, rows, train
from ps_core import DoesNotFit
from ps_core._units import format_bytes
from ps_core.engine import save_checkpoint
from ps_core.engine._parameters.errors import _PARTS
from ps_models.train import TrainOptions, _loop, _run_folder, _sample_text, main
from ps_models.train._error_hints import hint_for, in_options
from test_train import BUDGET, at_step, checkpoints, kill_at_once, kill_softly

Capture = pytest.CaptureFixture[str]
TOO_SMALL = ("--device", "emulated", "--device-memory", "1KB")
SMALL = ("--host-memory", "100KB", "--accumulate", "2")


# ---------------------------------------------------------------- who may have it


def test_a_start_that_made_no_step_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, words = tmp_path / "run", ("--steps", 2)
    assert train(out, *words, *TOO_SMALL) == 3
    at_step(monkeypatch, 1, kill_at_once)
    with pytest.raises(RuntimeError, match="gone"):
        train(out, *words, "--seed", 5)
    monkeypatch.undo()
    assert train(out, *words, "--seq", 12, "--batch", 1, *BUDGET) == 0
    assert json.loads((out / "run.json").read_text())["options"]["seq"] == 12
    assert train(out, *words, "--seq", 16) == 2, "now there is a run"
    assert train(tmp_path / "new", *words, "--seq", 12, "--batch", 1, *BUDGET) == 0
    assert numbers(out) == numbers(tmp_path / "new")


def test_one_step_is_enough_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    at_step(monkeypatch, 2, kill_at_once)
    with pytest.raises(RuntimeError, match="gone"):
        train(out, "--steps", 3)
    monkeypatch.undo()
    assert not checkpoints(out)
    assert train(out, "--steps", 3, "--seed", 1) == 2
    assert train(out, "--steps", 3) == 0


def test_which_parameters_decay_may_change(tmp_path: Path) -> None:
    words = ("--lr", "1e-2", "--schedule", "constant", "--weight-decay", 50)
    for folder in ("same", "other"):
        assert train(tmp_path / folder, *words, "--steps", 3) == 0
    assert train(tmp_path / "same", *words, "--steps", 6) == 0
    assert train(tmp_path / "other", *words, "--steps", 6, "--decay", "all") == 0
    same, other = numbers(tmp_path / "same"), numbers(tmp_path / "other")
    assert same[:4] == other[:4]  # a loss is taken before its update
    assert all(one[1] != two[1] for one, two in zip(same[4:], other[4:], strict=True))


def test_a_checkpoint_of_something_else_is_status_2(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", "--steps", 1) == 0
    assert train(tmp_path / "other", "--steps", 1, "--model", "gpt-1x32") == 0
    found = tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.rmtree(found)
    (tmp_path / "other" / "checkpoints" / "step-00000001").rename(found)
    capsys.readouterr()
    assert train(tmp_path / "run", "--steps", 2) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pstar-train: --out: {found} is of something else"), said
    assert "; parameter 'transformer.h.1.ln_1.weight': in the model, not in the checkpoint; " in said, said
    assert said.endswith("; allowed is a folder whose checkpoints are of this training, or a new one\n")
    assert said.count("\n") == 1


# ---------------------------------------------------------------- the best checkpoint

BEST = ("--eval-every", 1, "--keep-best", "--keep", 1, "--checkpoint-every", 1, "--lr", "3e-2", "--warmup", 1)


def got_worse(out: Path) -> int:
    """A run of six steps whose best is one of the first three; that step."""
    assert train(out, "--steps", 3, *BEST) == 0
    assert train(out, "--steps", 6, *BEST, "--lr", 9) == 0
    best = int((out / "checkpoints" / "best").read_text().split()[0].removeprefix("step-"))
    assert best <= 3
    return best


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_best_that_broke_keeps_nobody_out(how: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    best = got_worse(out)
    folder = out / "checkpoints" / f"step-{best:08d}"
    if how == "gone":
        shutil.rmtree(folder)
    else:
        largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-9] ^= 1
        largest.write_bytes(content)
    capsys.readouterr()
    assert train(out, "--steps", 7, *BEST, "--lr", 9) == 0
    told = capsys.readouterr().out
    assert re.search(
        rf"the best checkpoint, of step {best} with a validation loss of \d\.\d{{4}}, is passed over", told
    )
    assert told.count("counts as the best so far") == 1
    name, loss = (out / "checkpoints" / "best").read_text().split()
    assert (name, float(loss)) == ("step-00000007", rows(out)[-1]["val_loss"])
    aside = [f"damaged-step-{best:08d}"] if how == "changed" else []
    assert checkpoints(out) == [*aside, "step-00000007"]
    assert train(out, "--steps", 7, *BEST, "--lr", 9) == 0
    assert "is passed over" not in capsys.readouterr().out


def test_a_best_that_is_sound_stays(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    best = got_worse(out)
    before = (out / "checkpoints" / "best").read_text()
    assert train(out, "--steps", 7, *BEST, "--lr", 9) == 0
    assert "passed over" not in capsys.readouterr().out
    assert (out / "checkpoints" / "best").read_text() == before
    assert checkpoints(out) == [f"step-{best:08d}", "step-00000007"]


# ---------------------------------------------------------------- what does not fit

STRANGE = re.compile(r"Budget|Options|chunked|accumulation_steps|\bdevice=")


def refused(folder: Path, capsys: Capture, *words: str) -> str:
    """What is said, in one line, by a start that cannot fit."""
    assert train(folder / "run", "--steps", 1, *words) == 3
    said = capsys.readouterr().err
    assert said.startswith("pstar-train: does not fit: ")
    assert said.count("\n") == 1
    assert not STRANGE.search(said), said
    return said


def test_what_does_not_fit_names_the_options(tmp_path: Path, capsys: Capture) -> None:
    said = refused(tmp_path, capsys, *TOO_SMALL, "--no-checkpointing")
    memory = re.search(r"; try --device-memory (\d+): [\d,.]+ (bytes|MiB) more, and what activations take; try ", said)
    assert memory is not None
    assert "; try --batch 1: " in said
    for _ in range(2):  # of activations nothing is known before there is a batch
        words = ("--device", "emulated", "--device-memory", memory[1], "--no-checkpointing")
        status = train(tmp_path / "run", "--steps", 1, *words)
        if status == 0:
            return
        found = re.search(r"; try --device-memory (\w+): ", capsys.readouterr().err)
        assert found is not None
        memory = found
    raise AssertionError("what is told is never enough")


def test_a_sample_that_does_not_fit_ends_no_training(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(*_: object) -> str:
        raise DoesNotFit(
            tier="device", moment="a word", needed_bytes=2, available_bytes=1, proven=True, remedies=("x",)
        )

    monkeypatch.setattr(_sample_text, "written", written)
    assert train(tmp_path / "run", "--steps", 1, "--sample", 3) == 0
    assert "\nsample: none, does not fit: device needs 2 bytes at 'a word', " in capsys.readouterr().out


def test_every_tier_likewise(tmp_path: Path, capsys: Capture) -> None:
    one = ("--batch", "1")
    said = refused(tmp_path, capsys, *TOO_SMALL, *one)
    assert "; try --seq 8: " in said
    assert "--checkpointing" not in said, "it is on"
    said = refused(tmp_path, capsys, "--device", "cpu", "--host-memory", "100KB", "--precision", "fp32")
    assert re.search(r"; try --host-memory \w+: .*; try --precision bf16: .*; try a smaller --model: ", said)
    said = refused(tmp_path, capsys, *BUDGET, *SMALL)
    assert re.search(r"; try --host-memory \w+: ", said)
    found = re.search(r"; try (--disk \w+): ", said)
    assert found is not None
    host = re.search(r"; try --host-memory (\w+): ", refused(tmp_path, capsys, *BUDGET, *SMALL, *found[1].split()))
    assert host is not None, "in which a group is stepped"
    assert train(tmp_path / "other", *BUDGET, *SMALL, *found[1].split(), "--host-memory", host[1], "--steps", 1) == 0
    said = refused(tmp_path, capsys, *BUDGET, "--host-memory", "100KB", "--disk", "100KB")
    assert re.search(r"; try --disk \w+: ", said)


def test_any_remedy_is_put_in_options() -> None:
    error = DoesNotFit(
        tier="host",
        moment="a step",
        needed_bytes=2,
        available_bytes=1,
        proven=False,
        remedies=(
            'Budget(device="1MiB", host=1234): 3 more',
            'Budget(device="1MiB", host="2MiB", disk="3MiB", disk_dir="a (new) folder"): 1 more',
            "Options(group_bytes=3): less",
            "one backward pass between two steps, or accumulation_steps=2 for room planned ahead",
            "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False): for each block",
            "model.get_parameter('wte.weight').requires_grad_(False): before chunked; it has no states then",
            "model.get_parameter('w').requires_grad_(False): before chunked, for half of all parameters, 3 less",
        ),
    )
    given = TrainOptions(checkpointing=False, device_memory="1MiB", host_memory="2MiB")
    told = hint_for(error, given).split("; try ")[1:]
    assert told == [
        "--host-memory 1234: 3 more",
        "--disk 3MiB --disk-dir 'a (new) folder': 1 more",
        "--checkpointing: only one block's activations are there at a time",
        "--disk 1MiB: room for what the computer's memory cannot hold",
    ]
    error.remedies = ("half the batch or sequence: 5 less",)
    chunks = "--chunked-loss: not all logits are there at a time"
    assert hint_for(error, TrainOptions(hf="folder", batch=4, seq=512)).split("; try ")[1:] == [
        chunks,
        "--batch 2: 5 less",
    ]
    already = TrainOptions(hf="folder", batch=4, chunked_loss=True)
    assert hint_for(error, already).split("; try ")[1:] == ["--batch 2: 5 less"]
    assert hint_for(error, already, begun=True).endswith("; try --batch 2: 5 less (with another --out)")
    for part, words in _PARTS.items():
        error.remedies = (f"{words} the batch or sequence: 5 less",)
        assert hint_for(error, TrainOptions(batch=32)).split("; try ")[1:] == [f"--batch {32 // part}: 5 less"]
    error.remedies = ("a quarter of the batch or sequence: 5 less",)
    smaller = {8: "--batch 2: 5 less", 2: "--batch 1 --seq 128: 5 less", 1: "--seq 64: 5 less"}
    for batch, told_then in smaller.items():
        assert hint_for(error, TrainOptions(batch=batch)).split("; try ")[1:] == [told_then]
    error.remedies = ("HostEmbedding in place of nn.Embedding for bert.embeddings.word_embeddings.weight",)
    assert "; try" not in hint_for(error, TrainOptions(model="bert-base")), "its head needs all of it"
    assert in_options("a smaller Budget(device=...) or Budget.disk_dir") == "a smaller --device-memory or --disk-dir"


def test_a_signal_before_the_first_step_says_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    resume = _loop.Loop.resume

    def signalled(loop: _loop.Loop) -> bool:
        kill_softly(signal.SIGTERM)()
        return resume(loop)

    monkeypatch.setattr(_loop.Loop, "resume", signalled)
    assert train(tmp_path / "run", "--steps", 9) == 0
    assert capsys.readouterr().out.endswith("SIGTERM: no step is done, so nothing is saved\n")


def test_what_cannot_change_within_a_run_is_said_to_need_another(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", *BUDGET, "--steps", 1) == 0
    capsys.readouterr()
    assert train(tmp_path / "run", "--device", "emulated", "--device-memory", "20KB", "--steps", 2) == 3
    tries = capsys.readouterr().err.splitlines()[-1].split("; try ")[1:]
    assert [each.split()[0] for each in tries] == ["--device-memory", "--untied-head", "--batch"]
    assert [each.endswith("(with another --out)") for each in tries] == [False, True, True]


def test_the_best_is_noted_before_old_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed while it removes an old checkpoint has lost nothing of the best one."""
    words = ("--eval-every", 1, "--checkpoint-every", 1, "--keep", 1, "--keep-best", "--lr", "1e-2", "--warmup", 0)
    assert train(tmp_path / "whole", *words, "--steps", 4) == 0
    steps = [each.name for each in (tmp_path / "whole" / "checkpoints").glob("step-*")]
    best = (tmp_path / "whole" / "checkpoints" / "best").read_text()
    assert best.split()[0] == "step-00000004", "each step is better than the one before"
    assert steps == ["step-00000004"], "what was the best before is gone"
    out = tmp_path / "run"

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_run_folder.RunFolder, "saved", killed)
        assert train(out, *words, "--steps", 4) == 130
    assert not (out / "checkpoints" / "best").exists()
    assert train(out, *words, "--steps", 1) == 0
    assert (out / "checkpoints" / "best").read_text().startswith("step-00000001 ")


def test_a_full_disk_says_where_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save(path: Path, *args: Any, **told: Any) -> None:
        with monkeypatch.context() as patch:
            if path.name == "step-00000002":
                patch.setattr(os, "fsync", full)
            save_checkpoint(path, *args, **told)

    monkeypatch.setattr(_loop, "save_checkpoint", save)
    assert train(tmp_path / "run", "--checkpoint-every", 1, "--steps", 3) == 1
    told = "(No space left on device): make room; the same command goes on from step 1\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize("name", ["metrics.jsonl", ".options.toml.new"])
def test_a_full_disk_names_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    sync = os.fsync

    def full(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(f"/{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", full)
    assert train(tmp_path / "run", "--steps", 1) == 1
    told = capsys.readouterr().err
    shown = str(tmp_path / "run" / name.removeprefix(".").removesuffix(".new"))
    rest = "make room, and run the same command again"
    assert told == f"pstar-train: [Errno 28] No space left on device: {shown!r}: {rest}\n"
    monkeypatch.undo()
    assert train(tmp_path / "run", "--steps", 1) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no fcntl: runs are never locked")
def test_a_file_system_without_locks_can_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert train(tmp_path / "run", "--steps", 1) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--untied-head --cpu-embedding --head-tiles 16: "),
        (["--untied-head"], "--cpu-embedding --head-tiles 16: "),
        (["--untied-head", "--cpu-embedding"], "--head-tiles 16: "),
    ],
)
def test_a_table_beyond_the_accelerator(options: list[str], words: str, tmp_path: Path, capsys: Capture) -> None:
    """With all that is said there it is not refused for that any more."""
    small = ["--model", "gpt-1x64", "--vocab", "8192", "--seq", "16", "--batch", "2", "--steps", "1", "--sample", "0"]
    place = ["--out", str(tmp_path / "run"), "--device", "emulated", "--device-memory", "1MB"]
    line = [*small, *place, "--data", str(data(tmp_path))]
    assert main([*line, *options]) == 3
    assert f"; try {words}token table and head need not be on the accelerator" in capsys.readouterr().err
    assert main([*line, *options, *words.removesuffix(": ").split()]) == 0


def test_what_moved_is_that_of_the_steps(tmp_path: Path, capsys: Capture) -> None:
    assert train(tmp_path / "run", *BUDGET, "--steps", 3, "--eval-every", 1) == 0
    told = capsys.readouterr().out
    for link in ("host->device", "device->host"):
        moved = sum(row["moved_bytes"].get(link, 0) for row in rows(tmp_path / "run"))
        assert moved > 0
        assert re.search(rf"moved {link} +{format_bytes(moved)}  {format_bytes(moved / 3)} a step\n", told)


def test_offloading_needs_checkpointing(tmp_path: Path, capsys: Capture) -> None:
    line = ["--data", str(data(tmp_path)), "--out", str(tmp_path / "run"), "--offload-checkpoints"]
    assert main([*line, "--no-checkpointing"]) == 2
    assert "--offload-checkpoints: found with --no-checkpointing" in capsys.readouterr().err


def test_what_a_killed_save_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    assert train(out, "--steps", 2, "--checkpoint-every", 1) == 0
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # a process that is killed removes nothing
        patched.setattr("ps_core.engine._checkpoint.atomic_folder.sync_folder", lambda _: kill_at_once())
        with pytest.raises(RuntimeError, match="gone"):
            train(out, "--steps", 3, "--checkpoint-every", 1)
    assert [each for each in (out / "checkpoints").iterdir() if each.name.startswith(".step-")]
    assert train(out, "--steps", 4, "--checkpoint-every", 4) == 0
    assert not [each for each in (out / "checkpoints").iterdir() if each.name.startswith(".step-")]


# ---------------------------------------------------------------- who listens


def test_nobody_needs_to_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``| head``, standard error too: it trains to the end, and what it found is in the folder."""
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, name, open(writer, "w", encoding="utf-8"))  # noqa: SIM115 - closed below
    out = tmp_path / "run"
    try:
        assert train(out, "--steps", 3, *BUDGET) == 0
        assert train(out, "--steps", 0) == 2, "what is wrong is told nobody"
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        monkeypatch.undo()
    assert [row["step"] for row in rows(out)] == [1, 2, 3]
    assert checkpoints(out) == ["step-00000003"]

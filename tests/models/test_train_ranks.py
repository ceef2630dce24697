"""The trainer as several processes: the numbers of one process, one voice, one folder, and one end."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from _ranks import Ranks
from _trainer import TINY, data, numbers, rows

EMULATED = ("--device", "emulated", "--device-memory", "400KB", "--accumulate", "2")


@pytest.fixture(scope="module")
def crew() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def words(out: Path, *more: str | int) -> list[str]:
    """Four steps, clipped only where asked for: the norm is summed in another order by other numbers of processes."""
    fixed = ("--batch", "4", "--steps", "4", "--lr", "1e-2", "--eval-every", "2", "--clip", "0")
    return [*TINY, *fixed, "--data", str(data(out.parent)), "--out", str(out), *map(str, more)]


def losses(out: Path) -> list[tuple[float, float | None]]:
    return [(row["loss"], row.get("val_loss")) for row in rows(out)]


def test_the_bits_of_one_process_that_takes_the_parts_one_by_one(crew: Ranks, tmp_path: Path) -> None:
    """In fp32; and to rounding, the numbers of one that takes them at once."""
    given = ("--precision", "fp32")
    assert [end.status for end in crew.train(tmp_path, words(tmp_path / "two", *given))] == [0, 0]
    for name, more in (("one", ()), ("parts", ("--batch", 2, "--accumulate", 2))):
        (end,) = crew.train(tmp_path, words(tmp_path / name, *given, *more), ranks=1)
        assert end.status == 0, end.output
    two = losses(tmp_path / "two")
    assert [loss for loss, _ in two] == [loss for loss, _ in losses(tmp_path / "parts")]
    assert len({loss for loss, _ in two}) == 4
    alike(two, losses(tmp_path / "one"), 1e-5)


def test_the_numbers_of_one_process(crew: Ranks, tmp_path: Path) -> None:
    """With half the precision, an accelerator, and several passes a step."""
    assert [end.status for end in crew.train(tmp_path, words(tmp_path / "two", *EMULATED))] == [0, 0]
    (end,) = crew.train(tmp_path, words(tmp_path / "one", *EMULATED), ranks=1)
    assert end.status == 0, end.output
    alike(losses(tmp_path / "two"), losses(tmp_path / "one"), 2e-3)


def alike(some: list[tuple[float, float | None]], others: list[tuple[float, float | None]], rounding: float) -> None:
    """Losses, and those of validations, where there were any."""
    for one, other in zip(some, others, strict=True):
        assert one[0] == pytest.approx(other[0], rel=rounding)
        assert (one[1] is None) == (other[1] is None)
        assert one[1] is None or one[1] == pytest.approx(other[1], rel=rounding)


def test_one_speaks_and_writes(crew: Ranks, tmp_path: Path) -> None:
    first, second = crew.train(tmp_path, words(tmp_path / "run", "--sample", 5))
    assert (first.status, second.status, second.output) == (0, 0, "")
    assert "2 processes, each with 2 of the 4 sequences of a micro-batch" in first.output
    assert "sample:\n" in first.output
    assert "trained 4 steps, 256 tokens" in first.output
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


OFTEN = ("--checkpoint-every", 1, "--keep-best")


@pytest.fixture(scope="module")
def whole(crew: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert [end.status for end in crew.train(out.parent, words(out, *OFTEN))] == [0, 0]
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_ends_all_after_the_same_step(
    number: signal.Signals, crew: Ranks, whole: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    ends = crew.train(tmp_path, words(cut, *OFTEN), at=(1, 2, number))
    assert [end.status for end in ends] == [0, 0], ends
    assert "a signal to another process: step 2 of 4 is saved" in ends[0].output
    assert [row["step"] for row in rows(cut)] == [1, 2]
    assert [end.status for end in crew.train(tmp_path, words(cut, *OFTEN))] == [0, 0]
    assert numbers(cut) == numbers(whole)


def test_killed_and_started_again(crew: Ranks, whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    ends = crew.train(tmp_path, words(cut, *OFTEN), at=(1, 4, signal.SIGKILL))
    assert [end.status for end in ends] == [1, -9]
    assert re.search(r"rank 1 on \S+ ended or cannot be reached", ends[0].output)
    again = crew.train(tmp_path, words(cut, *OFTEN))
    assert "step 3 of 4 is done; going on from there" in again[0].output
    assert numbers(cut) == numbers(whole)


BEST = ("--eval-every", 1, "--keep-best", "--keep", 1, "--checkpoint-every", 1, "--lr", "3e-2", "--warmup", 1)


def checkpoints(out: Path) -> list[str]:
    return sorted(each.name for each in (out / "checkpoints").iterdir() if each.is_dir())


def damage(checkpoint: Path) -> None:
    """One bit, near the end of its largest file."""
    largest = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-9] ^= 1
    largest.write_bytes(content)


def test_the_best_stays_and_one_that_broke_is_passed_over_by_all(crew: Ranks, tmp_path: Path) -> None:
    """Which is the best, and whether it is sound, is for the first process to say; the other goes along."""
    out = tmp_path / "run"
    for steps, more in ((3, ()), (6, ("--lr", 9))):  # so that it gets worse
        ends = crew.train(tmp_path, words(out, *BEST, "--steps", steps, *more))
        assert [end.status for end in ends] == [0, 0], ends
    losses_of = {row["step"]: row["val_loss"] for row in rows(out)}
    best = min(losses_of, key=losses_of.__getitem__)
    assert best <= 3
    name, loss = (out / "checkpoints" / "best").read_text().split()
    assert (name, float(loss)) == (f"step-{best:08d}", losses_of[best])
    assert checkpoints(out) == [name, "step-00000006"]
    damage(out / "checkpoints" / name)
    first, second = crew.train(tmp_path, words(out, *BEST, "--steps", 7, "--lr", 9))
    assert (first.status, second.status, second.output) == (0, 0, "")
    assert first.output.count(f"the best checkpoint, of step {best} with a validation loss of") == 1
    name, loss = (out / "checkpoints" / "best").read_text().split()
    assert (name, float(loss)) == ("step-00000007", rows(out)[-1]["val_loss"])
    assert checkpoints(out) == [f"damaged-step-{best:08d}", "step-00000007"]


def test_a_newest_that_broke_is_passed_over_by_all(crew: Ranks, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage(out / "checkpoints" / "step-00000004")
    first, second = crew.train(tmp_path, words(out, *OFTEN, "--data", whole.parent / "words.txt"))
    assert (first.status, second.status, second.output) == (0, 0, ""), (first, second)
    assert first.output.count("step 4 is passed over, and kept as") == 1
    assert "step 3 of 4 is done; going on from there" in first.output
    assert numbers(out) == numbers(whole)


def test_two_go_on_where_one_was(crew: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (end,) = crew.train(tmp_path, words(out, *OFTEN, "--steps", 2, "--schedule", "constant"), ranks=1)
    assert end.status == 0, end.output
    first, second = crew.train(tmp_path, words(out, *OFTEN, "--steps", 4, "--schedule", "constant"))
    assert (first.status, second.status) == (0, 0)
    assert "step 2 of 4 is done; going on from there" in first.output
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]


def test_a_batch_is_shared_evenly(crew: Ranks, tmp_path: Path) -> None:
    for end in crew.train(tmp_path, words(tmp_path / "run", "--batch", 3)):
        assert end.status == 2
        assert "--batch: found 3, which 2 processes share; allowed is a multiple of 2" in end.output


def test_steps_that_are_undone_need_one_process(crew: Ranks, tmp_path: Path) -> None:
    for end in crew.train(tmp_path, words(tmp_path / "run", "--step-speculative")):
        assert end.status == 2
        assert "--step-speculative: found with 2 processes; allowed with one" in end.output


def test_all_are_told_the_same(crew: Ranks, tmp_path: Path) -> None:
    for end in crew.train(tmp_path, words(tmp_path / "run"), own=(["--lr", "0.5"], ["--lr", "0.25"])):
        assert end.status == 1
        assert "--lr must be the same on all ranks, found: 0.5 (rank 0); 0.25 (rank 1)" in end.output


def test_what_stops_the_first_is_told_by_the_others(crew: Ranks, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (end,) = crew.train(tmp_path, words(out, "--steps", 1), ranks=1)
    assert end.status == 0
    first, second = crew.train(tmp_path, words(out, "--seed", 7))
    assert first.status == 2
    assert "holds another run: --seed 0 there, 7 now" in first.output
    assert second.status == 1
    assert re.search(r"rank 0 on \S+ raised InvalidInput: --out: ", second.output)
    assert json.loads((out / "run.json").read_text("utf-8"))["options"]["seed"] == 0


def test_a_model_of_transformers_in_two_processes(crew: Ranks, tmp_path: Path) -> None:
    """Sequences with unequal numbers of trained tokens, adapters, and the export, which one process writes."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    from _transformers_folder import PAIRS, save_lines, save_model, save_tokenizer

    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    lines = save_lines(tmp_path / "a.jsonl", PAIRS)
    fixed = ("--hf", tmp_path / "model", "--data", lines, "--pack", "--seq", 48, "--precision", "fp32", "--clip", 0)
    more = ("--lr", "1e-2", "--steps", 3, "--batch", 4, "--threads", 1, "--sample", 0, "--out")
    for name, adapted in (("whole", ()), ("adapters", ("--lora", 2)), ("merged", ("--lora", 2, "--lora-merge"))):
        given = [*map(str, (*fixed, *adapted, *more))]
        two, parts = tmp_path / name, tmp_path / f"{name}-parts"
        ends = crew.train(tmp_path, [*given, str(two)])
        assert [end.status for end in ends] == [0, 0], ends
        assert ends[1].output == ""
        (end,) = crew.train(tmp_path, [*given, str(parts), "--batch", "2", "--accumulate", "2"], ranks=1)
        assert end.status == 0, end.output
        assert [row["loss"] for row in rows(two)] == [row["loss"] for row in rows(parts)]
        exported = [next((each / "export").glob("*model*.safetensors")).read_bytes() for each in (two, parts)]
        assert exported[0] == exported[1]

"""Killed without warning, at random instants: a run goes on from its last complete checkpoint."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from _trainer import TINY, data, numbers, rows
from _zygote import Zygote

STEPS, EVERY = 8, 2
WORDS = (
    *TINY,
    "--steps",
    str(STEPS),
    "--checkpoint-every",
    str(EVERY),
    "--eval-every",
    "4",
    "--keep-best",
    "--lr",
    "1e-2",
)
KILLED = -9
EMULATED = ("--device", "emulated", "--device-memory", "400KB")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    found = Zygote()
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """An uninterrupted run, and how often it used a file of its folder."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "run"
    answer = zygote.run(words(out), folder / "said", watch=out)
    assert answer["status"] == 0, (folder / "said").read_text()
    assert [row["step"] for row in rows(out)] == list(range(1, STEPS + 1))
    return out, answer["uses"]


def words(out: Path, *more: str) -> list[str]:
    return [*WORDS, "--device", "cpu", *more, "--data", str(data(out.parent)), "--out", str(out)]


def complete(out: Path) -> list[int]:
    """The steps of the checkpoints that have their final name."""
    found = (re.fullmatch(r"step-(\d+)", each.name) for each in (out / "checkpoints").glob("*"))
    return sorted(int(match[1]) for match in found if match)


def went_on_from(said: Path) -> int:
    """The step that a run said it resumed from; 0 if it began anew."""
    found = re.search(rf"step (\d+) of {STEPS} is done", said.read_text("utf-8"))
    return int(found[1]) if found else 0


def finish(zygote: Zygote, out: Path, said: Path, *more: str) -> None:
    """Let a run come to its end."""
    newest = max(complete(out), default=0)
    answer = zygote.run(words(out, *more), said)
    assert answer["status"] == 0, said.read_text("utf-8")
    assert went_on_from(said) == newest


def test_killed_before_any_use_of_a_file(zygote: Zygote, whole: tuple[Path, int], tmp_path: Path) -> None:
    """Twenty times, at random instants, one after the other in a few runs."""
    reference, uses = whole
    assert uses > 90
    chance, kills, out, said = random.Random(7), 0, tmp_path / "run", tmp_path / "said"
    while kills < 20:
        newest = max(complete(out), default=0)
        answer = zygote.run(words(out), said, watch=out, after=chance.randint(1, uses * 4 // 5))
        if answer["status"] == KILLED:
            kills += 1
            assert went_on_from(said) in (newest, 0), "0: killed before it said so"
            assert max(complete(out), default=0) >= newest
        else:
            finished(zygote, reference, out, said)
            out.rename(tmp_path / f"before-{kills}")
    finished(zygote, reference, out, said)
    assert len(list(tmp_path.glob("before-*"))) in range(2, 12), "kills were spread over runs"


def finished(zygote: Zygote, reference: Path, out: Path, said: Path) -> None:
    """Whatever happened to it, it comes to the same end, and nothing half-done stays."""
    finish(zygote, out, said)
    assert numbers(out) == numbers(reference)
    assert not [each.name for each in (out / "checkpoints").iterdir() if each.name.startswith(".")]


def test_killed_in_the_middle_of_a_checkpoint(zygote: Zygote, whole: tuple[Path, int], tmp_path: Path) -> None:
    """Between any two uses of a file around the second and third checkpoint: every kind of half-done work."""
    _, uses = whole
    out, said = tmp_path / "run", tmp_path / "said"
    seen = set()
    for after in range(uses // 3, 2 * uses // 3, uses // 12):
        if out.exists():
            out.rename(tmp_path / f"before-{after}")
        answer = zygote.run(words(out), said, watch=out, after=after)
        assert answer["status"] == KILLED
        seen.add((len(rows_whole(out)), *(complete(out))))
        finish(zygote, out, said)
    assert len(seen) > 2


def rows_whole(out: Path) -> list[bytes]:
    return (out / "metrics.jsonl").read_bytes().splitlines()


def test_killed_at_any_time(zygote: Zygote, whole: tuple[Path, int], tmp_path: Path) -> None:
    """By the clock, so also in the middle of writing; wherever that is, the rest comes out the same."""
    reference, _ = whole
    out, said = tmp_path / "run", tmp_path / "said"
    chance = random.Random(3)
    for _ in range(6):
        newest = max(complete(out), default=0)
        zygote.run(words(out, *EMULATED), said, delay_s=chance.uniform(0.05, 0.9))
        assert max(complete(out), default=0) >= newest
    finish(zygote, out, said, *EMULATED)
    assert numbers(out) == numbers(reference)

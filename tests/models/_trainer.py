"""Small runs of the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ps_models.train import main

TINY = ("--model", "gpt-2x32", "--seq", "16", "--batch", "2", "--threads", "1", "--eval-batches", "2", "--sample", "0")
"""What makes a step take milliseconds."""


def data(folder: Path) -> Path:
    """A small text, the same each time."""
    path = folder / "words.txt"
    words = ("to train a model that is larger than memory one moves what is not needed now " * 40).split()
    path.write_text(" ".join(words[index * 7 % len(words)] for index in range(600)), "utf-8")
    return path


def train(out: Path, *words: str | Path | int) -> int:
    """Run the command in this process, on `data`; its exit status."""
    text = data(out.parent)
    return main([*TINY, "--data", str(text), "--out", str(out), *map(str, words)])


def rows(out: Path) -> list[dict[str, Any]]:
    """The run's metrics."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def numbers(out: Path) -> list[tuple[Any, ...]]:
    """What two equal runs have equal, bit for bit."""
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"], row.get("val_loss")) for row in rows(out)]

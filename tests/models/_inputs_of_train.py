"""What cases of refused inputs share: their table, and a folder of files for ``pstar-train``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from _followed import Followed, refused
from _trainer import TINY, data
from _transformers_folder import PAIRS, TALKS, save_lines, save_model, save_tokenizer
from ps_models.train import _main
from ps_models.train._command_line import parse

TABLE = Followed()
case, row = TABLE.case, TABLE.row
_RUNS = count()


def prepare(base: Path) -> None:
    """Write data and models of every kind that cases name."""
    data(base)
    (base / "texts").mkdir()
    (base / "texts" / "a.txt").write_text("some words " * 99, "utf-8")
    (base / "short.txt").write_text("x" * 30, "utf-8")
    (base / "tokens.bin").write_bytes((np.arange(900) % 200).astype("<u2").tobytes())
    np.save(base / "tokens.npy", (np.arange(900) % 200).astype("<u2"))
    np.save(base / "square.npy", np.zeros((9, 9), "u1"))
    whole = (base / "tokens.npy").read_bytes()
    (base / "cut.npy").write_bytes(whole[:-20])
    (base / "odd.bin").write_bytes(b"123")
    save_lines(base / "pairs.jsonl", PAIRS)
    save_lines(base / "talks.jsonl", TALKS)
    save_lines(base / "long.jsonl", [{"prompt": "a" * 20, "completion": "b"} for _ in range(40)])
    save_lines(base / "lines.jsonl", [{"text": f"{n} words"} for n in range(60)])
    save_lines(base / "brief.jsonl", [{"prompt": f"{n}", "completion": "b"} for n in range(40)])
    for kind in ("llama", "llama tied", "mamba", "mixtral", "bert"):
        save_model(base / kind.replace(" ", "-"), kind)
        save_tokenizer(base / kind.replace(" ", "-"))
    save_tokenizer(base / "tokenizer")
    save_tokenizer(base / "plain-tokenizer", template=None)
    (base / "empty").mkdir()
    changed(base / "llama", base / "no-end", "tokenizer_config.json", lambda found: found.pop("eos_token"))
    changed(base / "llama", base / "small", "config.json", lambda found: found.update(vocab_size=200))
    changed(base / "bert", base / "encoder", "config.json", lambda found: found.pop("is_decoder"))
    changed(base / "llama", base / "wider", "config.json", lambda found: found.update(intermediate_size=48))
    (shutil.copytree(base / "llama", base / "no-weights") / "model.safetensors").unlink()
    part = shutil.copytree(base / "llama", base / "part") / "model.safetensors"
    weights = load_file(part)
    del weights["model.norm.weight"]
    save_file(weights, part, {"format": "pt"})


def changed(source: Path, target: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Copy a folder with another value in one of its JSON files."""
    shutil.copytree(source, target)
    found = json.loads((target / name).read_text("utf-8"))
    change(found)
    (target / name).write_text(json.dumps(found), "utf-8")


def train(words: str) -> None:
    """Run the command's work in this process; what the words leave open makes it small."""
    told = words.split()
    model = () if {"--hf", "--model"} & set(told) else ("--model", "gpt-2x32")
    ours = [*TINY[2:], *model, "--steps", "1", "--lr", "1e-3", "--data", "words.txt", "--out", f"run{next(_RUNS)}"]
    assert _main.train(parse([*ours, *told])) == 0


def command(part: str, wrong: str, *right: str) -> None:
    """Add a case of words on the command line that are refused, and of those that follow what is said."""
    row(part, lambda: train(wrong), *(lambda words=words: train(words) for words in right))


def without(part: str, package: str, wrong: Callable[[], Any], *right: Callable[[], Any]) -> None:
    """Add a case for a package that is missing: what works without it, and all of it once it is there."""

    @case(part)
    def follow() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with refused(part):
                wrong()
            for each in right:
                each()
        pytest.importorskip(package)
        wrong()


def unreadable(path: str, read: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that reads while the system refuses to open a file: no right is refused to root."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(name: Any, *arguments: Any, **named: Any) -> Any:
            if str(name).endswith(path):
                raise PermissionError(13, "Permission denied")
            return function(name, *arguments, **named)

        return opened

    def tried() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", refusing(os.open))
            patch.setattr(Path, "read_bytes", refusing(Path.read_bytes))
            read()

    return tried

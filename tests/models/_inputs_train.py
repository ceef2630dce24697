"""Cases of ``pstar-train``: options, data and folders."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from _followed import refused
from _inputs_of_train import case, command, row, train, unreadable, without
from _transformers_folder import PAIRS, TALKS, save_lines
from ps_core import InvalidInput
from ps_models.train import TrainOptions, _loggers
from ps_models.train._command_line import parse
from ps_models.train._data import PackedTokens, corpus
from ps_models.train._options import read

# Options.

command("{} is not an option; {}", "--btach 3", "--batch 3")
command("{} ({} --help lists the options)", "--data", "--data words.txt")


def allowed_by(words: str) -> Any:
    """Return a value that an option's message says is allowed."""
    for pattern, make in (
        (r"one of ([\w.-]+)", str),
        (r"size like (\w+)", str),
        (r"whole number (?:of at least|from) (\d+)", int),
        (r"at least ([\d.]+)", float),
        (r"number above [\d.]+ and (?:at most|below) ([\d.]+)", lambda found: float(found) / 2),
        (r"number above ([\d.]+)", lambda found: float(found) + 1),
    ):
        if found := re.search(pattern, words):
            return make(found[1])
    return {"true or false": True, "one or more texts": ("a",)}.get(words, "a")


@case("train/_options.py:__post_init__", "train/_options.py:read")
def every_option() -> None:
    for each in fields(TrainOptions):
        said = f"--{each.name.replace('_', '-')}: found {{}}, allowed is "
        with refused(said) as caught:
            TrainOptions(**{each.name: object()})
        told = str(caught.value).partition(", allowed is ")[2]
        value = allowed_by(told)
        try:
            TrainOptions(**{each.name: value})
        except InvalidInput as error:
            assert told not in str(error), "another option is missing, at most"  # noqa: PT017 - it may be accepted
        if isinstance(value, int | float) and not isinstance(value, bool):
            with refused(said):
                read(each, "many")
            assert read(each, str(value)) == value


command(
    "--device-memory: found {} with --device cpu",
    "--device cpu --device-memory 4MB",
    "--device emulated --device-memory 4MB",
    "--device auto --device-memory 4MB",
    "--device cpu --host-memory 64MB",
)
command(
    "--device: found 'emulated' without --device-memory", "--device emulated", "--device emulated --device-memory 4MB"
)
command(
    "--offload-checkpoints: found with --no-checkpointing",
    "--offload-checkpoints --no-checkpointing",
    "--offload-checkpoints",
    "--no-checkpointing",
)
command(
    "--step-speculative: found with --accumulate {}",
    "--step-speculative --accumulate 2",
    "--step-speculative --accumulate 1",
    "--accumulate 2",
)
command("--patience: found {} with --eval-every 0", "--patience 2 --eval-every 0", "--patience 2 --eval-every 1")
command("--disk-dir: found {} without --disk", "--disk-dir texts", "--disk-dir texts --disk 4MB --host-memory 64MB")
command(
    "--model: found {} with --hf",
    "--hf llama --model gpt-2x32",
    "--hf llama",
    "--model gpt-2x32",
)


@case("--{}: found {}{}; allowed {}", "train/_option_conflicts.py:_check_source")
def options_of_other_models() -> None:
    for wrong, right in (
        ("--pack", "--hf llama --pack --data lines.jsonl"),
        ("--hf llama --vocab 300", "--model gpt-2x32 --vocab 300"),
        ("--hf llama --lora-merge", "--hf llama --lora 2 --lora-merge"),
    ):
        with refused("--{}: found {}{}; allowed "):
            train(wrong)
        train(right)


def config(name: str, text: str) -> str:
    Path(name).write_text(text, "utf-8")
    return f"--config {name}"


def config_row(part: str, name: str, wrong: str, *right: str) -> None:
    row(
        part,
        lambda: train(config(name, wrong)),
        *(lambda text=text: train(config(name, text)) for text in right),
    )


config_row("--config: cannot read {}: {}; allowed is a {} file", "a.toml", "warmup =", "warmup = 0")
config_row("holds no options by name; allowed are lines like `batch: 8`", "a.yaml", "- 8\n", "warmup: 0\n")
config_row("sets {}, which is not an option; {}", "a.toml", "wramup = 0", "warmup = 0")
config_row("sets {} twice; allowed is once", "a.toml", "log-every = 1\nlog_every = 1", "log-every = 1")
without(
    "needs the package yaml; allowed without it is a TOML file",
    "yaml",
    lambda: train(config("a.yaml", "warmup: 0\n")),
    lambda: train(config("a.toml", "warmup = 0\n")),
)


@case("--log: found {}, which is not installed; allowed without it is to leave --log out")
def a_logger_that_is_missing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_loggers._NEEDS, "tensorboard", "no_such_package")
        with refused("which is not installed; allowed without it is to leave --log out"):
            train("--log tensorboard")
    train("")


@case("WORLD_SIZE: found several processes, and the package ps-dist is not installed")
def several_processes_without_the_package() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with refused("allowed without it is one"):
            train("")
        patch.setenv("WORLD_SIZE", "1")
        train("")


# Models.

command("--model: found {}; {}", "--model gpt-9z", "--model gpt-2x32")
command(
    "--untied-head: found with --model {}, and a BERT's head",
    "--untied-head --model bert-2x32",
    "--untied-head --model gpt-2x32",
)
command(
    "--cpu-embedding: found with --model {}, whose head is its token table",
    "--cpu-embedding",
    "--cpu-embedding --untied-head",
)
command(
    "--head-tiles: found {} with --model {}, whose head is its token table",
    "--head-tiles 2",
    "--head-tiles 2 --untied-head",
)
command(
    "--head-tiles: found {}, allowed is at most {}", "--head-tiles 265 --untied-head", "--head-tiles 264 --untied-head"
)
command("--vocab: found {}, allowed is at least {}", "--vocab 100", "--vocab 264")
command(
    "--mask-token: found {} with {}; allowed with a BERT only", "--mask-token 3", "--mask-token 3 --model bert-2x32"
)
command(
    "--mask-token: found none, and {} no mask",
    "--model bert-2x32 --data tokens.bin --vocab 264",
    "--model bert-2x32 --data tokens.bin --vocab 264 --mask-token 263",
)
command(
    "--mask-token: found {}, allowed is 0 to {} (see --vocab)",
    "--model bert-2x32 --data tokens.bin --vocab 264 --mask-token 264",
    "--model bert-2x32 --data tokens.bin --vocab 264 --mask-token 263",
    "--model bert-2x32 --data tokens.bin --vocab 265 --mask-token 264",
)
command("--seq: found {}, allowed with {} is at least {}", "--model bert-2x32 --seq 7", "--model bert-2x32 --seq 8")
command(
    "--data: found prompts with completions, or conversations, with --model {}",
    "--model bert-2x32 --data pairs.jsonl --seq 48",
    "--model bert-2x32 --data words.txt",
)


@case("--device: found 'cuda', but PyTorch finds none; allowed here are cpu and emulated")
def no_card() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with refused("allowed here are cpu and emulated"):
            train("--device cuda")
        train("--device cpu")
        train("--device emulated --device-memory 4MB")


# Models of transformers.

command("{}: found {}, which is no folder; allowed is one", "--hf nowhere", "--hf llama")
without(
    "{}: needs the package {}; allowed without it is to leave {} out",
    "peft",
    lambda: train("--hf llama --lora 2"),
    lambda: train("--hf llama"),
)
command("{}: cannot read the tokenizer in {}", "--tokenizer empty", "--tokenizer tokenizer", "--tokenizer llama")
command("has no token that ends a text; allowed is one with an eos_token", "--tokenizer no-end", "--tokenizer llama")
command("--seq: found {}, allowed with {} is at most {}", "--hf llama --seq 65", "--hf llama --seq 64")
command("has no causal language model of transformers", "--hf empty", "--hf llama")
# Transformers gives any BERT a head for the next token, but only a decoder hides that token from it.
command('has a {} without "is_decoder": true', "--hf encoder", "--hf bert")
command("--hf: cannot read the weights in", "--hf no-weights", "--hf llama")
command("--tokenizer: found one of {} tokens, allowed with", "--hf small", "--hf llama")
command(
    "is no linear layer, so PEFT would",
    "--hf mixtral --lora 2 --lora-targets all-linear",
    "--hf mixtral --lora 2 --lora-targets q_proj v_proj",
)
command(
    "are one weight, and one of them has an adapter",
    "--hf llama-tied --lora 2 --lora-targets lm_head --lora-merge",
    "--hf llama-tied --lora 2 --lora-targets lm_head",
    "--hf llama-tied --lora 2 --lora-targets q_proj --lora-merge",
)
command("allowed is a folder whose files fit its config.json", "--hf wider", "--hf llama")
command("--hf: {} lacks {} tensors of {}", "--hf part", "--hf llama")
command(
    "train/_transformers_model.py:with_adapters",
    "--hf llama --lora 2 --lora-targets no_such",
    "--hf llama --lora 2 --lora-targets q_proj",
)
command(
    "train/_packing_check.py:check_packing",
    "--hf mamba --pack --data lines.jsonl",
    "--hf mamba --data lines.jsonl",
    "--hf llama --pack --data lines.jsonl",
)

# Data.

command(
    "beside token files; allowed is one kind or the other",
    "--data tokens.bin words.txt",
    "--data tokens.bin",
    "--data words.txt",
)
command("--pack: found with token files", "--hf llama --data tokens.bin --pack", "--hf llama --data lines.jsonl --pack")
command("{}: found {}, which does not exist", "--data nowhere", "--data words.txt", "--data texts")
command(
    "found no document for {}; allowed are two or more, or --eval-data",
    "--hf llama --pack --data words.txt",
    "--hf llama --pack --data words.txt texts",
    "--hf llama --pack --data words.txt --eval-data texts",
)
command(
    "no samples for {} with an answer in their first {} tokens",
    "--data long.jsonl",
    "--data long.jsonl brief.jsonl",
    "--data long.jsonl --seq 32",
)
command(
    "tokens for {} are no sequence of {}; allowed is more data",
    "--data short.txt",
    "--data short.txt words.txt",
    "--data short.txt --seq 2 --validation 0.2",
    "--data short.txt --seq 8 --validation 0.5",
)
command("--tokenizer: found {} with token files", "--data tokens.bin --tokenizer tokenizer", "--data tokens.bin")
command(
    "--data: found token {}, allowed is 0 to {} (see --vocab)",
    "--data tokens.bin --vocab 150",
    "--data tokens.bin --vocab 200",
)
command("bytes of tokens; allowed is a multiple of {}", "--data odd.bin", "--data tokens.bin")
command("tokens, its header says {}; allowed is a whole file", "--data cut.npy", "--data tokens.npy")
command("is not a .npy file of tokens; allowed is one dimension", "--data square.npy", "--data tokens.npy")
row(
    "--data: cannot read {}: {}; allowed is a file that",
    unreadable("tokens.bin", lambda: train("--data tokens.bin")),
    lambda: train("--data tokens.bin"),
)
row(
    "{}: cannot read {}: {}; allowed is a file that",
    unreadable("words.txt", lambda: train("")),
    lambda: train(""),
)
without(
    "needs the package datasets; allowed without it are JSON lines and text",
    "datasets",
    lambda: train(f"{table()} --seq 48"),
    lambda: train("--data pairs.jsonl --seq 48"),
    lambda: train("--data words.txt"),
)
without(
    "--tokenizer: {} needs the package tokenizers; allowed without it is bytes",
    "tokenizers",
    lambda: train("--tokenizer tokenizer/tokenizer.json --data words.txt"),
    lambda: train("--tokenizer bytes"),
)
command(
    "--tokenizer: cannot read {}: {}; allowed is bytes, or a Hugging Face tokenizer.json",
    "--tokenizer words.txt",
    "--tokenizer bytes",
    "--tokenizer tokenizer/tokenizer.json",
)


def table() -> str:
    if importlib.util.find_spec("pyarrow") is None:
        Path("a.parquet").write_bytes(b"PAR1")
        return "--data a.parquet"
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), "a.parquet")
    return "--data a.parquet"


@case("allowed is a table that the package datasets reads")
def no_table() -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    Path("a.parquet").write_bytes(b"PAR1")
    with refused("allowed is a table that the package datasets reads"):
        train("--data a.parquet")
    train(f"{table()} --seq 48")


@case("it was cut short during the run; allowed is the file as it was")
def cut_short() -> None:
    whole = Path("tokens.bin").read_bytes()
    found = PackedTokens(corpus(parse(["--data", "tokens.bin", "--seq", "16"])).train, 5)
    first = found.batch(0, 3)
    os.truncate("tokens.bin", 100)
    with refused("it was cut short during the run"):
        found.batch(0, 3)
    Path("tokens.bin").write_bytes(whole)
    again = PackedTokens(corpus(parse(["--data", "tokens.bin", "--seq", "16"])).train, 5)
    assert torch.equal(again.batch(0, 3), first)


def lines(part: str, wrong: Any, *right: Any, tokenizer: str = "tokenizer") -> None:
    """A line of a file that is refused, and those that follow the message."""

    def read_lines(line: Any) -> Callable[[], None]:
        def follow() -> None:
            save_lines(Path("own.jsonl"), [line] * 40)
            train(f"--seq 60 --data own.jsonl --tokenizer {tokenizer}")

        return follow

    row(part, read_lines(wrong), *map(read_lines, right))


ASKED = {"role": "user", "content": "Hello"}
lines("{} is {}; allowed is {}", {"answer": "a"}, {"text": "a " * 40}, PAIRS[0], TALKS[0], "words " * 30)
lines('"messages" has nothing of the role "assistant"', {"messages": [ASKED]}, TALKS[0])
lines(
    'has a "prompt" or a "completion" that is no text, or lacks one of them',
    {"prompt": "a"},
    PAIRS[0],
    {"prompt": [ASKED], "completion": [{"role": "assistant", "content": "Hello"}]},
)
lines(
    'message {} is no object with "role" and "content"',
    {"messages": [{"role": "user"}, *TALKS[0]["messages"]]},
    {"messages": [ASKED, {"role": "assistant", "content": "Hello"}]},
)
lines(
    'allowed are a list under "tools" (or its JSON as a text), and an object under "chat_template_kwargs"',
    {**TALKS[0], "tools": "add"},
    {**TALKS[0], "tools": [{"name": "add"}]},
    {**TALKS[0], "tools": json.dumps([{"name": "add"}])},
    {**TALKS[0], "chat_template_kwargs": {"mood": "calm"}},
)


@case("train/_training_samples.py:encoded", "train/_text_sources.py:_json_lines")
def conversations() -> None:
    with refused("the tokenizer has no chat template; allowed is one with a template"):
        train("--seq 60 --data talks.jsonl --tokenizer plain-tokenizer")
    train("--seq 60 --data talks.jsonl --tokenizer tokenizer")
    Path("own.jsonl").write_text("{'text'", "utf-8")
    with refused("own.jsonl{} is {}; allowed is a JSON text, or an object"):
        train("--data own.jsonl")
    save_lines(Path("own.jsonl"), ["words " * 30] * 40)
    train("--data own.jsonl")


# The run's folder.

command(
    "--out: cannot make {}: {}; allowed is a folder that can be written to", "--out words.txt/run", "--out texts/run"
)
row(
    "--out: cannot write in {}: {}; allowed is a folder that can be written to",
    unreadable(".lock", lambda: train("--out run")),
    lambda: train("--out another"),
)
DISK_IN = "--device emulated --device-memory 1MiB --disk 1MiB --disk-dir"
command("--disk-dir: cannot make {}: {}; allowed is", f"{DISK_IN} words.txt", f"{DISK_IN} texts", f"{DISK_IN} new")


@case("holds a run without run.json; allowed is a new folder, or a whole run")
def half_a_run() -> None:
    train("--out run")
    shutil.move("run/run.json", "kept")
    with refused("allowed is a new folder, or a whole run"):
        train("--out run")
    train("--out another")
    shutil.move("kept", "run/run.json")
    train("--out run")


@case("--out: cannot read {}: {}; allowed is a new folder, or a whole run")
def a_run_that_cannot_be_read() -> None:
    train("--out run")
    whole = Path("run/run.json").read_text("utf-8")
    Path("run/run.json").write_text("{", "utf-8")
    with refused("--out: cannot read {}: {}; allowed is a new folder, or a whole run"):
        train("--out run")
    train("--out another")
    Path("run/run.json").write_text(whole, "utf-8")
    train("--out run")


@case("--out: {} holds another run")
def another_run() -> None:
    train("--out run")
    with refused("allowed are the same model and data options, or another --out"):
        train("--out run --seed 5")
    train("--out run --steps 2")
    train("--out another --seed 5")


@case("--out: {} is in use by another process; allowed is a folder nobody else trains in")
def a_folder_in_use() -> None:
    Path("run").mkdir()
    holds = (
        "import fcntl, sys; file = open('run/.lock', 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holds], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"held\n"
        with refused("allowed is a folder nobody else trains in"):
            train("--out run")
        train("--out another")
        other.stdin.close()
    train("--out run")

"""Options: one dataclass, and what is made from it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import Field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _trainer import numbers, train
from ps_core import InvalidInput
from ps_models.train import TrainOptions, main
from ps_models.train._command_line import make_parser, parse
from ps_models.train._option_files import from_text, merged
from ps_models.train._option_tables import table, usage
from ps_models.train._options import flag_of, refusal, rule_for
from ps_models.train._schedule import learning_rate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
TABLES = re.compile(r"(?<=<!-- options -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)
Capture = pytest.CaptureFixture[str]

WRONG = {
    "--batch 0": "--batch: found 0, allowed is a whole number from 1 to 1048576",
    "--batch two": "--batch: found 'two', allowed is a whole number from 1 to 1048576",
    "--seq 1": "--seq: found 1, allowed is a whole number of at least 2",
    "--seed -1": "--seed: found -1, allowed is a whole number from 0 to 9223372036854775807",
    "--seed 9223372036854775808": "--seed: found 9223372036854775808, allowed is a whole number from 0 to",
    "--steps 1.5": "--steps: found '1.5', allowed is a whole number of at least 1",
    "--lr nan": "--lr: found nan, allowed is a number of at least 0",
    "--lr -1": "--lr: found -1.0, allowed is a number of at least 0",
    "--beta1 1": "--beta1: found 1.0, allowed is a number of at least 0 and below 1",
    "--eps 0": "--eps: found 0.0, allowed is a number above 0",
    "--final-lr 2": "--final-lr: found 2.0, allowed is a number of at least 0 and at most 1",
    "--validation 0.9": "--validation: found 0.9, allowed is a number above 0 and at most 0.5",
    "--precision fp8": "--precision: found 'fp8', allowed is one of bf16, fp16, fp32",
    "--schedule step": "--schedule: found 'step', allowed is one of cosine, constant, linear",
    "--device tpu": "--device: found 'tpu', allowed is one of auto, cpu, emulated, cuda",
    "--device-memory 3ells": "--device-memory: found '3ells', allowed is a size like 20GiB or 20GB, at least 4096",
    "--device-memory 12": "--device-memory: found '12', allowed is a size like 20GiB or 20GB, at least 4096",
    "--host-memory 0": "--host-memory: found '0', allowed is a size like 20GiB or 20GB, at least 4096",
    "--log tensorbored": "--log: found 'tensorbored', allowed is one of tensorboard, wandb",
    "--model gpt-9z": "--model: found 'gpt-9z'; no model is called 'gpt-9z'; did you mean gpt-8b or gpt-6b or gpt-4b?",
    "--data nowhere": "--data: found 'nowhere', which does not exist; allowed are files and folders",
    "--data": "--data: expected at least one argument (pstar-train --help lists the options)",
    "--config nowhere.toml": "--config: cannot read 'nowhere.toml': [Errno 2] No such file or directory: "
    "'nowhere.toml'; allowed is a TOML file",
    "--tokenizer nowhere.json": "--tokenizer: cannot read 'nowhere.json': [Errno 2] No such file or directory: "
    "'nowhere.json'; allowed is bytes, or a Hugging Face tokenizer.json",
    "--vocab 100": "--vocab: found 100, allowed is at least 264, which the tokenizer has",
    "--btach 3": "--btach is not an option; did you mean --batch?",
    "--eval_evry=3": "--eval_evry is not an option; did you mean --eval-every?",
    "-batch 3": "-batch is not an option; did you mean --batch?",
    "--no-checkpointin": "--no-checkpointin is not an option; did you mean --no-checkpointing?",
    "--epochs 3": "--epochs is not an option; pstar-train --help lists the options",
    "--dropout 0.1": "--dropout is not an option; pstar-train --help lists the options",
    "--confg a.toml": "--confg is not an option; did you mean --config?",
    "--xyzzy": "--xyzzy is not an option; pstar-train --help lists the options",
    "gpt2": "unrecognized arguments: gpt2 (pstar-train --help lists the options)",
    "--device emulated": "--device: found 'emulated' without --device-memory, which says how large the accelerator is",
    "--device cpu --device-memory 1GB": "--device-memory: found '1GB' with --device cpu, which has --host-memory only;",
    "--cpu-embedding": "--cpu-embedding: found with --model gpt-10m, whose head is its token table and needs",
    "--head-tiles 2": "--head-tiles: found 2 with --model gpt-10m, whose head is its token table; allowed with",
    "--untied-head --model bert-2x32": "--untied-head: found with --model bert-2x32, and a BERT's head is its token",
    "--patience 0": "--patience: found 0, allowed is a whole number of at least 1",
    "--patience 2 --eval-every 0": "--patience: found 2 with --eval-every 0, which validates at the end only; allowed",
    "--config nowhere.yml": "--config: cannot read 'nowhere.yml': [Errno 2] No such file or directory: 'nowhere.yml'; "
    "allowed is a YAML file",
    "--disk-dir here": "--disk-dir: found 'here' without --disk, which says how much of it",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_value_is_one_line_and_status_2(
    words: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"pstar-train: {WRONG[words]}")
    assert told.err.count("\n") == 1
    assert told.out == ("reading the standard library's source\n" if words == "--vocab 100" else "")
    assert not list(tmp_path.iterdir()), "nothing was made"


WRONG_FILES = {
    "batch = 0": "--batch: found 0, allowed is a whole number from 1 to 1048576",
    "batch = true": "--batch: found True, allowed is a whole number from 1 to 1048576",
    "batch = 2.0": "--batch: found 2.0, allowed is a whole number from 1 to 1048576",
    "lr = 'fast'": "--lr: found 'fast', allowed is a number of at least 0",
    "keep_best = 1": "--keep-best: found 1, allowed is true or false",
    "data = 'a.txt'": "--data: found 'a.txt', allowed is one or more texts",
    "data = [3]": "--data: found [3], allowed is one or more texts",
    "model = ''": "--model: found '', allowed is a text that is not empty",
    "precison = 'bf16'": "--config: 'run.toml' sets 'precison', which is not an option; did you mean precision?",
    "config = 'b.toml'": "--config: 'run.toml' sets 'config', which is not an option; pstar-train --help lists",
    "log-every = 1\nlog_every = 2": "--config: 'run.toml' sets 'log_every' twice; allowed is once",
    "batch =": "--config: cannot read 'run.toml': Invalid value",
    "[train]\nbatch = 1": "--config: 'run.toml' sets 'train', which is not an option;",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_likewise(text: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(text, "utf-8")
    assert main(["--config", "run.toml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"pstar-train: {WRONG_FILES[text]}")
    assert told.count("\n") == 1


WORDS = ("", "x y", "-1", "0", "1.5", "nan", "inf", "-inf", "-0.1", "1e400", "9" * 30, "true", "a\0b", "\udc80")
VALUES = ("true", "-1", "1.5", "nan", "inf", "''", "'x y'", r'"\u0000"', "[1]", "[[]]", "{}", "2020-01-01", "9" * 19)


def refused(row: Field[Any]) -> Iterator[tuple[list[str], str, str]]:
    """What an option does not take: the command line, the file that is its ``--config``, and what is said."""
    rule = rule_for(row)
    for word in () if isinstance(row.default, bool) else WORDS:
        try:
            value: Any = rule.read(word)
        except ValueError:
            yield [f"{flag_of(row)}={word}"], "", refusal(row, [word] if rule.several else word)
            continue
        value = (value,) if rule.several else value
        if not rule.good(value):
            yield [f"{flag_of(row)}={word}"], "", refusal(row, value)
    for text in VALUES:
        value = tomllib.loads(f"it = {text}")["it"]
        value = tuple(value) if isinstance(value, list) else value
        if not rule.good(value):
            yield ["--config", "run.toml"], f"{row.name} = {text}\n", refusal(row, value)


@pytest.mark.parametrize("row", fields(TrainOptions), ids=lambda row: row.name)
def test_every_option_refuses_in_one_line(
    row: Field[Any], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = list(refused(row))
    assert len(cases) > 5
    for words, text, told in cases:
        if text:
            Path("run.toml").write_text(text, "utf-8")
        assert main(words) == 2, words
        said = capsys.readouterr()
        assert said.err == f"pstar-train: {' '.join(told.split())}\n"
        assert said.out == ""
        Path("run.toml").unlink(missing_ok=True)
        assert not list(tmp_path.iterdir()), "nothing was made"


EXTREME = (
    "--seed 9223372036854775807 --keep 9223372036854775807 --log-every 9223372036854775807",
    "--temperature 1e-300 --sample 3",
    "--temperature 1e300 --sample 3",
    "--lr 1e300 --sample 3",
    "--eps 1e-300 --clip 1e-300",
    "--eps 1e300 --clip 1e300 --weight-decay 1e300 --decay all",
    "--beta1 0.9999999999999999 --beta2 0",
    "--eval-batches 9223372036854775807 --eval-every 9223372036854775807 --warmup 9223372036854775807",
    "--peak-tflops 1e-300",
    "--validation 1e-300",
    "--seq 9223372036854775807",
    "--vocab 2147483648",
    "--device emulated --device-memory 1152921504606846976",
    "--host-memory 1152921504606846976",
    "--host-memory 1",
)


@pytest.mark.parametrize("words", EXTREME)
def test_what_is_allowed_but_odd_ends_in_words(words: str, tmp_path: Path, capsys: Capture) -> None:
    status = train(tmp_path / "run", "--steps", 2, *words.split())
    said = capsys.readouterr().err
    assert (status, said.count("\n")) in ((0, 0), (1, 1), (2, 1), (3, 1)), said


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("batch = 3\nlog-every = 7\nlr = 1\ndata = ['a', 'b']\n", "utf-8")
    options = parse(["--config", str(tmp_path / "run.toml"), "--batch", "5", "--no-checkpointing"])
    expected = TrainOptions(batch=5, log_every=7, lr=1, data=("a", "b"), checkpointing=False)
    assert options == expected


def test_every_option_is_on_the_command_line_with_its_default() -> None:
    actions = {action.dest: action for action in make_parser()._actions}
    names = {row.name for row in fields(TrainOptions)}
    assert set(actions) == names | {"help", "version", "config"}
    assert parse([]) == TrainOptions()
    for row in fields(TrainOptions):
        assert flag_of(row) in actions[row.name].option_strings
        told = re.search(r"\(default: ([^)]*)\)", actions[row.name].help or "")
        if row.default not in (None, ()):
            shown = ("yes" if row.default else "no") if isinstance(row.default, bool) else str(row.default)
            assert told is not None
            assert told[1] == shown


def texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@given(
    text=texts(),
    paths=st.lists(texts(), max_size=3),
    lr=st.floats(0, 1e300),
    seed=st.integers(0, 2**63 - 1),
    best=st.booleans(),
    clip=st.floats(0, 1),
)
def test_to_a_file_and_back(text: str, paths: list[str], lr: float, seed: int, best: bool, clip: float) -> None:
    options = TrainOptions(prompt=text, data=tuple(paths), lr=lr, seed=seed, keep_best=best, clip=clip, out=text)
    assert merged(from_text(options.to_toml(), "it.toml"), {}) == options


def test_every_rule_refuses_what_it_does_not_allow() -> None:
    for row in fields(TrainOptions):
        for value in (object(), b"x", math.inf, float("nan"), -1, "a\0b", ("a\0b",)):
            assert not rule_for(row).good(value), (row.name, value)
            with pytest.raises(InvalidInput, match=re.escape(flag_of(row))):
                replace(TrainOptions(), **{row.name: value})
        assert rule_for(row).good(row.default) or row.default is None


def test_the_page_holds_the_tables_of_the_code() -> None:
    page = PAGE.read_text("utf-8")
    found = TABLES.search(page)
    assert found is not None
    assert found[0] == table(), "python tests/models/test_train_options.py writes them anew"
    for row in fields(TrainOptions):
        assert f"| `{usage(row)}` |" in page


@pytest.mark.parametrize("schedule", ["cosine", "constant", "linear"])
def test_the_learning_rate(schedule: str) -> None:
    options = TrainOptions(steps=110, warmup=10, lr=2.0, schedule=schedule, final_lr=0.25)
    rates = [learning_rate(options, step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    last, middle = {"constant": (2.0, 2.0), "cosine": (0.5, 1.25), "linear": (0.5, 1.25)}[schedule]
    assert rates[-1] == pytest.approx(last)
    assert rates[59] == pytest.approx(middle)
    assert all(a >= b for a, b in pairwise(rates[9:]))
    quarter = {"constant": 2.0, "cosine": 0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2, "linear": 1.625}[schedule]
    assert rates[34] == pytest.approx(quarter)


@pytest.mark.parametrize(("steps", "warm"), [(5, 0), (200, 20), (5000, 100)])
def test_the_warm_up_that_nobody_chose(steps: int, warm: int) -> None:
    assert TrainOptions(steps=steps).warmup_steps == warm
    assert TrainOptions(steps=steps, warmup=3).warmup_steps == 3


def test_a_yaml_file_says_the_same_as_a_toml_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    texts = {
        "a.toml": 'batch = 4\nlr = 3e-4\ndata = ["x.txt", "y.txt"]\nkeep_best = true\ndevice-memory = "20GiB"\n',
        "a.yaml": "batch: 4\nlr: 3e-4\ndata: [x.txt, y.txt]\nkeep_best: true\ndevice-memory: 20GiB\n",
        "empty.yml": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, "utf-8")
    told = {name: parse(["--config", str(tmp_path / name), "--steps", "7"]) for name in texts}
    assert told["a.yaml"] == told["a.toml"]
    assert (told["a.yaml"].lr, told["a.yaml"].steps) == (3e-4, 7)
    assert told["empty.yml"] == TrainOptions(steps=7)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("batch: [", "cannot read"),
        ("- batch", "holds no options by name"),
        ("btach: 3", "sets 'btach', which is not an option; did you mean batch"),
        ("weight-decay: 0.1\nweight_decay: 0.2", "sets 'weight_decay' twice"),
        ("batch: 4\nlr: 1\nbatch: 8", "sets 'batch' twice"),
        ("batch: 0", "--batch: found 0"),
    ],
)
def test_a_yaml_file_that_cannot_be_used(text: str, why: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    (tmp_path / "a.yaml").write_text(text, "utf-8")
    with pytest.raises(InvalidInput) as raised:
        parse(["--config", str(tmp_path / "a.yaml")])
    assert why in str(raised.value)
    assert str(raised.value).count("\n") == 0


if __name__ == "__main__":
    PAGE.write_text(TABLES.sub(lambda _: table(), PAGE.read_text("utf-8")), "utf-8")


@pytest.mark.parametrize(("precision", "native"), [("bf16", False), ("bf16", True), ("fp16", False), ("fp32", False)])
def test_16_bits_that_take_long_here_are_named(
    precision: str, native: bool, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without instructions for them takes many times as long."""
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: native)
    assert train(tmp_path / "run", "--device", "cpu", "--steps", 1, "--precision", precision) == 0
    told = f"this processor has no instructions for {precision}: with --precision fp32 a step takes a fraction of"
    assert (told in capsys.readouterr().out) is (precision != "fp32" and not native)


def test_parameters_kept_in_fp32(tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture) -> None:
    """All of them give the numbers of --precision fp32; a pattern of none is named."""
    caplog.set_level("INFO", "ps_core")
    few = ("--steps", 2, "--device", "cpu")
    assert train(tmp_path / "fp32", *few, "--precision", "fp32") == train(tmp_path / "bf16", *few) == 0
    assert train(tmp_path / "kept", *few, "--keep-fp32", "*.weight", "*.bias") == 0
    assert numbers(tmp_path / "kept") == numbers(tmp_path / "fp32") != numbers(tmp_path / "bf16")
    assert train(tmp_path / "none", *few, "--keep-fp32", "norms.*") == 0
    assert "keep_fp32 has 'norms.*', which is the whole name of no parameter" in caplog.text
    assert train(tmp_path / "kept", *few, "--steps", 3) == 2
    assert "--keep-fp32 *.weight *.bias there, none now" in capsys.readouterr().err
